"""`Functions`: NCCL's C functions through ctypes, and `RawCommunicator`, the twin of cupy's communicator.

cupy has no functions for custom reductions and the library's last error. The twin has cupy's method names; it
serves where cupy is not installed, in tests.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from ctypes import POINTER, byref, c_char, c_char_p, c_int, c_size_t, c_uint, c_void_p
from functools import partial
from typing import Any

import attrs

UNIQUE_ID_BYTES = 128
SUCCESS, IN_PROGRESS = 0, 7
_ON_HOST = 1
"""Where the factor of a custom reduction lies, at the time of the call."""


class _UniqueId(ctypes.Structure):
    """NCCL's unique id, which is passed by value."""

    _fields_ = (("internal", c_char * UNIQUE_ID_BYTES),)


@attrs.frozen(eq=False)
class NcclFailure(Exception):  # noqa: N818 - as cupy's NcclError, it becomes a BackendError
    """A call returned something else than success.

    Attributes:
        function: Name of the function.
        status: Its result code.
        text: The library's text for the code.
    """

    function: str
    status: int
    text: str

    def __str__(self) -> str:
        return f"{self.function} returned {self.status}: {self.text}"


_UNDEFINED = -(2**31)
_MAGIC = 0xCAFEBEEF


class Config(ctypes.Structure):
    """NCCL's ``ncclConfig_t`` of version 2.18, with which newer versions work as well.

    NCCL reads as many bytes as `size` says and leaves fields alone that are newer than `version`. What is the
    padding of that version is named here, as newer ones have a field there.
    """

    _fields_ = (
        ("size", c_size_t),
        ("magic", c_uint),
        ("version", c_uint),
        ("blocking", c_int),
        ("cga_cluster_size", c_int),
        ("min_ctas", c_int),
        ("max_ctas", c_int),
        ("net_name", c_char_p),
        ("split_share", c_int),
        ("traffic_class", c_int),
    )

    @classmethod
    def of(cls, settings: Mapping[str, int | str]) -> Config:
        """Return a configuration with some settings; the others are left to NCCL."""
        made = cls(ctypes.sizeof(cls), _MAGIC, 21800, *[_UNDEFINED] * 4, None, _UNDEFINED, _UNDEFINED)
        for name, value in settings.items():
            setattr(made, name, value.encode() if isinstance(value, str) else value)
        return made


_BUFFERS = (c_void_p, c_void_p, c_size_t, c_int)
"""Source, target, count, dtype."""
_SIGNATURES: dict[str, tuple[Any, ...]] = {
    "ncclGetVersion": (POINTER(c_int),),
    "ncclGetUniqueId": (POINTER(_UniqueId),),
    "ncclCommInitRank": (POINTER(c_void_p), c_int, _UniqueId, c_int),
    "ncclCommInitRankConfig": (POINTER(c_void_p), c_int, _UniqueId, c_int, POINTER(Config)),
    "ncclCommDestroy": (c_void_p,),
    "ncclCommAbort": (c_void_p,),
    "ncclCommGetAsyncError": (c_void_p, POINTER(c_int)),
    "ncclCommSplit": (c_void_p, c_int, c_int, POINTER(c_void_p), c_void_p),
    "ncclRedOpCreatePreMulSum": (POINTER(c_int), c_void_p, c_int, c_int, c_void_p),
    "ncclRedOpDestroy": (c_int, c_void_p),
    "ncclGroupStart": (),
    "ncclGroupEnd": (),
    "ncclAllReduce": (*_BUFFERS, c_int, c_void_p, c_void_p),
    "ncclReduce": (*_BUFFERS, c_int, c_int, c_void_p, c_void_p),
    "ncclBroadcast": (*_BUFFERS, c_int, c_void_p, c_void_p),
    "ncclReduceScatter": (*_BUFFERS, c_int, c_void_p, c_void_p),
    "ncclAllGather": (*_BUFFERS, c_void_p, c_void_p),
    "ncclSend": (c_void_p, c_size_t, c_int, c_int, c_void_p, c_void_p),
    "ncclRecv": (c_void_p, c_size_t, c_int, c_int, c_void_p, c_void_p),
}


class Functions:
    """The functions of a loaded library.

    Args:
        library: The library, as a `ctypes.CDLL`, whose functions let other threads run meanwhile.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        self.library = library
        library.ncclGetErrorString.restype = c_char_p
        for name, arguments in _SIGNATURES.items():
            function = getattr(library, name, None)  # not all versions have all
            if function is not None:
                function.argtypes, function.restype = arguments, c_int
        self.communicator = partial(RawCommunicator, self)
        self.group_start = partial(self.call, "ncclGroupStart")
        self.group_end = partial(self.call, "ncclGroupEnd")

    def call(self, name: str, *arguments: Any) -> None:
        """Call a function that returns a result code.

        Raises:
            NcclFailure: It is not success. A call that is still in progress counts as one.
        """
        status = getattr(self.library, name)(*arguments)
        if status not in (SUCCESS, IN_PROGRESS):
            raise NcclFailure(name, status, self.text_of(status))

    def text_of(self, status: int) -> str:
        """Return the text of a result code."""
        words: bytes = self.library.ncclGetErrorString(status)
        return words.decode(errors="replace")

    def last_error(self) -> str:
        """Return the library's text for its last error in this process; empty for none."""
        function = getattr(self.library, "ncclGetLastError", None)
        if function is None:
            return ""
        function.argtypes, function.restype = (c_void_p,), c_char_p
        return (function(None) or b"").decode(errors="replace").strip()

    def version(self) -> int:
        """Return the library's version."""
        found = c_int()
        self.call("ncclGetVersion", byref(found))
        return found.value

    def unique_id(self) -> bytes:
        """Return a new unique id, as cupy does."""
        made = _UniqueId()
        self.call("ncclGetUniqueId", byref(made))
        return ctypes.string_at(byref(made), UNIQUE_ID_BYTES)

    def premul_sum(self, handle: int, factor: bytes, datatype: int) -> int:
        """Return the code of a reduction that multiplies by a factor first.

        Args:
            handle: The communicator that it is for.
            factor: One element of the dtype.
            datatype: NCCL's code of the dtype.
        """
        made = c_int()
        self.call("ncclRedOpCreatePreMulSum", byref(made), c_char_p(factor), datatype, _ON_HOST, handle)
        return made.value


class RawCommunicator:
    """A communicator with the method names of cupy's `NcclCommunicator`.

    Args:
        functions: The library.
        size: Number of ranks.
        unique_id: The communicator's id, equal on all ranks.
        rank: This process's rank.
    """

    pointer: c_void_p | None = None

    def __init__(self, functions: Functions, size: int, unique_id: bytes, rank: int) -> None:
        pointer = self.prepare(functions)
        functions.call("ncclCommInitRank", byref(pointer), size, _content(unique_id), rank)

    def prepare(self, functions: Functions) -> c_void_p:
        """Return a place for the handle, known before a call that may block writes the handle there."""
        self.functions = functions
        self.pointer = c_void_p()
        return self.pointer

    @property
    def comm(self) -> int:
        """The handle; 0 before there is one, and once closed."""
        return 0 if self.pointer is None else self.pointer.value or 0

    def commSplit(self, color: int, key: int, config: None = None) -> RawCommunicator | None:  # noqa: N802 - cupy's
        """Return a communicator of the ranks with this color, ordered by key; all ranks call."""
        made = RawCommunicator.__new__(RawCommunicator)
        pointer = made.prepare(self.functions)
        self.functions.call("ncclCommSplit", self.comm, color, key, byref(pointer), None)
        return made if made.comm else None

    def abort(self) -> None:
        """Abort running operations, and free."""
        if self.comm:
            self.functions.call("ncclCommAbort", self.comm)
            self.pointer = None

    def destroy(self) -> None:
        """Free, together with the other ranks."""
        if self.comm:
            self.functions.call("ncclCommDestroy", self.comm)
            self.pointer = None

    def check_async_error(self) -> None:
        """Raise if the communicator has failed on the way."""
        found = c_int()
        self.functions.call("ncclCommGetAsyncError", self.comm, byref(found))
        if found.value not in (SUCCESS, IN_PROGRESS):
            raise NcclFailure("ncclCommGetAsyncError", found.value, self.functions.text_of(found.value))

    # The operations: addresses, counts and NCCL's codes; the stream comes last

    def allReduce(self, source: int, target: int, count: int, dtype: int, op: int, stream: int) -> None:  # noqa: N802 - cupy's
        """Call ncclAllReduce."""
        self.functions.call("ncclAllReduce", source, target, count, dtype, op, self.comm, stream)

    def reduce(
        self, source: int, target: int, count: int, dtype: int, op: int, root: int, stream: int
    ) -> None:
        """Call ncclReduce."""
        self.functions.call("ncclReduce", source, target, count, dtype, op, root, self.comm, stream)

    def broadcast(self, source: int, target: int, count: int, dtype: int, root: int, stream: int) -> None:
        """Call ncclBroadcast."""
        self.functions.call("ncclBroadcast", source, target, count, dtype, root, self.comm, stream)

    def reduceScatter(self, source: int, target: int, count: int, dtype: int, op: int, stream: int) -> None:  # noqa: N802 - cupy's
        """Call ncclReduceScatter."""
        self.functions.call("ncclReduceScatter", source, target, count, dtype, op, self.comm, stream)

    def allGather(self, source: int, target: int, count: int, dtype: int, stream: int) -> None:  # noqa: N802 - cupy's
        """Call ncclAllGather."""
        self.functions.call("ncclAllGather", source, target, count, dtype, self.comm, stream)

    def send(self, source: int, count: int, dtype: int, peer: int, stream: int) -> None:
        """Call ncclSend."""
        self.functions.call("ncclSend", source, count, dtype, peer, self.comm, stream)

    def recv(self, target: int, count: int, dtype: int, peer: int, stream: int) -> None:
        """Call ncclRecv."""
        self.functions.call("ncclRecv", target, count, dtype, peer, self.comm, stream)


class ConfiguredCommunicator(RawCommunicator):
    """A communicator with settings of its own, which cupy cannot give it; those split from it have them too.

    Args:
        functions: The library.
        settings: Fields of `Config`, equal on all ranks.
        size: Number of ranks.
        unique_id: The communicator's id, equal on all ranks.
        rank: This process's rank.
    """

    def __init__(
        self, functions: Functions, settings: Mapping[str, int | str], size: int, unique_id: bytes, rank: int
    ) -> None:
        pointer, config = self.prepare(functions), Config.of(settings)
        content = _content(unique_id)
        functions.call("ncclCommInitRankConfig", byref(pointer), size, content, rank, byref(config))


def _content(unique_id: bytes) -> _UniqueId:
    made = _UniqueId()
    ctypes.memmove(byref(made), unique_id, UNIQUE_ID_BYTES)
    return made
