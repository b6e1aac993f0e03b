"""A recording in the format of PyTorch's flight recorder, version 2.10, as ``torchfrtrace`` reads it.

The analyser matches entries of equal ``collective_seq_id`` in a group over all ranks and compares their
fields. Records that it would misread are written in another form (all verified with torch 2.13):

- It knows a fixed list of backends and operations; ours are mapped onto those.
- Lists of tensors are flattened into one size, and sizes that may differ between ranks (the ``_v``
  operations, the result of `reduce` off the root) are written with values that are equal on all ranks.
- It takes a point-to-point operation in a group for a collective that others did not join. So the
  messages of one channel (source, destination, tag) form a group of their own with those two members,
  in which the n-th send meets the n-th receive.
- It drops entries below the highest first ``record_id`` of all ranks, as a full ring begins later. Ours are
  made of numbers on which all ranks agree: the latest collective of the widest group, which is kept however
  busy other groups are, and the number of the collective in its own group.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import attrs
import torch

from dist2.operation.kinds import OpKind
from dist2.operation.record import Operation, State
from dist2.operation.signature import GroupInfo, TensorMeta
from observability.flight_recorder import (
    Frame,
    RecordedError,
    Recording,
    channel_of,
    error_text,
    first_messages,
)

VERSION = "2.10"

Entry = dict[str, Any]
"""One record of the format."""

_BACKENDS = {"nccl": "nccl", "torch:nccl": "nccl", "torch:xccl": "xccl"}
_CPU_BACKEND = "gloo"

_NAMES = {
    OpKind.ALL_REDUCE_COALESCED: "allreduce_coalesced",
    OpKind.ALL_GATHER_SINGLE_COALESCED: "all_gather_into_tensor_coalesced",
    OpKind.REDUCE_SCATTER_SINGLE_COALESCED: "reduce_scatter_tensor_coalesced",
    # Only under this name are sizes compared in sum over all ranks, so that splits may differ.
    OpKind.ALL_TO_ALL_SINGLE: "all_to_all",
}

_DTYPES = {
    torch.uint8: "Byte",
    torch.int8: "Char",
    torch.int16: "Short",
    torch.int32: "Int",
    torch.int64: "Long",
    torch.float16: "Half",
    torch.float32: "Float",
    torch.float64: "Double",
    torch.bfloat16: "BFloat16",
    torch.bool: "Bool",
    torch.complex32: "ComplexHalf",
    torch.complex64: "ComplexFloat",
    torch.complex128: "ComplexDouble",
}

_INTERVAL = 1 << 20
"""Record ids between two collectives of the widest group: more than a ring of default size holds."""

Sizes = list[list[int]]


def dump_of(recording: Recording) -> dict[str, Any]:
    """Return the dump of one rank: plain dictionaries, lists, numbers and text."""
    numbered = sorted(_numbered(recording), key=lambda pair: pair[0])
    if recording.complete and numbered:
        numbered[0] = (0, numbered[0][1])
    writer = _Writer(recording, [operation for _, operation in numbered])
    entries = [writer.entry(record_id, operation) for record_id, operation in numbered]
    return {
        "version": VERSION,
        "entries": entries,
        "pg_config": writer.pg_config,
        "pg_status": writer.pg_status(),
        "comm_lib_version": f"torch {torch.__version__}",
    }


def json_variant(dump: dict[str, Any]) -> dict[str, Any]:
    """Return the same dump as the JSON format has it: no frames, 0 for times that are missing."""

    def plain(entry: Entry) -> Entry:
        kept = {key: value for key, value in entry.items() if key != "frames"}
        for key in ("time_discovered_started_ns", "time_discovered_completed_ns"):
            kept[key] = kept[key] or 0
        kept["process_group"] = list(kept["process_group"])
        return kept

    return {**dump, "entries": [plain(entry) for entry in dump["entries"]]}


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype in C++: ``Float`` for `torch.float32`."""
    return _DTYPES.get(dtype) or str(dtype).removeprefix("torch.").capitalize()


def _numbered(recording: Recording) -> Iterable[tuple[int, Operation]]:
    """Yield (record id, operation); of an id, all ranks that have one drop the same operations.

    Where the ring has dropped operations, the moment in which it begins is known by the last collective of
    the widest group before. Of that moment, collectives are in order of their numbers; messages have no
    number on which ranks agree, so they are dropped: some of them are gone.
    """
    widest = _widest_group(recording)
    moment, is_whole, last = 0, recording.complete, None
    for index, operation in enumerate(recording.operations):
        signature, is_recent = operation.signature, operation.created_ns >= recording.since_ns
        if widest is None:
            yield index, operation
        elif signature.group is widest and not signature.kind.is_p2p:
            moment, is_whole = operation.seq, is_whole or is_recent
            if is_recent:
                yield moment * _INTERVAL + _INTERVAL - 1, operation
            last = operation
        elif is_recent:
            if last is not None and last.created_ns < recording.since_ns:
                yield last.seq * _INTERVAL + _INTERVAL - 1, last
                last = None
            if not signature.kind.is_p2p:
                yield moment * _INTERVAL + min(operation.seq, _INTERVAL - 2), operation
            elif is_whole:
                yield moment * _INTERVAL, operation


def _widest_group(recording: Recording) -> GroupInfo | None:
    """Return the group of most ranks, if the ring has collectives of it."""
    candidates = {
        operation.signature.group for operation in recording.operations if not operation.signature.kind.is_p2p
    }
    most = max((info.world_size for info in recording.groups), default=0)
    spanning = [info for info in candidates if info.world_size == most]
    return min(spanning, key=lambda info: info.uid, default=None)


class _Writer:
    """Writes the entries of one recording, and collects the groups that they name."""

    def __init__(self, recording: Recording, written: Sequence[Operation]) -> None:
        self._recording = recording
        self._pg_ids = {info: number for number, info in enumerate(recording.groups)}
        self._channel_ids: dict[str, int] = {}
        self._messages = first_messages(attrs.evolve(recording, operations=tuple(written)))
        self._op_ids: Counter[GroupInfo] = Counter()
        self.pg_config = {info.uid: _group_config(info) for info in recording.groups}

    def entry(self, record_id: int, operation: Operation) -> Entry:
        """Return the entry of an operation."""
        signature = operation.signature
        where = self._message(operation) if signature.kind.is_p2p else self._collective(operation)
        inputs, outputs = _sizes(operation)
        finished = operation.state is State.COMPLETED
        self._op_ids[signature.group] += 1
        return {
            "record_id": record_id,
            **where,
            "op_id": self._op_ids[signature.group],
            "thread_name": "",
            "thread_id": "0",
            "time_created_ns": self._epoch(operation.created_ns),
            **({"duration_ms": (operation.finished_ns - operation.started_ns) / 1e6} if finished else {}),
            "input_sizes": inputs,
            "input_dtypes": _dtypes(signature.inputs or signature.outputs),
            "output_sizes": outputs,
            "output_dtypes": _dtypes(signature.outputs or signature.inputs),
            "state": _state(operation),
            "time_discovered_started_ns": self._epoch(operation.started_ns),
            "time_discovered_completed_ns": self._epoch(operation.finished_ns) if finished else None,
            "retired": operation.finished_ns != 0,
            "timeout_ms": round(operation.timeout_s * 1e3),
            "is_p2p": signature.kind.is_p2p,
            "frames": _frames(operation, self._recording.frames.get(operation, ())),
            "call": str(signature),  # not read by the analyser
            "error": error_text(operation),
        }

    def pg_status(self) -> dict[str, dict[str, int]]:
        """Return the last collectives of each group, by its number."""
        status = {
            str(number): {
                "last_enqueued_collective": 0,
                "last_started_collective": 0,
                "last_completed_collective": 0,
            }
            for number in self._pg_ids.values()
        }
        for operation in self._recording.operations:
            if operation.signature.kind.is_p2p:
                continue
            of_group = status[str(self._pg_ids[operation.signature.group])]
            reached = {"last_enqueued_collective"}
            if operation.started_ns:
                reached.add("last_started_collective")
            if operation.state is State.COMPLETED:
                reached.add("last_completed_collective")
            for key in reached:
                of_group[key] = max(of_group[key], operation.seq)
        return status

    def _collective(self, operation: Operation) -> Entry:
        signature = operation.signature
        info = signature.group
        kind = signature.kind
        return {
            "pg_id": self._pg_ids[info],
            "process_group": (info.uid, _description(info)),
            "collective_seq_id": operation.seq,
            "p2p_seq_id": 0,
            "profiling_name": f"{_backend(info)}:{_NAMES.get(kind, kind.value)}",
        }

    def _message(self, operation: Operation) -> Entry:
        """Place a point-to-point operation in the group of its channel."""
        info = operation.signature.group
        channel = channel_of(operation)
        if channel is None:  # a receive from any that nothing has answered: it can meet no send
            number, members = operation.seq, [self._recording.rank]
            uid = f"{info.uid}/p2p any->{info.rank} tag {operation.signature.tag}"
            verb = "recv 0<-0"
        else:
            number = self._messages[channel]
            self._messages[channel] += 1
            _, source, destination, tag = channel
            uid = f"{info.uid}/p2p {source}->{destination} tag {tag}"
            members = sorted({info.global_ranks[source], info.global_ranks[destination]})
            first = members.index(info.global_ranks[source])
            second = members.index(info.global_ranks[destination])
            sending = operation.signature.kind is OpKind.SEND
            verb = f"send {first}->{second}" if sending else f"recv {second}<-{first}"
        self.pg_config[uid] = {"name": uid, "desc": _description(info), "ranks": str(members)}
        return {
            "pg_id": self._channel_ids.setdefault(uid, len(self._pg_ids) + len(self._channel_ids)),
            "process_group": (uid, _description(info)),
            "collective_seq_id": number,
            "p2p_seq_id": number,
            "profiling_name": f"{_backend(info)}:{verb}",
        }

    def _epoch(self, monotonic: int) -> int | None:
        return monotonic + self._recording.epoch_offset_ns if monotonic else None


def _group_config(info: GroupInfo) -> dict[str, str]:
    return {"name": info.uid, "desc": _description(info), "ranks": str(list(info.global_ranks))}


def _description(info: GroupInfo) -> str:
    return info.desc or "undefined"


def _backend(info: GroupInfo) -> str:
    return _BACKENDS.get(info.backend, _CPU_BACKEND)


def _state(operation: Operation) -> str:
    state = operation.state
    return State.STARTED.value if state is State.FAILED else state.value


def _dtypes(metas: Sequence[TensorMeta]) -> list[str]:
    return [dtype_name(meta.dtype) for meta in metas]


def _sizes(operation: Operation) -> tuple[Sizes, Sizes]:
    """Return input and output sizes as the analyser compares them."""
    signature = operation.signature
    kind, world_size = signature.kind, signature.group.world_size
    inputs = [list(meta.shape) for meta in signature.inputs]
    outputs = [list(meta.shape) for meta in signature.outputs]
    if kind is OpKind.REDUCE:
        return inputs, inputs
    if kind in (OpKind.ALL_GATHER, OpKind.GATHER):
        return inputs, [[world_size, *inputs[0]]]
    if kind is OpKind.SCATTER:
        return [[world_size, *outputs[0]]], outputs
    if kind is OpKind.REDUCE_SCATTER:
        return [[_numel(signature.inputs)]], outputs
    if kind is OpKind.ALL_GATHER_V:
        return [[_numel(signature.outputs)]], [[_numel(signature.outputs)]]
    if kind is OpKind.REDUCE_SCATTER_V:
        return [[_numel(signature.inputs)]], [[_numel(signature.inputs)]]
    if kind in (OpKind.ALL_TO_ALL, OpKind.ALL_TO_ALL_SINGLE):
        return [[_numel(signature.inputs)]], [[_numel(signature.outputs)]]
    return inputs, outputs


def _numel(metas: Sequence[TensorMeta]) -> int:
    return sum(meta.numel for meta in metas)


def _frames(operation: Operation, known: Sequence[Frame]) -> list[dict[str, Any]]:
    code, error = operation.code, operation.error
    if isinstance(error, RecordedError):
        known = error.frames
    if not known and code is not None:
        known = [Frame(code.co_qualname, code.co_filename, operation.line)]
    return [{"name": each.name, "filename": each.filename, "line": each.line} for each in known]
