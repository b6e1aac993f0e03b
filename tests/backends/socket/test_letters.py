"""Control messages of an agreement as frames: decoding returns the encoded values, and garbage is refused."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dist2.backends.consensus import Decision, Letter, Vote
from dist2.backends.socket.transport.messages.assembly import decode, encode
from dist2.backends.socket.wire import HEADER_BYTES, Header, Kind
from dist2.errors import WireError


@st.composite
def letters(draw: st.DrawFn) -> tuple[Letter, int]:
    world_size = draw(st.integers(1, 70))
    ranks = st.integers(0, world_size - 1)
    kind: Any = draw(st.sampled_from((Vote, Decision)))
    flags, sets = draw(st.integers(-(2**63), 2**63 - 1)), st.frozensets(ranks)
    return kind(draw(ranks), flags, draw(sets), draw(sets)), world_size


@given(letters(), st.integers(1, 2**64 - 1), st.integers(1, 2**64 - 1))
def test_what_is_encoded_is_read_back(sent: tuple[Letter, int], context: int, number: int) -> None:
    letter, world_size = sent
    frame = encode(context, number, letter, world_size)
    header = Header.decode(frame[:HEADER_BYTES])
    assert (header.context, header.seq) == (context, number)
    assert len(frame) == HEADER_BYTES + header.nbytes
    assert decode(header, frame[HEADER_BYTES:], world_size) == letter


@pytest.mark.parametrize(
    ("view", "payload"),
    [
        (3, b"\0\0"),
        (2**64 - 1, b"\0\0"),
        (0, b""),
        (0, b"\0"),
        (0, b"\0\0\0"),
        (0, b"\x08\0"),
        (0, b"\0\x08"),
        (0, b"\xff\0"),
    ],
)
def test_ranks_that_the_group_does_not_have_are_refused(view: int, payload: bytes) -> None:
    for kind in (Kind.VOTE, Kind.DECISION):
        header = Header(kind, nbytes=len(payload), transfer=view)
        with pytest.raises(WireError, match="ranks a group of 3 does not have"):
            decode(header, payload, 3)
