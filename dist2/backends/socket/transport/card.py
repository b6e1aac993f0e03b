"""`Card`: how a process can be reached, as text to publish."""

from __future__ import annotations

import json

import attrs


@attrs.frozen
class Card:
    """How to reach a fabric: what members of a group publish to each other.

    Attributes:
        fabric_id: Random, unique.
        host: Address its listener is bound to.
        port: Port of it.
    """

    fabric_id: str
    host: str
    port: int

    def to_json(self) -> str:
        return json.dumps(attrs.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Card:
        return cls(**json.loads(text))
