"""`Signature`: the request of a call on a group, everything but its tensors' memory, and its fingerprint."""

from __future__ import annotations

import hashlib
import math
from functools import lru_cache
from typing import NamedTuple

import attrs
import torch

from dist2.operation.kinds import OpKind, Reduction
from dist2.runtime.rank_names import RankNames

_MAX_FINGERPRINTS = 1024


@attrs.frozen(eq=False)
class GroupInfo:
    """Identity of a group, without the means to use it: instruments, logs and errors may hold it.

    Attributes:
        uid: Unique in the job and equal on all members (``"world"``, ``"world/split(0,2)#0"``).
        name: The group's name in c10d; unique in the process.
        desc: Free text from the user.
        backend: Name of the backend.
        rank: The caller's rank in the group.
        global_ranks: For each group rank, its rank in the job's first group.
    """

    uid: str
    name: str
    desc: str
    backend: str
    rank: int
    global_ranks: tuple[int, ...]

    @property
    def world_size(self) -> int:
        """How many ranks the group has."""
        return len(self.global_ranks)

    @property
    def names(self) -> RankNames:
        """The names of its ranks in texts, without their processes."""
        return RankNames(self.name, self.global_ranks)


def context_id(uid: str) -> int:
    """Return 64 bits that stand for a group on the wire: equal on all members, never 0."""
    return digest(uid)


class TensorMeta(NamedTuple):
    """Shape and dtype of a tensor, without its memory: a tuple, as it is looked up at every new call."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: torch.Tensor) -> TensorMeta:
        return cls(tuple(tensor.shape), tensor.dtype)

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')}{list(self.shape)}"


@attrs.frozen(eq=False)
class Signature:
    """Everything about a call but its tensors' memory: the key of plans, metrics and mismatch checks.

    The group makes one per distinct call and reuses it, so that identity is equality and a backend
    may cache by it.

    Attributes:
        kind: Which operation.
        group: On which group.
        inputs: Metas of the tensors read, in the order that `ops` of the backend receive them.
        outputs: Metas of the tensors written; in-place operations name the tensor in both.
        reduction: How contributions combine, where they do.
        root: Group rank of the root, where there is one.
        peer: Group rank of the other side of a point-to-point; None receives from any.
        tag: Tag of a point-to-point.
        input_splits: Rows of dimension 0 sent to each rank (`all_to_all_single`, `reduce_scatter_v`).
        output_splits: Rows of dimension 0 received from each rank.
        fingerprint: 64 bits that must be equal on all ranks; see `fingerprint_of`.
    """

    kind: OpKind
    group: GroupInfo
    inputs: tuple[TensorMeta, ...] = ()
    outputs: tuple[TensorMeta, ...] = ()
    reduction: Reduction | None = None
    root: int | None = None
    peer: int | None = None
    tag: int = 0
    input_splits: tuple[int, ...] | None = None
    output_splits: tuple[int, ...] | None = None
    nbytes: int = attrs.field(init=False)
    fingerprint: int = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        object.__setattr__(self, "nbytes", self._payload_bytes())
        object.__setattr__(self, "fingerprint", fingerprint_of(self))

    @property
    def compared(self) -> tuple[TensorMeta, ...]:
        """The metas that ranks compare: of the inputs, or of the outputs where inputs may differ."""
        return self.outputs if self.kind in _BY_OUTPUTS else self.inputs

    def _payload_bytes(self) -> int:
        read = sum([meta.nbytes for meta in self.inputs])
        if self.outputs is self.inputs:
            return read
        return max(read, sum([meta.nbytes for meta in self.outputs]))

    def __str__(self) -> str:
        parts = [", ".join(map(str, self.inputs or self.outputs))]
        if self.reduction is not None:
            parts.append(f"op={self.reduction}")
        if self.root is not None:
            parts.append(f"root={self.group.names.argument(self.root)}")
        if self.kind.is_p2p:
            peer = "any" if self.peer is None else self.group.names.argument(self.peer)
            parts.append(f"peer={peer}, tag={self.tag}")
        return f"{self.kind.value}({', '.join(part for part in parts if part)})"


def fingerprint_of(signature: Signature) -> int:
    """Return 64 bits (never 0) that are equal on all ranks if and only if the ranks' calls match.

    Numbers of elements must match always, except where ranks may differ (`all_to_all`, where only the dtype
    must match). Of the ``_v`` operations the parts of all ranks count, which every rank knows; where only the
    root has all tensors (`gather`, `scatter`), one part.
    """
    kind = signature.kind
    op = OpKind.SEND if kind.is_p2p else kind
    return _fingerprint(op, signature.reduction, signature.root, signature.compared)


_BY_OUTPUTS = frozenset({OpKind.SCATTER, OpKind.RECV, OpKind.ALL_GATHER_V})
_UNEVEN = frozenset({OpKind.ALL_TO_ALL, OpKind.ALL_TO_ALL_SINGLE})


@lru_cache(maxsize=_MAX_FINGERPRINTS)
def _fingerprint(
    kind: OpKind, reduction: Reduction | None, root: int | None, metas: tuple[TensorMeta, ...]
) -> int:
    """Return it; groups made one after the other call the same. Messages are all as `SEND`."""
    if kind in _UNEVEN:
        agreeing = sorted({str(meta.dtype) for meta in metas})
    else:
        agreeing = [f"{meta.dtype}x{meta.numel}" for meta in metas]
    text = repr(("p2p" if kind.is_p2p else kind.value, str(reduction), root, agreeing))
    return digest(text)


def digest(text: str) -> int:
    """Return 64 bits of a hash that is the same in all processes, never 0."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") or 1
