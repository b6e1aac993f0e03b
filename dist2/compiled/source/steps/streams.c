/* Reading from stream sockets: the counterpart of `read_whole` in express_socket_long.py. */

#include "steps.h"

#include <errno.h>
#include <poll.h>
#include <sys/socket.h>

#define WAIT_MS 1

/* The destination of bytes of a stream. */
typedef struct {
    int fd;
    char *at;
    size_t missing;
    short awaited;
} Intake;

/* Read the bytes that have come; 1 if the stream has ended or failed, 0 if all is here or nothing more has come. */
static int
take_some(Intake *intake)
{
    while (intake->missing) {
        ssize_t count = recv(intake->fd, intake->at, intake->missing, MSG_DONTWAIT);
        if (count > 0) {
            intake->at += count;
            intake->missing -= (size_t)count;
        }
        else if (count == 0 || (errno != EAGAIN && errno != EWOULDBLOCK && errno != EINTR)) {
            return 1;
        }
        else {
            return 0;
        }
    }
    return 0;
}

/* Read all, waiting first by yields and then asleep; 1 as `take_some`. It returns early if nothing comes for a
   moment, a signal does, or awaited room to write is there. */
static int
take_all(Intake *intake)
{
    Yielding yielding = {0};
    while (1) {
        size_t before = intake->missing;
        if (take_some(intake)) {
            return 1;
        }
        if (!intake->missing) {
            return 0;
        }
        if (intake->missing < before) {
            yielding.since_ns = 0;
        }
        struct pollfd event = {intake->fd, (short)(POLLIN | intake->awaited), 0};
        if (give_way(&yielding)) {
            if (!intake->awaited) {
                continue;
            }
            if (poll(&event, 1, 0) > 0 && event.revents & POLLOUT) {
                return 0;
            }
        }
        else if (poll(&event, 1, WAIT_MS) <= 0 || event.revents & POLLOUT) {
            return 0;
        }
    }
}

static PyObject *
read_whole(PyObject *module, PyObject *args)
{
    Intake intake = {0};
    unsigned long long address;
    Py_ssize_t nbytes;
    int writes;
    (void)module;
    if (!PyArg_ParseTuple(args, "iKnp", &intake.fd, &address, &nbytes, &writes)) {
        return NULL;
    }
    if (nbytes < 0) {
        return PyErr_Format(PyExc_ValueError, "nbytes: %zd", nbytes);
    }
    intake.at = (char *)(uintptr_t)address;
    intake.missing = (size_t)nbytes;
    intake.awaited = writes ? POLLOUT : 0;
    int ended;
    Py_BEGIN_ALLOW_THREADS;
    ended = take_all(&intake);
    Py_END_ALLOW_THREADS;
    Py_ssize_t count = nbytes - (Py_ssize_t)intake.missing;
    return PyLong_FromSsize_t(ended ? ~count : count);
}

static PyMethodDef methods[] = {
    {"read_whole", read_whole, METH_VARARGS, "Read a known number of bytes from a socket."},
    {NULL, NULL, 0, NULL},
};

int
streams_ready(PyObject *module)
{
    return PyModule_AddFunctions(module, methods);
}
