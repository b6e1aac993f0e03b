"""`AgreedBackend`: a backend whose ranks compare each call over a control group before the tensors move.

For libraries that compare nothing themselves, such as Gloo. A collective has two steps: all ranks meet in the
control group, which finds mismatches, deaths and missing ranks; then the library moves the tensors, while the
caller watches the control links. Where ranks may send different sizes, they exchange these when they meet.

A message has a *notice*: an empty message of the control group. The receiver asks the library for the message
once the notice has come, so a message of another size or dtype raises on both sides before it moves. The
notice also names the sender, so the library need not receive from any rank.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from time import monotonic_ns
from typing import Protocol

import attrs
import torch

from dist2.backends.base import Backend, Execute, GroupSpec, Helped, Tensors
from dist2.backends.socket.backend import SocketBackend
from dist2.backends.socket.controlled import CONTROL_OPTIONS, Controlled, shut_down_on_failure
from dist2.backends.socket.create import create as create_socket
from dist2.backends.socket.memory import check_mode
from dist2.backends.socket.outside import Outside
from dist2.backends.socket.sizes import check_sizes, sizes_of
from dist2.backends.socket.transport.messages.transfer import Transfer
from dist2.backends.socket.watched_messages import Progress, WatchedMessage
from dist2.errors import BackendError, InvalidUsageError, OperationTimeoutError, PeerLostError
from dist2.operation.kinds import OpKind
from dist2.operation.record import Operation
from dist2.operation.signature import Signature, TensorMeta
from dist2.runtime.deadline import deadline_in
from dist2.store import TCPStore

CONTROL = "control"
"""Option of a group: False makes no control group."""
AGREED_OPTIONS = (CONTROL, *CONTROL_OPTIONS)
_LOOK_NS = 20_000_000
_HEAR_S = 2.0
"""How long the library's report of a lost connection waits for that of the links."""
_ADDRESS_BYTES = 512


class Library(Protocol):
    """The backend that moves the tensors.

    Attributes:
        await_end: Waits until a call of the library has ended or a time has come; whether it has ended.
    """

    spec: GroupSpec
    device_types: tuple[str, ...]
    leaves_at_once: bool
    await_end: Callable[[Future[None], int], bool]

    def plan(self, signature: Signature) -> Execute:
        """See `Backend.plan`."""

    def send(self, operation: Operation, inputs: Tensors, outputs: Tensors) -> Future[None] | None:
        """See `Backend.send`."""

    def receive(self, operation: Operation, outputs: Tensors, source: int) -> Future[None]:
        """Receive from this rank, which may be the caller."""

    def give_up(self) -> None:
        """Note that a call is under way whose end nobody waits for: `shutdown` must not wait for it."""

    def shutdown(self) -> None:
        """See `Backend.shutdown`."""

    def abort(self) -> None:
        """See `Backend.abort`."""


Make = Callable[[GroupSpec], Library]


def library_spec(spec: GroupSpec) -> GroupSpec:
    """Return the spec of a group without the options of its control group."""
    own = {name: value for name, value in spec.options.items() if name not in AGREED_OPTIONS}
    return attrs.evolve(spec, options=own)


def agreed(spec: GroupSpec, library: Library, make: Make) -> Backend:
    """Return the backend of a new group: a library's, beside a control group unless that is switched off.

    Args:
        spec: The group. Its option ``control`` is False if it has no control group; `CONTROL_OPTIONS` are
            those of the control group.
        library: The backend that moves the tensors.
        make: Makes the library's backend of a subgroup.

    Raises:
        InvalidUsageError: ``control`` is not a bool.
        UnknownOptionError, OperationTimeoutError, PeerLostError: As of a socket group.
    """
    wanted = spec.options.get(CONTROL, True)
    options = {name: value for name, value in spec.options.items() if name in CONTROL_OPTIONS}
    below = spec.within(CONTROL, spec.info, spec.timeout_s)
    try:
        if not isinstance(wanted, bool):
            raise InvalidUsageError(f"control must be a bool, got {wanted!r} ({type(wanted).__name__})")
        if not wanted:
            return library  # type: ignore[return-value]  # a Backend as well
        control = create_socket(attrs.evolve(below, device=torch.device("cpu"), options=options))
    except BaseException:
        library.abort()
        raise
    return AgreedBackend(spec, control, library, make)


class AgreedBackend(Controlled):
    """A library's backend and its control group.

    Args:
        spec: The group.
        control: The control group.
        library: The backend that moves the tensors.
        make: Makes the backend of a subgroup.

    Attributes:
        library: The backend that moves the tensors.
    """

    def __init__(self, spec: GroupSpec, control: SocketBackend, library: Library, make: Make) -> None:
        super().__init__(spec, control)
        self.device_types, self.leaves_at_once = library.device_types, library.leaves_at_once
        self.library = library
        self._make = make
        self._closed = False
        library.await_end = partial(_await_end, control.outside)
        self._receives = Receives(control.outside)
        self._progress = Progress(f"dist2-messages-{spec.info.name}", control.outside, _LOOK_NS)
        # No rank returns, and perhaps leaves again, before all are connected.
        with shut_down_on_failure(self):
            control.outside.gather(b"\1", 0, deadline_in(spec.timeout_s))

    def waited_ns(self) -> int | None:
        """Return for how long it has waited in the control group."""
        return self.control.waited_ns()

    # Operations

    def plan(self, signature: Signature) -> Execute:
        """Return a callable that runs operations of a signature once all ranks have called them.

        Raises:
            InvalidUsageError: The library cannot.
        """
        execute = self.library.plan(signature)
        if signature.kind.is_p2p:
            return self.send if signature.kind is OpKind.SEND else self.recv
        if self.world_size == 1:
            return execute
        meet, outside = self._meeting(signature), self.control.outside

        def run(operation: Operation, inputs: Tensors, outputs: Tensors) -> None:
            check_mode()  # before this rank takes part: the others would wait for it
            meet(operation)
            try:
                execute(operation, inputs, outputs)
            except PeerLostError as error:
                raise outside.cause_of(error, operation.deadline_ns) from error

        return run

    def _meeting(self, signature: Signature) -> Callable[[Operation], None]:
        """Return a callable that returns once all ranks have made a call of a signature."""
        own, group = sizes_of(signature), signature.group
        if own is None:
            barrier = self.control.meeting(signature, Signature(OpKind.BARRIER, group))

            def meet_plainly(operation: Operation) -> None:
                barrier(operation, (), ())

            return meet_plainly
        check_mode()
        mine = torch.tensor(own, dtype=torch.int64, device="cpu")
        everyone = torch.empty(self.world_size, len(own), dtype=torch.int64, device="cpu")
        metas = (TensorMeta.of(mine),), (TensorMeta.of(everyone),)
        gather = self.control.meeting(signature, Signature(OpKind.ALL_GATHER_SINGLE, group, *metas))

        def meet(operation: Operation) -> None:
            gather(operation, (mine,), (everyone,))
            check_sizes(operation, everyone.tolist())

        return meet

    def all_reduce(self, operation: Operation, inputs: Tensors, outputs: Tensors) -> None:
        """See `Backend`, which requires these by name; the group calls the result of `plan`."""
        self.plan(operation.signature)(operation, inputs, outputs)

    broadcast = all_gather = all_to_all = all_reduce

    def send(self, operation: Operation, inputs: Tensors, outputs: Tensors) -> Helped | None:
        check_mode()
        outside, library = self.control.outside, self.library
        notice = outside.notice(operation, operation.signature.tag)
        message = Message(outside, operation, notice, library)
        try:
            message.moves(library.send(operation, inputs, outputs))
        except PeerLostError as error:  # the links name the rank
            message.moves(_failed(error))
        return self._progress.started(message)

    def recv(self, operation: Operation, inputs: Tensors, outputs: Tensors) -> Helped | None:
        message = self._receives.post(operation, outputs, self.library)
        return self._progress.started(message)

    # Membership

    def broken_by(self, error: BaseException) -> None:
        """Tell the control group; of a failure of the library alone, which the others do not see, also them.

        A rank that the library has failed on takes no part in what the others wait for.
        """
        super().broken_by(error)
        if isinstance(error, BackendError):
            self.revoke(self.rank)

    def split(self, spec: GroupSpec) -> AgreedBackend:
        """Return a backend of a subset of the members; only they call.

        They meet in the group's store. Where a rank of this group is gone, its store may be too: then the new
        group's first rank serves one.

        Raises:
            PeerLostError: A member of the subset has left this group or died.
        """
        control = self.control_of(spec)
        with shut_down_on_failure(control):
            is_whole = not (self.lost() or self.departed())
            _, agreement = control.agree(int(is_whole), deadline_in(spec.timeout_s))
            if agreement.failed:  # the library would wait for them
                gone = dict.fromkeys(agreement.failed, "died or left the group meanwhile")
                gone |= control.departed() | control.lost()
                told = f"({PeerLostError.__name__}: "  # ranks that left for the end of another one
                causes = {rank: words for rank, words in gone.items() if told not in words} or gone
                raise PeerLostError(control.names.departed(causes), ranks=tuple(causes))
            return self._again(spec, control, bool(agreement.flags))

    def reconfigure(self, spec: GroupSpec, handles: Sequence[str]) -> AgreedBackend:
        """Return a backend for the processes with these handles; the first one serves their store."""
        control = self.control.reconfigure(spec, handles)
        with shut_down_on_failure(control):
            return self._again(spec, control, False)

    def _again(self, spec: GroupSpec, control: SocketBackend, has_store: bool) -> AgreedBackend:
        met = spec if has_store else spec.at(_served(spec, control), spec.info, spec.timeout_s)
        with met.building(control) as watched:
            return AgreedBackend(spec, control, self._make(library_spec(watched)), self._make)

    # Life

    def abort(self) -> None:
        """Make blocked callers raise; `shutdown` then cleans up."""
        self.control.abort()
        self.library.abort()

    def shutdown(self) -> None:
        """Leave: first in the library, then in the control group."""
        if self._closed:
            return
        self._closed = True
        self._progress.stop()
        if self.lost():
            self.library.give_up()
        self.library.shutdown()
        self.control.shutdown()


class Message(WatchedMessage):
    """A message of the library, and its notice.

    Args:
        outside: The control links.
        operation: Its operation.
        notice: The notice, sent or awaited.
        library: The library's backend.
        start: For a receive: starts the receives whose notices have come.
    """

    def __init__(
        self,
        outside: Outside,
        operation: Operation,
        notice: Transfer,
        library: Library,
        start: Callable[[], None] | None = None,
    ) -> None:
        super().__init__(outside, operation)
        self.notice = notice
        self._library = library
        self._start = start
        self._moving: Future[None] | None = None
        self._starts = start is not None
        self._until_ns = 0

    def moves(self, moving: Future[None] | None) -> None:
        """Take the library's call, which completes the message; None if it is complete."""
        if moving is not None:
            moving.add_done_callback(lambda _: self._outside.wake())
        self._moving = moving
        self._starts = False

    def _advance(self) -> bool:
        if not self._outside.arrived(self.notice) and self._start is not None:
            return False
        if self._starts:
            assert self._start is not None
            self._start()
        if self._moving is None:
            return not self._starts
        if not self._moving.done():
            return False
        try:
            self._moving.result()
        except PeerLostError as error:
            return self._is_lost(error)
        return True

    def _is_lost(self, error: PeerLostError) -> bool:
        """Raise the error of the other side's end as the links tell it, soon; else the library's words."""
        peer = self.operation.signature.peer
        told = self._outside.left(self.notice.source if peer is None else peer)
        if told is not None:
            raise told from error
        self._until_ns = self._until_ns or deadline_in(_HEAR_S)
        if monotonic_ns() > self._until_ns:
            raise error
        return False

    def _give_up(self) -> None:
        self._outside.cancel(self.notice)
        if self._moving is not None and not self._moving.done():
            self._library.give_up()


class Receives:
    """The receives of a group whose notices have not come.

    A library matches the messages of one sender and tag in the order of the calls, and notices match in the
    same way. So the receives whose notices have come are started in the order in which they were posted.

    Args:
        outside: The control links.
    """

    def __init__(self, outside: Outside) -> None:
        self._outside = outside
        self._lock = threading.Lock()
        self._posted: list[tuple[Message, Callable[[int], Future[None]]]] = []

    def post(self, operation: Operation, outputs: Tensors, library: Library) -> Message:
        """Await the notice of a message."""
        with self._lock:
            notice = self._outside.notice(operation, operation.signature.tag)
            message = Message(self._outside, operation, notice, library, self._start)
            self._posted.append((message, partial(library.receive, operation, outputs)))
        return message

    def _start(self) -> None:
        """Start the receives whose notices have come."""
        with self._lock:
            # A notice that comes during this look may belong to an earlier receive than the last one seen.
            come = [number for number, (message, _) in enumerate(self._posted) if message.notice.done]
            earlier = self._posted[: come[-1] + 1] if come else []
            started = [(message, receive) for message, receive in earlier if message.notice.done]
            self._posted = [each for each in self._posted if each not in started]
            for message, receive in started:
                if message.notice.error is None:
                    message.moves(_started(receive, message.notice.source))


def _started(receive: Callable[[int], Future[None]], source: int) -> Future[None]:
    """Return the future of a receive, also if it fails at once: another message's thread may start it."""
    try:
        return receive(source)
    except Exception as error:  # noqa: BLE001 - delivered to those that wait for the message
        return _failed(error)


def _failed(error: Exception) -> Future[None]:
    failed: Future[None] = Future()
    failed.set_exception(error)
    return failed


def _await_end(outside: Outside, call: Future[None], until_ns: int) -> bool:
    """Wait for the end of a call of the library at the control links; whether it came in time."""
    call.add_done_callback(lambda _: outside.wake())
    try:
        outside.wait(call.done, until_ns)
    except OperationTimeoutError:
        return False
    return True


def _served(spec: GroupSpec, control: SocketBackend) -> TCPStore:
    """Return a store for a group, which its first rank serves."""
    deadline_ns = deadline_in(spec.timeout_s)
    if spec.info.rank == 0:
        store = TCPStore(control.host, 0, None, True, spec.timeout_s, wait_for_workers=False)
        address = f"{control.host} {store.port}".encode().ljust(_ADDRESS_BYTES)
        control.outside.share(address, _ADDRESS_BYTES, 0, 2, deadline_ns)
        return store
    host, port = control.outside.share(None, _ADDRESS_BYTES, 0, 2, deadline_ns).decode().split()
    return TCPStore(host, int(port), None, False, spec.timeout_s, wait_for_workers=False)
