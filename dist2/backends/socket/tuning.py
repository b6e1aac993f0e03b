"""Measured constants: the sizes at which another algorithm becomes faster, and their file.

    Tuning.read("tuning.json").thresholds

The file is JSON: ``{"format": 1, "thresholds": {"whole_bytes": 262144, ...}, "measured": {...}}``. Thresholds
that it does not name keep their defaults; ``measured`` is for people (the machine, the date, the figures) and
is not interpreted. ``DIST2_TUNING`` names the file. All members of a group use the file that its rank 0 has
read.

Thresholds that depend on the number of ranks of a host are rows: one number for each of `CROWDS`.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Mapping
from pathlib import Path

import attrs

from dist2.errors import InvalidUsageError

FORMAT = 1
CROWDS = (2, 4, 8, 16)
"""Numbers of ranks on a host that rows of constants are for; others go by the next one, or by the last."""

Row = tuple[int, ...]


def column(world_size: int) -> int:
    """Return which number of a row is for so many ranks."""
    return min(bisect_left(CROWDS, world_size), len(CROWDS) - 1)


@attrs.frozen(cache_hash=True)
class Thresholds:
    """Where one algorithm overtakes another: constants measured on the machine, all in bytes but `crowd`.

    Attributes:
        all_reduce_mapped_bytes: From so many bytes on, the ranks of a host find out whether all tensors are
            mapped, and read each other's if so.
        reduce_mapped_bytes, reduce_scatter_mapped_bytes, broadcast_mapped_bytes, all_gather_mapped_bytes,
        gather_mapped_bytes, scatter_mapped_bytes, all_to_all_mapped_bytes: Likewise.
        one_shot_bytes: Up to so many bytes, a flat `all_reduce` folds everything everywhere.
        one_shot_reduce_bytes: Likewise, the root of a flat `reduce` folds everything.
        whole_bytes: Up to so many bytes sent twice, an `all_reduce` by messages sends whole vectors.
        whole_reduce_bytes: Likewise for `reduce`.
        doubling_bytes: Vectors up to here are reduced by doubling, where the order is free.
        tree_bytes: Vectors up to here are broadcast down a tree.
        short_bytes: Up to here the number of messages counts and not their length.
        crowd: With more ranks than this, none should talk to all others at once.
    """

    all_reduce_mapped_bytes: Row = (128 << 10, 96 << 10, 768 << 10, 1 << 20)
    reduce_mapped_bytes: Row = (1 << 20, 768 << 10, 512 << 10, 1 << 20)
    reduce_scatter_mapped_bytes: Row = (64 << 10, 768 << 10, 1 << 20, 1 << 20)
    broadcast_mapped_bytes: Row = (384 << 10, 768 << 10, 384 << 10, 1 << 20)
    all_gather_mapped_bytes: Row = (64 << 10, 384 << 10, 1 << 20, 1 << 20)
    gather_mapped_bytes: Row = (96 << 10, 320 << 10, 256 << 10, 512 << 10)
    scatter_mapped_bytes: Row = (96 << 10, 320 << 10, 192 << 10, 256 << 10)
    all_to_all_mapped_bytes: Row = (64 << 10, 144 << 10, 128 << 10, 512 << 10)
    one_shot_bytes: Row = (16 << 10, 24 << 10, 12 << 10, 24 << 10)
    one_shot_reduce_bytes: Row = (16 << 20, 3 << 20, 48 << 10, 192 << 10)
    whole_bytes: int = 256 << 10
    whole_reduce_bytes: int = 1 << 20
    doubling_bytes: int = 1 << 20
    tree_bytes: int = 1 << 20
    short_bytes: int = 32 << 10
    crowd: int = 16

    def mapped_from(self, nbytes: int) -> Thresholds:
        """Return these with mapped tensors read in place from so many bytes on in all operations."""
        return self.changed(dict.fromkeys(MAPPED, (nbytes,) * len(CROWDS)))

    def changed(self, constants: Mapping[str, int | Row]) -> Thresholds:
        """Return these with some of them replaced."""
        return Thresholds(**(attrs.asdict(self) | dict(constants)))


DEFAULT_THRESHOLDS = Thresholds()
ROWS = tuple(name for name, value in attrs.asdict(DEFAULT_THRESHOLDS).items() if isinstance(value, tuple))
"""Names of the constants that are rows."""
MAPPED = tuple(name for name in ROWS if name.endswith("_mapped_bytes"))
"""Those of them that say from where on mapped tensors are read in place."""


@attrs.frozen
class Tuning:
    """The file that ``benchmarks/tune.py`` writes.

    Attributes:
        thresholds: Constants for the selection of algorithms.
        measured: Where the figures come from, for people: any JSON.
    """

    thresholds: Thresholds = DEFAULT_THRESHOLDS
    measured: Mapping[str, object] = attrs.field(factory=dict)

    def to_json(self) -> str:
        """Return the text of a file."""
        document = {
            "format": FORMAT,
            "thresholds": attrs.asdict(self.thresholds),
            "measured": dict(self.measured),
        }
        return json.dumps(document, indent=1)

    @classmethod
    def from_json(cls, text: str, where: str = "tuning") -> Tuning:
        """Read the text of a file.

        Args:
            text: The result of `to_json`.
            where: Its name in error messages.

        Raises:
            InvalidUsageError: It is not such a text, or has a constant that cannot be.
        """
        try:
            document = json.loads(text)
        except ValueError as error:
            raise InvalidUsageError(f"{where}: not JSON: {error}") from error
        if not isinstance(document, dict) or document.get("format") != FORMAT:
            raise InvalidUsageError(f"{where}: not a tuning file of format {FORMAT}")
        constants = document.get("thresholds", {})
        measured = document.get("measured", {})
        if not isinstance(constants, dict) or not isinstance(measured, dict):
            raise InvalidUsageError(f"{where}: 'thresholds' and 'measured' must be objects")
        known = attrs.fields_dict(Thresholds)
        for name, value in constants.items():
            if name not in known:
                raise InvalidUsageError(
                    f"{where}: no threshold is called {name!r}; known: {', '.join(known)}"
                )
            _check(where, name, value)
        rows = {name: tuple(value) for name, value in constants.items() if name in ROWS}
        return cls(Thresholds(**(constants | rows)), measured)

    @classmethod
    def read(cls, path: str | Path) -> Tuning:
        """Read a file.

        Raises:
            InvalidUsageError: There is none, or it is not one of these.
        """
        try:
            text = Path(path).read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise InvalidUsageError(f"{_named(path)}: cannot be read: {error}") from error
        return cls.from_json(text, _named(path))

    def write(self, path: str | Path) -> None:
        """Write a file, replacing one that is there."""
        Path(path).write_text(self.to_json() + "\n")


def _named(path: str | Path) -> str:
    return f"tuning file {str(path)!r} (from DIST2_TUNING or the option tuning)"


def _check(where: str, name: str, value: object) -> None:
    if name not in ROWS:
        if type(value) is not int or value < 0:
            raise InvalidUsageError(f"{where}: {name} must be a whole number from 0 on, got {value!r}")
    elif (
        not isinstance(value, list)
        or len(value) != len(CROWDS)
        or any(type(each) is not int or each < 0 for each in value)
    ):
        many = f"{len(CROWDS)} whole numbers from 0 on, for {', '.join(map(str, CROWDS))} ranks"
        raise InvalidUsageError(f"{where}: {name} must be {many}, got {value!r}")
