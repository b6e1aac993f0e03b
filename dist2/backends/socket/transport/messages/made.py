"""`Origin` and `Made`: groups made from others, as ranks tell each other of them. No sockets here."""

from __future__ import annotations

import json
import re
from typing import Self

import attrs

from dist2.backends.socket.wire import TEXT_BYTES
from dist2.operation.signature import context_id

_CALLS = {"split": "split or new_group with ranks", "shrink": "shrink, which leaves ranks"}
_UID = re.compile(r"(.*)/(\w+)\(([\d,]*)\)#(\d+)", re.DOTALL)
_SHOWN = 64
"""Members of a list that a text shows."""
CALL_CHARS = 300
"""The longest text of a call."""


@attrs.frozen
class Origin:
    """The call that has made a group from another one.

    Attributes:
        parent: Context of the other group.
        words: The call, in words.
    """

    parent: int
    words: str

    @classmethod
    def of(cls, uid: str) -> Self | None:
        """Return the origin of a group; None if it is made from no other."""
        found = _UID.fullmatch(uid)
        if found is None:
            return None
        parent, kind, members, nth = found.groups()
        ranks = members.split(",")
        shown = ", ".join(ranks[:_SHOWN]) + (", ..." if len(ranks) > _SHOWN else "")
        again = f" (call {int(nth) + 1} with these)" if int(nth) else ""
        return cls(context_id(parent), f"{_CALLS.get(kind, f'{kind} with ranks')} [{shown}]{again}")


@attrs.frozen
class Made:
    """What a rank says of the groups that it has made of one group.

    Attributes:
        contexts: Their contexts.
        waits: Context of the one in which it is blocked; 0 if it is in none.
        words: The call that has made this one, or else the latest; empty without any.
        call: The last operation of the group that they are made from, in words; empty without one.
        is_closed: The rank has closed that group, and makes no others of it.
    """

    contexts: list[int] = attrs.field(factory=list)
    waits: int = 0
    words: str = ""
    call: str = ""
    is_closed: bool = False

    def encode(self) -> bytes:
        """Return it for a frame."""
        return json.dumps(attrs.astuple(self)).encode()

    @classmethod
    def decode(cls, payload: bytes) -> Self | None:
        """Return it from a frame; None if it is malformed."""
        try:
            contexts, waits, words, call, is_closed = json.loads(payload)
        except (ValueError, TypeError, RecursionError):
            return None
        are_right = isinstance(contexts, list) and all(type(each) is int for each in [*contexts, waits])
        if not are_right or not (isinstance(words, str) and isinstance(call, str)):
            return None
        return cls(contexts, waits, words[:TEXT_BYTES], call[:CALL_CHARS], is_closed is True)
