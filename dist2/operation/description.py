"""A rank's call in words, for the errors of the others, and how the calls of ranks differ.

A `Call` is sent to other ranks, so its encoding is bounded, and checked when it is read. A mismatch error
names the attribute that differs first, its values, and the ranks of each (`describe_difference`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Hashable, Mapping, Sequence
from itertools import product

import attrs

from dist2.runtime.rank_names import RANKS, RankNames

MAX_BYTES = 2000
"""Longest encoding, in bytes; the rest is cut."""
_TEXT_CHARS = 600
_FILE_CHARS = 200
_SIZES_CHARS = 200
_TENSORS = 8


@attrs.frozen
class Call:
    """One rank's call of an operation.

    Attributes:
        op: Modern name of the operation; empty where the rank has called nothing.
        seq: Its number in the group (of this collective, or of this point-to-point).
        dtypes: The dtypes of the tensors that ranks compare: see `Signature.compared`; the first eight.
        shapes: Likewise.
        reduction: ``"sum"``, where contributions combine.
        root: Group rank of the root, where there is one.
        peer: Group rank of the other side of a point-to-point; None receives from any.
        tag: Tag of a point-to-point.
        file: The file of the line in user code that called.
        line: Its number; 0 where unknown.
        text: All of it in words: ``all_reduce(float32[4], op=sum) #7 at train.py:12``.
        sizes: A part that the rank received with another length than it expects, in words.
    """

    op: str = ""
    seq: int = 0
    dtypes: tuple[str, ...] = ()
    shapes: tuple[tuple[int, ...], ...] = ()
    reduction: str | None = None
    root: int | None = None
    peer: int | None = None
    tag: int | None = None
    file: str = ""
    line: int = 0
    text: str = "nothing yet"
    sizes: str = ""

    def encode(self) -> bytes:
        """Return at most `MAX_BYTES` that `decode` reads; a longer encoding is cut."""
        short = attrs.evolve(
            self,
            dtypes=self.dtypes[:_TENSORS],
            shapes=self.shapes[:_TENSORS],
            file=self.file[-_FILE_CHARS:],
            text=self.text[:_TEXT_CHARS],
            sizes=self.sizes[:_SIZES_CHARS],
        )
        for each in (short, attrs.evolve(short, dtypes=(), shapes=()), Call(self.op, self.seq, text=self.op)):
            encoded = json.dumps(attrs.asdict(each), ensure_ascii=False).encode(errors="replace")
            if len(encoded) <= MAX_BYTES:
                break
        return encoded

    def numbered(self, seq: int) -> Call:
        """Return the same call as another operation."""
        return attrs.evolve(self, seq=seq, text=self.text.replace(f" #{self.seq}", f" #{seq}", 1))

    def with_tag(self, tag: int) -> Call:
        """Return a message like this one with another tag: another call, at a place that is not known."""
        if self.tag is None or self.tag == tag:
            return self
        text = self.text.partition(f" #{self.seq}")[0].replace(f"tag={self.tag}", f"tag={tag}")
        return attrs.evolve(self, tag=tag, seq=0, file="", line=0, text=text)

    @classmethod
    def decode(cls, data: bytes | bytearray) -> Call:
        """Decode a call. Malformed data becomes the call's text, since errors only show it."""
        try:
            fields = json.loads(data)
            call = cls(
                op=_text(fields["op"]),
                seq=_number(fields["seq"], least=0),
                dtypes=tuple(_text(each) for each in _sequence(fields["dtypes"])),
                shapes=tuple(
                    tuple(_number(extent) for extent in _sequence(shape))
                    for shape in _sequence(fields["shapes"])
                ),
                reduction=None if fields["reduction"] is None else _text(fields["reduction"]),
                root=None if fields["root"] is None else _number(fields["root"]),
                peer=None if fields["peer"] is None else _number(fields["peer"]),
                tag=None if fields["tag"] is None else _number(fields["tag"]),
                file=_text(fields["file"]),
                line=_number(fields["line"]),
                text=_text(fields["text"]),
                sizes=_text(fields["sizes"]),
            )
        except (ValueError, TypeError, KeyError, RecursionError):
            return cls(text=bytes(data[:_TEXT_CHARS]).decode(errors="replace"))
        return call


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError
    return value


def _number(value: object, least: int = -(1 << 63)) -> int:
    if type(value) is not int:
        raise TypeError
    if not least <= value < 1 << 63:  # no frame could carry it
        raise ValueError
    return value


def _sequence(value: object) -> Sequence[object]:
    if not isinstance(value, list):
        raise TypeError
    return value


_MOST_GROUPS = 4
"""Groups of equal ranks that a message lists; it stays readable with thousands of ranks."""


def _root(call: Call, names: RankNames) -> str:
    return f"root={call.root if call.root is None else names.argument(call.root)}"


def _shapes(call: Call, names: RankNames) -> str:
    return ", ".join(str(list(shape)) for shape in call.shapes)


def _numels(call: Call) -> tuple[int, ...]:
    """Element counts: shapes of equal counts are compatible."""
    counts = []
    for shape in call.shapes:
        numel = 1
        for extent in shape:
            numel *= extent
        counts.append(numel)
    return tuple(counts)


Value = Callable[[Call], Hashable]
Text = Callable[[Call, RankNames], object]

_ATTRIBUTES: tuple[tuple[str, Value, Text], ...] = (
    ("operation", lambda call: call.op, lambda call, names: call.op),
    ("reduction", lambda call: call.reduction, lambda call, names: call.reduction),
    ("root", lambda call: call.root, lambda call, names: _root(call, names)),
    ("dtype", lambda call: call.dtypes, lambda call, names: ", ".join(call.dtypes)),
    ("shape", _numels, _shapes),
)
"""Attributes to compare: name, value to compare, value to show. The first difference is named."""


def attributes_differ(one: Call, other: Call) -> bool:
    """Whether two calls differ in an attribute that ranks compare."""
    return any(value(one) != value(other) for _, value, _ in _ATTRIBUTES)


def is_behind(call: Call, other: Call) -> bool:
    """Whether a call is of an earlier collective than another: its rank has not called that one yet."""
    messages = {"send", "recv"}  # which have numbers of their own
    return call.seq < other.seq and not messages & {call.op, other.op}


def describe_difference(calls: Mapping[int, Call], names: RankNames = RANKS) -> str:
    """Return the attribute in which calls differ first, with its values: ``dtype differs: ranks 0-6 ...``.

    Args:
        calls: The call of each rank. An unknown call has no operation.
        names: Names the ranks.

    Returns:
        Text for an error; ``ranks called different operations`` if the calls do not tell the difference.
    """
    for call in calls.values():
        if call.sizes:  # shapes may differ in such an operation
            return f"sizes differ: {call.sizes}"
    known = {rank: call for rank, call in calls.items() if call.op}
    messages = _ends_of_a_message(known)
    if messages:  # others only watch
        found = _first_difference(messages, _ATTRIBUTES[1:], names)
    else:
        latest = max(known.values(), key=lambda call: call.seq, default=Call())
        newest = {rank: call for rank, call in known.items() if not is_behind(call, latest)}
        found = _first_difference(newest, _ATTRIBUTES, names) or _first_difference(known, _ATTRIBUTES, names)
    return found or "ranks called different operations"


def _first_difference(
    calls: Mapping[int, Call], attributes: Sequence[tuple[str, Value, Text]], names: RankNames
) -> str:
    """Return the first attribute in which calls differ, and its values; empty if they are alike."""
    for name, value, text in attributes:
        groups: dict[Hashable, list[int]] = {}
        for rank, call in sorted(calls.items()):
            groups.setdefault(value(call), []).append(rank)
        if len(groups) > 1:
            values = [f"{names(ranks, False)} {text(calls[ranks[0]], names)}" for ranks in groups.values()]
            return f"{name} differs: {_listed(values, ', ')}"
    return ""


def _ends_of_a_message(calls: Mapping[int, Call]) -> dict[int, Call]:
    """Return a send and its receive that differ, if there are such calls."""
    sends = [(rank, call) for rank, call in calls.items() if call.op == "send"]
    receives = [(rank, call) for rank, call in calls.items() if call.op == "recv"]
    for (sender, send), (receiver, receive) in product(sends, receives):
        fits = send.peer in (receiver, None) and receive.peer in (sender, None)
        if fits and any(value(send) != value(receive) for _, value, _ in _ATTRIBUTES[1:]):
            return dict(sorted([(sender, send), (receiver, receive)]))
    return {}


def describe_calls(calls: Mapping[int, Call], names: RankNames = RANKS) -> str:
    """Return the call of each rank in words; ranks with the same call are listed together."""
    groups: dict[str, list[int]] = {}
    for rank, call in sorted(calls.items()):
        groups.setdefault(call.text, []).append(rank)
    return _listed([f"{names(ranks, False)} called {text}" for text, ranks in groups.items()], "; ")


def _listed(parts: list[str], separator: str) -> str:
    """Join the first parts, and count the others."""
    left = len(parts) - _MOST_GROUPS
    if left > 1:
        parts = [*parts[:_MOST_GROUPS], f"and {left} other values"]
    return separator.join(parts)
