"""Collectives of Python objects: plain data, tensors, numpy's values, encoded safely (``serialization.py``).

An object travels as bytes in two steps, sizes first, so that every buffer is known before it is filled. A
rank whose object cannot be encoded sends the reason in its place: all ranks raise, and the group stays
usable.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from dist2.errors import Dist2Error, InvalidUsageError, WireError
from dist2.group.collectives import Collectives
from dist2.group.point_to_point import PointToPoint
from dist2.group.serialization import decode, encode, refusal
from dist2.operation.runner import Timeout
from dist2.operation.signature import GroupInfo
from dist2.runtime.arguments import check_rank

Tensor = torch.Tensor


class ObjectCollectives(Collectives, PointToPoint):
    """The operations on objects. All are synchronous.

    ``allow_pickle`` must be equal on all ranks. Unpickling executes code that the sender chose: use it only
    where every rank is trusted. Without it, decoding can only make plain data.
    """

    _refuse: Callable[[BaseException], None]
    """Revokes the group because of an error that the other ranks cannot see."""

    def all_gather_object(
        self, obj: object, *, allow_pickle: bool = False, timeout: Timeout = None
    ) -> list[Any]:
        """Return the objects of all ranks, by rank, on all ranks.

        Args:
            obj: None, bool, int, float, complex, str, bytes, list, tuple, set, dict, datetime, path,
                namespace, device, dense CPU tensor, numpy scalar, array of numbers or times, and containers
                of these; with ``allow_pickle`` any object that can be pickled.
            allow_pickle: Pickle and unpickle other objects.
            timeout: Limit of each of the two steps.

        Raises:
            InvalidUsageError: An object, this rank's or another's, cannot be encoded; the group goes on.

        Examples:
            >>> pg.all_gather_object({"rank": pg.rank()})
            [{'rank': 0}, {'rank': 1}]
        """
        mine, refused = _encoded(obj, allow_pickle)
        with self._in_one():
            sizes = self._all_sizes(mine, timeout)
            buffers = [_buffer(size) for size in sizes]
            self.all_gather_v(buffers, mine, timeout=timeout).wait()
        if refused is not None:
            raise refused
        return [self._decoded(each, rank, allow_pickle) for rank, each in enumerate(buffers)]

    def gather_object(
        self, obj: object, root: int = 0, *, allow_pickle: bool = False, timeout: Timeout = None
    ) -> list[Any] | None:
        """Return the objects of all ranks, by rank, at the root; None elsewhere.

        Args:
            obj: As in `all_gather_object`.
            root: Group rank.
            allow_pickle: Pickle and unpickle other objects.
            timeout: Limit of each of the two steps.

        Raises:
            InvalidUsageError: This rank's object cannot be encoded, or at the root: another's.

        Examples:
            >>> names = pg.gather_object(f"rank {pg.rank()}", root=0)
            >>> names == (["rank 0", "rank 1"] if pg.rank() == 0 else None)
            True
        """
        at_root = check_rank(root, "root", self.info.world_size) == self.info.rank
        mine, refused = _encoded(obj, allow_pickle)
        with self._in_one():
            sizes = self._all_sizes(mine, timeout)
            longest = max(sizes)
            buffers = [_buffer(longest) for _ in sizes] if at_root else None
            self.gather(buffers, _padded(mine, longest), root, timeout=timeout).wait()
        if refused is not None:
            raise refused
        if buffers is None:
            return None
        cut = (buffer[:size] for buffer, size in zip(buffers, sizes, strict=True))
        return [self._decoded(each, rank, allow_pickle) for rank, each in enumerate(cut)]

    def broadcast_object(
        self, obj: object = None, root: int = 0, *, allow_pickle: bool = False, timeout: Timeout = None
    ) -> Any:
        """Return the object of the root, on all ranks.

        Args:
            obj: At the root, as in `all_gather_object`; ignored elsewhere.
            root: Group rank.
            allow_pickle: Pickle and unpickle other objects.
            timeout: Limit of each of the two steps.

        Raises:
            InvalidUsageError: The root's object cannot be encoded.

        Examples:
            >>> pg.broadcast_object({"lr": 0.1} if pg.rank() == 0 else None, root=0)
            {'lr': 0.1}
        """
        at_root = check_rank(root, "root", self.info.world_size) == self.info.rank
        mine, refused = _encoded(obj, allow_pickle) if at_root else (_buffer(0), None)
        size = torch.tensor([mine.numel()], device="cpu")
        with self._in_one():
            self.broadcast(size, root, timeout=timeout).wait()
            content = mine if at_root else _buffer(int(size))
            self.broadcast(content, root, timeout=timeout).wait()
        if refused is not None:
            raise refused
        return obj if at_root else self._decoded(content, root, allow_pickle)

    def scatter_object(
        self,
        objects: Sequence[object] | None = None,
        root: int = 0,
        *,
        allow_pickle: bool = False,
        timeout: Timeout = None,
    ) -> Any:
        """Return this rank's object of the root's list.

        Args:
            objects: At the root: one a rank, each as in `all_gather_object`; None elsewhere.
            root: Group rank.
            allow_pickle: Pickle and unpickle other objects.
            timeout: Limit of each of the two steps.

        Raises:
            InvalidUsageError: The root's list has the wrong length (nothing is sent then), or an object of it
                cannot be encoded: the ranks that were to get it raise, and the root.

        Examples:
            >>> part = pg.scatter_object(["a", "b"] if pg.rank() == 0 else None, root=0)
            >>> part == "ab"[pg.rank()]
            True
        """
        at_root = check_rank(root, "root", self.info.world_size) == self.info.rank
        given = self._one_a_rank(objects) if at_root else []
        encoded = [_encoded(obj, allow_pickle) for obj in given]
        sizes = torch.tensor(
            [part.numel() for part, _ in encoded] or [0] * self.info.world_size, device="cpu"
        )
        with self._in_one():
            self.broadcast(sizes, root, timeout=timeout).wait()
            longest, size = int(sizes.max()), int(sizes[self.info.rank])
            buffer = _buffer(longest)
            parts = [_padded(part, longest) for part, _ in encoded] if at_root else None
            self.scatter(buffer, parts, root, timeout=timeout).wait()
        for _, refused in encoded:
            if refused is not None:
                raise refused
        return given[root] if at_root else self._decoded(buffer[:size], root, allow_pickle)

    def send_object(
        self, obj: object, dst: int, tag: int = 0, *, allow_pickle: bool = False, timeout: Timeout = None
    ) -> None:
        """Send an object to a rank that calls `recv_object`.

        Args:
            obj: As in `all_gather_object`.
            dst: Group rank.
            tag: Matches the receiver's.
            allow_pickle: Pickle other objects.
            timeout: Limit of each of the two messages.

        Raises:
            InvalidUsageError: It cannot be encoded; nothing was sent.

        Examples:
            >>> if pg.rank() == 0:
            ...     pg.send_object({"step": 7}, dst=1)
            ... else:
            ...     pg.recv_object(src=0)
        """
        content = _tensor_of(encode(obj, allow_pickle=allow_pickle))
        with self._in_one():
            self.send(torch.tensor([content.numel()], device="cpu"), dst, tag, timeout=timeout)
            self.send(content, dst, tag, timeout=timeout)

    def recv_object(
        self,
        src: int | None = None,
        tag: int = 0,
        *,
        allow_pickle: bool = False,
        timeout: Timeout = None,
    ) -> tuple[Any, int]:
        """Return an object that was sent to this rank, and the group rank of its sender.

        Args:
            src: Group rank of the sender; None takes the first to arrive.
            tag: Matches the sender's.
            allow_pickle: Unpickle objects that were pickled.
            timeout: Limit of each of the two messages.

        Raises:
            InvalidUsageError: It was pickled, and ``allow_pickle`` is False or it cannot be unpickled here.

        Examples:
            >>> if pg.rank() == 0:
            ...     pg.send_object({"step": 7}, dst=1)
            ... else:
            ...     obj, source = pg.recv_object()  # ({'step': 7}, 0)
        """
        size = torch.empty(1, dtype=torch.int64, device="cpu")
        with self._in_one():
            received = self.recv(size, src, tag, timeout=timeout)
            received.wait()
            source = received.source_rank()
            content = _buffer(_checked(int(size), source, self.info))
            self.recv(content, source, tag, timeout=timeout).wait()
        return self._decoded(content, source, allow_pickle), source

    @contextmanager
    def _in_one(self) -> Iterator[None]:
        """Make the two steps one operation for the others: they wait in the second one.

        A step whose result is read is waited for, which a coalescing block refuses: it has not run then.

        An exception between the steps, such as a lack of memory for the buffers or one that a signal handler
        raised, breaks the group, as in an operation.
        """
        try:
            yield
        except Dist2Error:
            raise  # the others have it, or its own
        except BaseException as error:
            self._refuse(error)
            raise

    def _decoded(self, content: Tensor, source: int, allow_pickle: bool) -> Any:
        # Straight from memory: torch needs numpy for anything else, and dist2 does not depend on it.
        data = ctypes.string_at(content.data_ptr(), content.numel()) if content.numel() else b""
        return decode(data, allow_pickle=allow_pickle, source=source, names=self.info.names)

    def _all_sizes(self, mine: Tensor, timeout: Timeout) -> list[int]:
        """Return the size that every rank brings."""
        sizes = torch.empty(self.info.world_size, dtype=torch.int64, device="cpu")
        self.all_gather_single(sizes, torch.tensor([mine.numel()], device="cpu"), timeout=timeout).wait()
        return [_checked(size, rank, self.info) for rank, size in enumerate(sizes.tolist())]

    def _one_a_rank(self, objects: Sequence[object] | None) -> Sequence[object]:
        if not isinstance(objects, (list, tuple)) or len(objects) != self.info.world_size:
            got = f"{len(objects)}" if isinstance(objects, (list, tuple)) else repr(objects)
            raise InvalidUsageError(
                f"objects must be a list of {self.info.world_size} at the root, one a rank; got {got}"
            )
        return objects


# Objects and bytes


def _encoded(obj: object, allow_pickle: bool) -> tuple[Tensor, Exception | None]:
    """Return the bytes of an object and None; if that fails, the bytes of a refusal and the error."""
    try:
        return _tensor_of(encode(obj, allow_pickle=allow_pickle)), None
    except InvalidUsageError as error:
        return _tensor_of(refusal(error)), error
    except MemoryError as error:
        return _tensor_of(refusal(InvalidUsageError("its rank lacks the memory to encode it"))), error


def _tensor_of(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _buffer(size: int) -> Tensor:
    return torch.empty(size, dtype=torch.uint8, device="cpu")


def _checked(size: int, source: int, group: GroupInfo) -> int:
    if size <= 0:  # an encoded object has a byte at least
        raise WireError(f"{group.names([source])} announces an object of {size} bytes")
    return size


def _padded(part: Tensor, size: int) -> Tensor:
    whole = torch.zeros(size, dtype=torch.uint8, device="cpu")
    whole[: part.numel()] = part
    return whole
