"""`Card`: the address and identity of a process, as text to publish."""

from __future__ import annotations

import attrs
from attrs.validators import instance_of


@attrs.frozen
class Card:
    """The address of a fabric, which members of a group publish to each other.

    Attributes:
        fabric_id: Random, unique.
        host: Address its listener is bound to.
        port: Port of it.
    """

    fabric_id: str = attrs.field(validator=instance_of(str))
    host: str = attrs.field(validator=instance_of(str))
    port: int = attrs.field(validator=instance_of(int))
