"""Runs message schedules on an endpoint, also those that use the shared memory of a host.

executor = MessageExecutor(endpoint)
plan = executor.bind(schedule, dtype, reduction, input_numels, output_numels)    # once a signature
program = MessageProgram(executor, plan)
program(operation, inputs, outputs)                                              # every call
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dist2.backends.socket.algorithms.schedule import Schedule
from dist2.backends.socket.memory import bytes_of, copy_bytes, room_of, view_at
from dist2.backends.socket.overlap import Combine, Meet, Message, Messages, Move, Needs, Place
from dist2.backends.socket.plan import Plan, plan_of
from dist2.backends.socket.transport.base import Endpoint, Transfer
from dist2.backends.socket.transport.boards.board import Board
from dist2.backends.socket.transport.messages.endpoint import FabricEndpoint
from dist2.backends.socket.transport.messages.express_socket import SocketReceive, SocketSend
from dist2.backends.socket.transport.messages.lot import Lot
from dist2.backends.socket.transport.messages.ways import ShortWays
from dist2.errors import MismatchError
from dist2.operation.kinds import Reduction
from dist2.operation.parts import PartsClock, parts_log
from dist2.operation.record import Operation
from dist2.operation.storage import flattened, writable
from dist2.runtime.cache import keep

SCRATCH_KEPT_BYTES = 64 << 20
"""Scratch up to this size is kept from call to call: new memory costs a page fault every 4 KiB."""

SLICES_KEPT = 1024

Tensors = Sequence[torch.Tensor]

_PARTS = {Messages: "send", Meet: "wait", Combine: "reduce", Move: "copy"}


class MessageExecutor:
    """Runs schedules of `Exchange`, `Copy`, `Fold` and `Fence` steps for one member of a group.

    One operation at a time, as groups run them.

    Args:
        endpoint: The group's messages.
        board: Shared memory of the members on this host, where there are several hosts.
        beside: Their group ranks, this one's among them.
    """

    def __init__(self, endpoint: Endpoint, board: Board | None = None, beside: Sequence[int] = ()) -> None:
        self.endpoint = endpoint
        self._board = board
        self._beside = tuple(beside)
        self._scratch = Scratch(0)
        self._slots: tuple[list[Memory], ...] = ()

    def bind(
        self,
        schedule: Schedule,
        dtype: torch.dtype,
        reduction: Reduction | None,
        input_numels: Sequence[int],
        output_numels: Sequence[int],
        *,
        shift: int | None,
    ) -> Plan:
        """Plan a schedule for lists of tensors with these numbers of elements.

        Args:
            shift: See `plan_of`.

        Raises:
            InvalidUsageError: The reduction has no meaning for the dtype.
        """
        return plan_of(
            schedule,
            dtype,
            reduction,
            self.endpoint.world_size,
            input_numels,
            output_numels,
            beside=self._beside,
            shift=shift,
        )

    def run(self, plan: Plan, ways: Ways, operation: Operation, inputs: Tensors, outputs: Tensors) -> None:
        """Run a plan.

        Args:
            plan: From `bind`.
            ways: The short paths of its messages.
            operation: Gives sequence number, fingerprint and deadline.
            inputs: Contiguous tensors of the lengths planned for.
            outputs: Likewise; they may be the inputs.

        Raises:
            OperationTimeoutError, PeerLostError, MismatchError, GroupAbortedError: See `Endpoint.wait` and
                `Board.fence`. The tensors are free when it raises; outputs hold anything.
        """
        memories = self._memories_of(plan, inputs, outputs)
        if plan.meets:
            memories += self._slots_for(operation)
        clock = self._clock(operation)
        with Traffic(self.endpoint, operation, memories, plan.messages, ways) as traffic:
            for action in plan.actions:
                if action.needs:
                    traffic.wait(action.needs)
                    if clock is not None:
                        clock.note("recv")
                if isinstance(action, Messages):
                    traffic.start(action)
                elif isinstance(action, Meet):
                    self._meet(operation)
                else:
                    _work(action, memories, plan.dtype)
                if clock is not None:
                    clock.note(_PARTS[type(action)])
            if clock is not None:
                traffic.settle()
                clock.note("recv")

    def _clock(self, operation: Operation) -> PartsClock | None:
        """Return the recorder of an operation's parts, if they are recorded."""
        if not parts_log.on:
            return None
        return PartsClock(operation, lambda: self.endpoint.waited_ns)

    def _memories_of(self, plan: Plan, inputs: Tensors, outputs: Tensors) -> list[Memory]:
        """Return the tensors of a call, then its scratch."""
        memories: list[Memory] = [Memory(tensor) for tensor in inputs]
        memories += memories if outputs is inputs else [Memory(tensor) for tensor in outputs]
        memories.append(self._scratch_of(plan.scratch))
        return memories

    def _meet(self, operation: Operation) -> None:
        """Wait for the other ranks of this host; messages make progress meanwhile."""
        assert self._board is not None  # only schedules for several ranks on this host have fences
        try:
            self._board.fence(operation)
        except MismatchError:
            self.endpoint.disagree(operation.seq)  # the other hosts would wait for this one
            raise

    def _slots_for(self, operation: Operation) -> list[Memory]:
        """Return the slots of this host's ranks that an operation may use."""
        board = self._board
        assert board is not None  # as in `_meet`
        if not self._slots:
            board.meet(operation)
            self._slots = tuple(
                [
                    SlotMemory(board.regions.slot(rank, turn), board.regions.slot_address(rank, turn))
                    for rank in self._beside
                ]
                for turn in (0, 1)
            )
        turn = board.turn
        board.turn = 1 - turn
        return self._slots[turn]

    def _scratch_of(self, nbytes: int) -> Scratch:
        """Return scratch of at least so many bytes."""
        if nbytes > SCRATCH_KEPT_BYTES:
            return Scratch(nbytes)
        if nbytes > self._scratch.nbytes:
            self._scratch = Scratch(max(nbytes, min(2 * self._scratch.nbytes, SCRATCH_KEPT_BYTES)))
        return self._scratch


def _work(action: Combine | Move, memories: Sequence[Memory], dtype: torch.dtype) -> None:
    """Do the steps without messages."""
    if isinstance(action, Combine):
        srcs = [memories[src.memory].elements(src, dtype) for src in action.srcs]
        action.fold(memories[action.dst.memory].elements(action.dst, dtype), srcs)
        return
    dst = memories[action.dst.memory].address + action.dst.start
    src = memories[action.src.memory].address + action.src.start
    if dst != src:  # else the caller's input is its output
        copy_bytes(dst, src, action.dst.nbytes)


class MessageProgram:
    """A plan, prepared for the calls of one signature.

    Args:
        executor: Runs it.
        plan: The plan.
    """

    def __init__(self, executor: MessageExecutor, plan: Plan) -> None:
        self._executor = executor
        self._plan = plan
        self._ways: Ways | None = None

    def __call__(self, operation: Operation, inputs: Tensors, outputs: Tensors) -> None:
        """Run on contiguous tensors; see `MessageExecutor.run`."""
        fingerprint, executor = operation.signature.fingerprint, self._executor
        if self._ways is None or self._ways.fingerprint != fingerprint:
            self._ways = Ways(executor.endpoint, self._plan, fingerprint)
        executor.run(self._plan, self._ways, operation, inputs, outputs)


class Ways:
    """The short paths over sockets of a plan's messages, by number, for those that have one.

    Args:
        endpoint: The group's messages.
        plan: The plan whose messages they are.
        fingerprint: The fingerprint of the calls that run it.
    """

    def __init__(self, endpoint: Endpoint, plan: Plan, fingerprint: int) -> None:
        self.fingerprint = fingerprint
        self.sends: dict[int, SocketSend] = {}
        self.recvs: dict[int, SocketReceive] = {}
        if not isinstance(endpoint, FabricEndpoint):
            return
        ways = endpoint.ways
        for action in plan.actions:
            if isinstance(action, Messages):
                for message in action.sends:
                    if (lot := self._short(ways, message)) is not None:
                        self.sends[message.number] = ways.socket_send(lot)
                for message in action.recvs:
                    if (lot := self._short(ways, message)) is not None:
                        self.recvs[message.number] = ways.socket_receive(lot)

    def _short(self, ways: ShortWays, message: Message) -> Lot | None:
        """Return the lot of a message that has a short path."""
        lot = Lot(message.peer, message.step, self.fingerprint, message.place.nbytes, tagged=False)
        return lot if ways.has_socket_way(lot) else None


class Traffic:
    """The messages of one call: a context that ends when all are done, or cancelled.

    Short messages over sockets take a short path: a send hands its bytes to the kernel, a receive reads its
    message when an action needs it, straight from the kernel to its place. Other receives are posted when
    they start, so that their payloads find a place. A rank that has to wait posts the short ones as well:
    another rank, for which it waits, may depend on its reading them.

    Args:
        endpoint: Carries them.
        operation: Gives sequence number, fingerprint and deadline.
        memories: The memories that hold messages.
        messages: How many there are.
        ways: The short paths.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        operation: Operation,
        memories: Sequence[Memory],
        messages: int,
        ways: Ways,
    ) -> None:
        self._endpoint = endpoint
        self._operation = operation
        self._memories = memories
        self._ways = ways
        self._transfers: list[Transfer | None] = [None] * messages
        self._started: list[Transfer] = []
        self._unread: dict[int, Message] = {}

    def __enter__(self) -> Traffic:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        try:
            if error is None:
                self.settle()
                return
        except BaseException:
            self._endpoint.cancel(self._started)
            raise
        self._endpoint.cancel(self._started)

    def start(self, messages: Messages) -> None:
        """Start messages, receives first so that payloads find their place."""
        for message in messages.recvs:
            if message.number in self._ways.recvs:
                self._unread[message.number] = message
            else:
                self._post(message)
        for message in messages.sends:
            self._send(message)

    def settle(self) -> None:
        """Wait for everything that was started."""
        while self._unread:
            self._read(next(iter(self._unread)))
        if self._started:
            self._endpoint.wait(self._started, self._operation.deadline_ns)

    def wait(self, needs: Needs) -> None:
        """Wait for some of the messages that were started."""
        for number in needs:
            if number in self._unread:
                self._read(number)
        if not self._started:
            return
        transfers = self._transfers
        waiting = [transfer for number in needs if (transfer := transfers[number]) is not None]
        if waiting:
            self._post_unread()
            self._started = [each for each in self._started if not each.done or each.error is not None]
            self._endpoint.wait(waiting, self._operation.deadline_ns, self._started)

    def _read(self, number: int) -> None:
        """Read a message, after earlier ones of its sender; post it if it does not come in a moment."""
        unread = self._unread
        message = unread.pop(number)
        if unread:
            for each in [each for each, other in unread.items() if other.peer == message.peer]:
                if each < number:
                    self._receive(unread.pop(each))
        self._receive(message)

    def _receive(self, message: Message) -> None:
        operation, place = self._operation, message.place
        address = self._memories[place.memory].address + place.start
        received = self._ways.recvs[message.number].wait(address, operation.deadline_ns, operation.seq)
        if received is False:
            self._post(message)
        elif received is not True:
            self._note(message.number, received)

    def _post_unread(self) -> None:
        while self._unread:
            _, message = self._unread.popitem()
            self._post(message)

    def _post(self, message: Message) -> None:
        peer, step, place, number = message
        operation, buffer = self._operation, self._memories[place.memory].bytes(place)
        fingerprint = operation.signature.fingerprint
        self._note(number, self._endpoint.recv(peer, operation.seq, step, fingerprint, buffer))

    def _send(self, message: Message) -> None:
        peer, step, place, number = message
        operation, memory = self._operation, self._memories[place.memory]
        way = self._ways.sends.get(number)
        sent: bool | Transfer = (
            False if way is None else way.send(memory.address + place.start, operation.seq)
        )
        if sent is False:
            fingerprint = operation.signature.fingerprint
            sent = self._endpoint.send(peer, operation.seq, step, fingerprint, memory.bytes(place))
        if not isinstance(sent, bool):
            self._note(number, sent)

    def _note(self, number: int, transfer: Transfer) -> None:
        self._transfers[number] = transfer
        self._started.append(transfer)


class Memory:
    """One tensor as bytes and as elements.

    Attributes:
        address: Of its first byte.
    """

    __slots__ = ("_flat", "_view", "address", "tensor")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self.address = tensor.data_ptr()
        self._view: memoryview | None = None
        self._flat: torch.Tensor | None = None

    def bytes(self, place: Place) -> memoryview:
        """Return a stretch as bytes."""
        if self._view is None:
            self._view = bytes_of(self.tensor)
        return self._view[place.start : place.stop]

    def elements(self, place: Place, dtype: torch.dtype) -> torch.Tensor:
        """Return a stretch as a flat tensor that may be written to."""
        if self._flat is None:
            self._flat = flattened(writable(self.tensor))
        itemsize = dtype.itemsize
        if place.nbytes == self._flat.numel() * itemsize:
            return self._flat
        return self._flat[place.start // itemsize : place.stop // itemsize]


class Viewed(Memory):
    """Memory that stays; remembers the tensors that plans made of it."""

    __slots__ = ("_slices",)

    def __init__(self, tensor: torch.Tensor) -> None:
        super().__init__(tensor)
        self._slices: dict[tuple[Place, torch.dtype], torch.Tensor] = {}

    def elements(self, place: Place, dtype: torch.dtype) -> torch.Tensor:
        found = self._slices.get((place, dtype))
        if found is None:
            part = self.tensor[place.start : place.stop].view(dtype)
            found = keep(self._slices, (place, dtype), part, SLICES_KEPT)
        return found


class Scratch(Viewed):
    """Memory of the executor's own.

    Args:
        nbytes: How much.
    """

    __slots__ = ("nbytes",)

    def __init__(self, nbytes: int) -> None:
        self.nbytes = max(1, -(-nbytes // 16)) * 16  # the largest element is a complex128
        super().__init__(room_of(self.nbytes))


class SlotMemory(Viewed):
    """A slot of a rank of this host."""

    __slots__ = ()

    def __init__(self, view: memoryview, address: int) -> None:
        super().__init__(view_at(view, torch.uint8, (len(view),)))
        assert self.address == address
