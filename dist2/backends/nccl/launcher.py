# cython: annotation_typing=False
"""`Launcher`: puts the operations of one group on the device, and waits for them.

An operation is launched on the caller's current stream if it is synchronous, else on a stream of the group
that waits for the work that the caller has enqueued. The watchdog sees it end. A synchronous call returns
when it is enqueued; where the calling thread is the stream, or with ``blocking=True``, when it is done.

Messages that are started together (`MessageBatch`) are one group of NCCL's calls for each direction: in such
a group no send waits for a receive behind it. Tickets are given out at once; where they are on the stream is
known when the batch is launched. The first messages between two ranks are launched by a thread (see
`FirstMessages`): a caller that waits for them does so on the host until they are on the stream.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from dist2.backends.base import Tensors
from dist2.backends.nccl.device import Device, Stream
from dist2.backends.nccl.first_messages import FirstMessages
from dist2.backends.nccl.launch import Launch, Planned
from dist2.backends.nccl.library import Library
from dist2.backends.nccl.meeting import Communicators, Meeting
from dist2.backends.nccl.options import NcclOptions
from dist2.backends.nccl.ticket import Health, Ticket
from dist2.backends.nccl.watchdog import LOOK_NS, Watchdog
from dist2.backends.socket.outside import Outside, peers_of
from dist2.errors import BackendError, Dist2Error, GroupAbortedError, InvalidUsageError
from dist2.operation.record import Operation
from dist2.operation.signature import GroupInfo
from dist2.runtime.built import check_built
from dist2.runtime.deadline import PAST_NS, deadline_in
from dist2.runtime.threads import Worker

check_built(__name__, __file__)

_DESTROY_S = 1.0
"""How long closing waits for the other ranks to free their communicators; they may do so later."""
_FIRST_S = 2.0
"""How long closing waits for a thread that issued first messages, whose communicator is aborted."""
_QUIET_S = 0.5
"""How long to wait for operations to end where that is not necessary."""
_BLOCK_NS = 1_000_000
"""Longest interval between queries of an event, which cannot wake a thread, by one that blocks for it."""
_CAUSE_S = 0.5
"""How long the control links may take to report the failure of a member that made NCCL fail."""


class MessageBatch:
    """Collects the messages of one thread."""

    def __init__(self) -> None:
        self._by_lane: dict[str, list[Ticket]] = {}

    def add(self, message: Ticket) -> None:
        """Keep a message until the batch is launched."""
        self._by_lane.setdefault(message.planned.lane, []).append(message)

    def launch(self, launch: Callable[[list[Ticket]], None]) -> None:
        """Launch all messages, those of each direction together."""
        for messages in self._by_lane.values():
            launch(messages)


class Launcher:
    """Puts operations of one group on its device.

    Args:
        info: The group.
        options: Checked options of `new_group`.
        outside: Watches operations over the control links.
        device: Where the tensors are.
        library: NCCL.
        meet: Makes the communicators.

    Attributes:
        communicators: The group's communicators; None before they are made.
    """

    def __init__(
        self,
        info: GroupInfo,
        options: NcclOptions,
        outside: Outside,
        device: Device,
        library: Library,
        meet: Callable[[Meeting], Communicators],
    ) -> None:
        self.communicators: Communicators | None = None
        self._info = info
        self._strict, self._timing = options.strict, options.timing
        self._outside = outside
        self._device = device
        self._library = library
        self._meet = meet
        self._blocks = options.blocking or device.blocks
        self._making = threading.RLock()
        self._streams: dict[str, Stream] = {}
        self._first = {lane: FirstMessages(f"dist2-nccl-first-{lane}-{info.name}") for lane in ("up", "down")}
        self._health = Health()
        self._batches = threading.local()
        self._watchdog = Watchdog(
            info.name, self._watch, outside.wake, self._async_error, self.break_off, device.watching
        )

    # Communicators

    def connected(self, deadline_ns: int) -> Communicators:
        """Return the communicators; the first call makes them, together with the other ranks."""
        if self.communicators is None:
            with self._making:
                if self.communicators is None:
                    self.communicators = self._meet(self._meeting(deadline_ns))
        return self.communicators

    def _meeting(self, deadline_ns: int) -> Meeting:
        return Meeting(
            self._info.rank,
            self._info.world_size,
            self._library,
            self._device,
            self._outside,
            deadline_ns,
            self._info.name,
        )

    def _async_error(self) -> BackendError | None:
        made = self.communicators
        errors = (each.async_error() for each in made.all) if made is not None else iter(())
        return next((error for error in errors if error is not None), None)

    def break_off(self, error: BaseException) -> BaseException:
        """Abort the communicators, so that the device is free again; return the first error."""
        if self._health.error is None and isinstance(error, BackendError):
            # A death cuts NCCL's connections together with the links; NCCL reports it without a rank.
            error = self._outside.cause_of(error, deadline_in(_CAUSE_S))
        if self._health.error is None:
            self._watchdog.sweep()
            self._health.error = self._health.error or error
        made = self.communicators
        if made is not None:
            for each in made.all:
                each.abort()
        return self._health.error

    # Launching

    def launch(
        self, planned: Planned, operation: Operation, inputs: Tensors, outputs: Tensors
    ) -> Ticket | None:
        """Put an operation on a stream; return its ticket if its caller does not wait for it.

        Raises:
            InvalidUsageError: The communicators are not made yet, which a CUDA graph cannot capture.
        """
        device, is_main = self._device, planned.lane == "main"
        captured = device.capturing()
        if captured and self.communicators is None:
            raise self._uncapturable(operation)
        stream = self._side_stream(planned.lane) if operation.is_async else device.current()
        ticket = Ticket(operation, planned, inputs, outputs, device, stream, self._block, self._health)
        if captured:
            ticket.settle()  # no thread watches it: for the group it is over, and `wait` orders the streams
            self._put([ticket], timed=False)
            return ticket if operation.is_async else None
        try:
            if self.communicators is None:
                self.connected(operation.deadline_ns)
            ticket.notice = self._outside.begin(operation)
            if is_main:
                if self._strict:
                    self._outside.compare(operation)
                self._watchdog.watch(ticket)  # before: a first call may wait for other ranks
                self._put([ticket], self._timing)
            else:
                operation.source = planned.source
                batch: MessageBatch | None = getattr(self._batches, "batch", None)
                if batch is not None:
                    batch.add(ticket)
                    return ticket
                self._put_messages([ticket])
        except Dist2Error as error:
            self._fail(error, [ticket])
        except BaseException as error:  # such as a lack of memory: the group fails, and notifies the others
            ticket.settle(error)
            raise
        if operation.is_async:
            return ticket
        self._end_call(ticket)
        return None

    def _uncapturable(self, operation: Operation) -> InvalidUsageError:
        return InvalidUsageError(
            f"{operation.describe()} cannot be the first operation of group {self._info.name!r} "
            f"inside a CUDA graph: run one before the capture, or build the group with eager=True"
        )

    def _side_stream(self, lane: str) -> Stream:
        """Return the stream of asynchronous operations, behind the work that the caller has enqueued."""
        if lane not in self._streams:
            self._streams[lane] = self._device.new_stream()
        self._device.order(self._device.current(), self._streams[lane])
        return self._streams[lane]

    def _end_call(self, ticket: Ticket) -> None:
        """Wait as long as a synchronous call does; raise the operation's error."""
        operation = ticket.operation
        if self._blocks:
            self._block(ticket, operation.deadline_ns, ticket.passed)
        elif not ticket.is_placed():
            self._block(ticket, operation.deadline_ns, ticket.is_placed)
        error = ticket.exception()
        if error is not None:
            raise error
        if self._blocks:
            self._outside.ended(operation)

    def _fail(self, error: Dist2Error, tickets: list[Ticket]) -> None:
        """Break off for an error that operations met before they were on the device."""
        cause = self.break_off(error)
        self._watchdog.fail(cause)
        for each in tickets:
            # A call that failed because its communicator was aborted is a consequence of that cause.
            each.settle(error if cause is error else None)

    def _put_messages(self, tickets: list[Ticket]) -> None:
        """Put messages on a stream; a thread of `FirstMessages` does so where that may block.

        They are watched before: the first calls of a communicator wait for other ranks, to connect to them.
        """
        for each in tickets:
            self._watchdog.watch(each)
        peers = {peer for each in tickets if (peer := each.connects_to()) is not None}
        first = self._first[tickets[0].planned.lane]
        if not peers or not first.take(peers, lambda: self._put_later(tickets)):
            self._put(tickets, timed=False)

    def _put_later(self, tickets: list[Ticket]) -> None:
        """Put messages on a stream, in a thread of `FirstMessages`."""
        try:
            with self._device.active():
                self._put(tickets, timed=False)
        except Dist2Error as error:
            self._fail(error, tickets)
        except BaseException as error:  # noqa: BLE001 - raised in those that wait for the messages
            for each in tickets:
                each.settle(error)
        self._outside.wake()

    def _put(self, tickets: list[Ticket], timed: bool) -> None:
        """Put operations of one lane on its stream, as one group of calls."""
        device, first, made = self._device, tickets[0], self.communicators
        stream = first.stream
        assert made is not None
        start = device.record(stream, timed=True) if timed else None
        launch = Launch(device, stream, first.handle, getattr(made, first.planned.lane))
        for each in tickets:
            each.planned.steps(launch, each.inputs, each.outputs)
        launch.finish()
        end = device.record(stream, timed)
        for each in tickets:
            # A stream that the caller queues on by itself frees tensors in its order: these are not kept.
            if each.operation.is_async or device.blocks:
                each.kept = (*launch.kept, *each.inputs, *each.outputs)
            elif launch.kept:
                each.kept = launch.kept
            each.inputs = each.outputs = ()
            each.start, each.end = start, end
        device.when_reached(stream, self._outside.wake)

    @contextmanager
    def together(self) -> Iterator[None]:
        """Launch the messages of a ``with`` block as one group of calls for each direction."""
        batch = self._batches.batch = MessageBatch()
        try:
            yield
        finally:
            self._batches.batch = None
            batch.launch(self._launch_messages)

    def _launch_messages(self, tickets: list[Ticket]) -> None:
        try:
            self._put_messages(tickets)
        except Dist2Error as error:
            self._fail(error, tickets)
        except BaseException as error:
            for each in tickets:
                each.settle(error)
            raise

    # Waiting

    def _block(self, ticket: Ticket, deadline_ns: int, done: Callable[[], bool]) -> None:
        """Wait on the host for a state of a ticket; break the group off if it fails."""
        if deadline_ns == PAST_NS:
            self._watchdog.relieve()
            return
        ends_ns = min(deadline_ns, ticket.operation.deadline_ns)
        try:
            self._outside.wait(done, ends_ns, peers_of(ticket.operation), _BLOCK_NS, notice=ticket.notice)
        except Dist2Error as error:
            if deadline_ns < ticket.operation.deadline_ns and ends_ns == deadline_ns:
                return  # only this wait has ended
            cause = self.break_off(error)
            ticket.settle(error)
            self._watchdog.fail(cause)
        else:
            if ticket.passed():
                ticket.settle()

    def _watch(self, done: Callable[[], bool], ticket: Ticket, deadline_ns: int) -> None:
        self._outside.wait(
            done, deadline_ns, peers_of(ticket.operation), LOOK_NS, is_patient=True, notice=ticket.notice
        )

    def _reached(self, operation: Operation, stream: Stream) -> Ticket:
        """Return a ticket for the work enqueued on a stream so far."""
        ticket = Ticket(operation, None, (), (), self._device, stream, self._block, self._health)
        ticket.end = self._device.record(stream)
        return ticket

    def finish(self, operation: Operation) -> None:
        """Wait on the host for the work that the caller and the group have enqueued."""
        for stream in (self._device.current(), self._streams.get("main")):
            if stream is not None:
                queued = self._reached(operation, stream)
                self._block(queued, operation.deadline_ns, queued.passed)
                error = queued.exception()
                if error is not None:
                    raise error

    # The end

    def is_quiet(self) -> bool:
        """Whether the communicators work, and nothing is outstanding on them."""
        made = self.communicators
        return made is not None and not made.main.closed and self._watchdog.drain(deadline_in(_QUIET_S))

    def close(self, why: GroupAbortedError, deadline_ns: int, in_order: bool) -> None:
        """Free the communicators and streams.

        Args:
            why: The error of outstanding operations.
            deadline_ns: Limit of the wait for outstanding operations, if ``in_order``.
            in_order: The group was neither aborted nor lost a member.
        """
        if in_order and self._watchdog.drain(deadline_ns):
            self._free()
        self._watchdog.fail(self.break_off(why))
        for first in self._first.values():
            first.join(_FIRST_S)
        self._watchdog.close()
        for stream in self._streams.values():
            self._device.close_stream(stream)

    def _free(self) -> None:
        """Free the communicators with the other ranks, if they do so soon; else leave it to a thread."""
        made = self.communicators
        if made is None:
            return

        def destroy() -> None:
            for each in made.all:
                each.destroy()

        worker = Worker(f"dist2-nccl-free-{self._info.name}", destroy)
        worker.start()
        worker.join(_DESTROY_S)
