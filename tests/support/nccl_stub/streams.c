/* Streams that run work in order on a thread each, and events as CUDA has them. */

#define _GNU_SOURCE
#include "stub.h"

#include <pthread.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

typedef struct Task {
    void (*work)(void *);
    void *argument;
    struct Task *next;
} Task;

struct Stream {
    pthread_t thread;
    pthread_mutex_t lock;
    pthread_cond_t changed;
    Task *first, **last;
    int ending, max_delay_us;
    unsigned seed;
};

/* The mark that one record of an event sets. An event refers to the mark of its latest record. */
typedef struct {
    _Atomic int users, passed;
    struct timespec when;
} Mark;

struct Event {
    Mark *mark;
};

static void
mark_drop(Mark *mark)
{
    if (mark != NULL && atomic_fetch_sub(&mark->users, 1) == 1) {
        free(mark);
    }
}

static void *
stream_main(void *argument)
{
    Stream *stream = argument;
    for (;;) {
        pthread_mutex_lock(&stream->lock);
        while (stream->first == NULL && !stream->ending) {
            pthread_cond_wait(&stream->changed, &stream->lock);
        }
        Task *task = stream->first;
        if (task == NULL) {
            pthread_mutex_unlock(&stream->lock);
            return NULL;
        }
        stream->first = task->next;
        if (stream->first == NULL) {
            stream->last = &stream->first;
        }
        int delay = stream->max_delay_us ? (int)(rand_r(&stream->seed) % (unsigned)stream->max_delay_us) : 0;
        pthread_mutex_unlock(&stream->lock);
        if (delay) {
            usleep((useconds_t)delay);
        }
        task->work(task->argument);
        free(task);
    }
}

Stream *
stub_stream_create(int max_delay_us, unsigned seed)
{
    Stream *stream = calloc(1, sizeof *stream);
    stream->last = &stream->first;
    stream->max_delay_us = max_delay_us;
    stream->seed = seed;
    pthread_mutex_init(&stream->lock, NULL);
    pthread_cond_init(&stream->changed, NULL);
    pthread_create(&stream->thread, NULL, stream_main, stream);
    return stream;
}

/* Run the queued work, then end the thread. */
void
stub_stream_destroy(Stream *stream)
{
    pthread_mutex_lock(&stream->lock);
    stream->ending = 1;
    pthread_cond_signal(&stream->changed);
    pthread_mutex_unlock(&stream->lock);
    pthread_join(stream->thread, NULL);
    free(stream);
}

void
stream_run(Stream *stream, void (*work)(void *), void *argument)
{
    if (stream == NULL) {
        work(argument);
        return;
    }
    Task *task = malloc(sizeof *task);
    *task = (Task){work, argument, NULL};
    pthread_mutex_lock(&stream->lock);
    *stream->last = task;
    stream->last = &task->next;
    pthread_cond_signal(&stream->changed);
    pthread_mutex_unlock(&stream->lock);
}

void
stub_stream_run(Stream *stream, void (*work)(void *), void *argument)
{
    stream_run(stream, work, argument);
}

Event *
stub_event_create(void)
{
    return calloc(1, sizeof(Event));
}

void
stub_event_destroy(Event *event)
{
    mark_drop(event->mark);
    free(event);
}

static void
pass(void *argument)
{
    Mark *mark = argument;
    clock_gettime(CLOCK_MONOTONIC, &mark->when);
    atomic_store(&mark->passed, 1);
    mark_drop(mark);
}

void
stub_event_record(Event *event, Stream *stream)
{
    mark_drop(event->mark);
    event->mark = calloc(1, sizeof(Mark));
    event->mark->users = 2;
    stream_run(stream, pass, event->mark);
}

static void
await(void *argument)
{
    Mark *mark = argument;
    for (int spins = 0; !atomic_load(&mark->passed);) {
        pause_briefly(&spins);
    }
    mark_drop(mark);
}

void
stub_stream_wait_event(Stream *stream, Event *event)
{
    if (event->mark != NULL) {
        atomic_fetch_add(&event->mark->users, 1);
        stream_run(stream, await, event->mark);
    }
}

int
stub_event_query(Event *event)
{
    return event->mark == NULL || atomic_load(&event->mark->passed);
}

double
stub_event_elapsed_ms(Event *start, Event *end)
{
    const struct timespec *from = &start->mark->when, *to = &end->mark->when;
    return (double)(to->tv_sec - from->tv_sec) * 1e3 + (double)(to->tv_nsec - from->tv_nsec) / 1e6;
}
