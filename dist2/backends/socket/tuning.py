"""Measured constants: where one algorithm overtakes another on a machine, and the file that holds them.

    Tuning.read("tuning.json").thresholds

The file is JSON: ``{"format": 1, "thresholds": {"whole_bytes": 262144, ...}, "measured": {...}}``. What it
does not name keeps its default; ``measured`` is for people (the machine, the date, the figures) and is not
interpreted. ``DIST2_TUNING`` names the file. All members of a group use what its rank 0 has read.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import attrs

from dist2.errors import InvalidUsageError

FORMAT = 1


@attrs.frozen
class Thresholds:
    """Where one algorithm overtakes another: constants measured on the machine, all in bytes but `crowd`.

    Attributes:
        lending_bytes: From so many bytes on, ranks of a host reach into each other's tensors if these can be
            mapped.
        cross_memory_bytes: From so many on also if the kernel has to move them: for two ranks (`crowding`).
        one_shot_bytes: Up to so many bytes read twice, a flat `all_reduce` folds everything everywhere.
        one_shot_reduce_bytes: Likewise, the root of a flat `reduce` folds everything.
        whole_bytes: Up to so many bytes sent twice, an `all_reduce` by messages sends whole vectors.
        whole_reduce_bytes: Likewise for `reduce`.
        doubling_bytes: Vectors up to here are reduced by doubling, where the order is free.
        tree_bytes: Vectors up to here are broadcast down a tree.
        short_bytes: Up to here the number of messages counts and not their length.
        crowd: With more ranks than this, none should talk to all others at once.
    """

    lending_bytes: int = 1 << 20
    cross_memory_bytes: int = 32 << 10
    one_shot_bytes: int = 640 << 10
    one_shot_reduce_bytes: int = 8 << 20
    whole_bytes: int = 256 << 10
    whole_reduce_bytes: int = 1 << 20
    doubling_bytes: int = 1 << 20
    tree_bytes: int = 1 << 20
    short_bytes: int = 32 << 10
    crowd: int = 16


DEFAULT_THRESHOLDS = Thresholds()


@attrs.frozen
class Tuning:
    """What `dist2 tune` stores.

    Attributes:
        thresholds: What algorithms are chosen by.
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
            text: What `to_json` returned.
            where: What error messages call it.

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
            if type(value) is not int or value < 0:
                raise InvalidUsageError(f"{where}: {name} must be a whole number from 0 on, got {value!r}")
        return cls(Thresholds(**constants), measured)

    @classmethod
    def read(cls, path: str | Path) -> Tuning:
        """Read a file.

        Raises:
            InvalidUsageError: There is none, or it is not one of these.
        """
        try:
            text = Path(path).read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise InvalidUsageError(f"DIST2_TUNING: cannot read {str(path)!r}: {error}") from error
        return cls.from_json(text, str(path))

    def write(self, path: str | Path) -> None:
        """Write a file, replacing one that is there."""
        Path(path).write_text(self.to_json() + "\n")
