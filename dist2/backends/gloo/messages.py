"""Point-to-point messages of a Gloo group.

Messages to oneself go through a `Mailbox`: Gloo has no connection to its own rank.
"""

from __future__ import annotations

import queue
import threading
from collections import defaultdict, deque
from collections.abc import Callable
from concurrent.futures import Future, wait
from datetime import timedelta
from typing import Any

import torch

from dist2.backends.base import GroupSpec, Tensors
from dist2.backends.carriers import Landing, as_bytes
from dist2.backends.gloo.core import GlooCore, left, translate
from dist2.errors import GroupAbortedError, MismatchError, OperationTimeoutError
from dist2.operation.record import Operation
from dist2.runtime.threads import Worker

IDLE_S = 2.0
"""How long an idle thread stays for the next message."""


class Messages(GlooCore):
    """Tensors travel as bytes, so every dtype goes."""

    def __init__(self, spec: GroupSpec, native: Any) -> None:
        super().__init__(spec, native)
        self._mailbox = Mailbox()
        self._waiters = Waiters(f"dist2-gloo-{spec.info.name}")

    def send(self, operation: Operation, inputs: Tensors, outputs: Tensors) -> Future[None] | None:
        peer, tag = operation.signature.peer, operation.signature.tag
        content = as_bytes(inputs[0])
        if peer == self.rank:
            self._mailbox.put(tag, content)
            return None
        # `content` may be a copy, which has to live until it was sent: the last function holds it.
        return self._run_beside(
            operation, lambda native: native.send([content], peer, tag), lambda work: content
        )

    def recv(self, operation: Operation, inputs: Tensors, outputs: Tensors) -> Future[None]:
        peer, tag = operation.signature.peer, operation.signature.tag
        if peer is None and self._mailbox.has(tag):
            peer = self.rank
        return self.receive(operation, outputs, peer)

    def receive(self, operation: Operation, outputs: Tensors, source: int | None) -> Future[None]:
        """Receive from this rank; None stands for any other rank."""
        tag = operation.signature.tag
        if source == self.rank:
            return self._recv_own(operation, outputs[0])
        landing = Landing(outputs[0])

        def start(native: Any) -> Any:
            if source is None:  # Gloo watches other ranks only: a later message to oneself is not seen
                return native.recv_anysource([landing.bytes], tag)
            return native.recv([landing.bytes], source, tag)

        def land(work: Any) -> None:
            operation.source = work._source_rank() if source is None else source
            landing.land()

        return self._run_beside(operation, start, land)

    def _recv_own(self, operation: Operation, output: torch.Tensor) -> Future[None]:
        landing, tag = Landing(output), operation.signature.tag

        def land(letter: Letter) -> None:
            operation.source = self.rank
            letter.read_into(landing.bytes)
            landing.land()

        return self._run_beside(operation, lambda native: self._mailbox.take(tag), land)

    def _run_beside(
        self, operation: Operation, start: Callable[[Any], Any], land: Callable[[Any], object]
    ) -> Future[None]:
        """Start a message, and wait for it on a separate thread: Gloo completes no future for messages.

        Args:
            operation: The operation, for errors.
            start: Given torch's object, returns torch's Work, or something else that has `wait`.
            land: Called with that Work once the message was sent or received, unless the group was aborted.
        """
        call = self.calls.begin()
        try:
            work = start(self.native)
        except BaseException as error:
            self.calls.end(call, None)
            raise translate(error, operation) from error

        def job() -> None:
            failure: BaseException | None = None
            try:
                work.wait(left(operation))
                if not call.done():
                    land(work)
            except BaseException as error:  # noqa: BLE001 - delivered to the caller
                failure = translate(error, operation)
            self.calls.end(call, failure)

        self._waiters.put(job)
        return call

    def _break_off(self, how: str, patience_s: float) -> None:
        self._mailbox.close()
        super()._break_off(how, patience_s)
        self._waiters.stop()


class Waiters:
    """As many threads as there are messages waited for, so that no wait stands behind another.

    Threads start when needed, are used again, and end when idle: a group without messages has none. The
    standard library's thread pool does the same, but the interpreter waits for its threads at the end,
    however long a receive may still take.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._idle = threading.Semaphore(0)  # threads without a job, less the jobs that no thread has taken
        self._stopped = False

    def put(self, job: Callable[[], None]) -> None:
        """Run a job, which must not raise, on a thread that has nothing else to do."""
        self._jobs.put(job)
        if not self._idle.acquire(blocking=False):
            Worker(self._name, self._run).start()

    def stop(self) -> None:
        """End idle threads now, and the others after their job."""
        self._stopped = True
        while self._idle.acquire(blocking=False):
            self._jobs.put(None)

    def _run(self) -> None:
        while True:
            try:
                job = self._jobs.get(timeout=IDLE_S)
            except queue.Empty:
                if self._idle.acquire(blocking=False):
                    return
                continue  # a job was put for this thread at the last moment
            if job is None:
                return
            job()
            del job  # it holds the tensors
            self._idle.release()
            if self._stopped and self._idle.acquire(blocking=False):
                return


class Letter:
    """A message from a rank to itself, sent or awaited."""

    def __init__(self, tag: int) -> None:
        self._tag = tag
        self._content: Future[torch.Tensor] = Future()

    def wait(self, timeout: timedelta) -> None:
        """Block until it is sent.

        Raises:
            OperationTimeoutError: It was not sent in time.
            GroupAbortedError: The group was taken down.
        """
        limit_s = timeout.total_seconds()
        if not wait([self._content], limit_s).done:
            message = f"nothing with tag {self._tag} was sent by this rank to itself within {limit_s:.3g} s"
            raise OperationTimeoutError(message, timeout_s=limit_s)
        self._content.result()

    def put(self, content: torch.Tensor) -> None:
        """Send it."""
        self._content.set_result(content)

    def close(self) -> None:
        """Free the thread that waits for it."""
        self._content.set_exception(GroupAbortedError("the group was taken down"))

    def read_into(self, buffer: torch.Tensor) -> None:
        """Copy its bytes, once it is sent.

        Raises:
            MismatchError: It has another size.
        """
        content = self._content.result()
        if content.numel() != buffer.numel():
            raise MismatchError(
                f"this rank sent itself {content.numel()} bytes with tag {self._tag}, "
                f"and receives {buffer.numel()}",
                expected=f"{buffer.numel()} bytes",
                actual={},
            )
        buffer.copy_(content)


_Letters = defaultdict[int, deque[Letter]]


class Mailbox:
    """Messages of a rank to itself, sent and awaited: matched by tag, in the order of the calls."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sent: _Letters = defaultdict(deque)
        self._awaited: _Letters = defaultdict(deque)

    def put(self, tag: int, content: torch.Tensor) -> None:
        """Keep a copy of some bytes."""
        with self._lock:
            letter = _matched(tag, self._awaited, self._sent)
        letter.put(content.clone())

    def take(self, tag: int) -> Letter:
        """Claim the next message of a tag, whether it is there or not."""
        with self._lock:
            return _matched(tag, self._sent, self._awaited)

    def has(self, tag: int) -> bool:
        """Whether a message of this tag is there that no `take` waits for."""
        with self._lock:
            return bool(self._sent[tag])

    def close(self) -> None:
        """Free the threads that wait."""
        with self._lock:
            waiting = [letter for letters in self._awaited.values() for letter in letters]
            self._awaited.clear()
        for letter in waiting:
            letter.close()


def _matched(tag: int, others: _Letters, own: _Letters) -> Letter:
    """Return the oldest message that the other side has asked for or sent; else a new one, for it to find."""
    if others[tag]:
        return others[tag].popleft()
    letter = Letter(tag)
    own[tag].append(letter)
    return letter
