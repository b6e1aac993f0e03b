"""Every decoder takes any bytes: it accepts them or refuses them, and does nothing else."""

from __future__ import annotations

import pytest
from fuzzing.targets import TARGETS, bounded
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dist2.store.protocol import Query, Request, encode_request
from dist2.wire import Hello

SEEDS = [
    Hello("job", "a", "b").encode(),
    encode_request(Request(Query.VALIDATE))
    + encode_request(Request(Query.SET, keys=(b"k",), values=(b"v",))),
    b'{"card": {"fabric_id": "f", "host": "h", "port": 1}, "pid": 1, "host_id": "i", "memory": {}}',
    b'{"card": [], "pid": 1}',
    b"[" * 100_000,
    b"\xff" * 64,
]


@pytest.mark.parametrize("name", TARGETS)
@settings(max_examples=100, deadline=None)
@given(data=st.binary(max_size=512))
@example(data=SEEDS[0])
@example(data=SEEDS[1])
@example(data=SEEDS[2])
@example(data=SEEDS[3])
@example(data=SEEDS[4])
@example(data=SEEDS[5])
def test_any_bytes_are_taken_or_refused(name: str, data: bytes) -> None:
    TARGETS[name](data)


@pytest.mark.parametrize("name", TARGETS)
def test_lengths_are_not_believed(name: str) -> None:
    """No decoder allocates what a stranger announces."""
    for data in (*SEEDS, b"\x7f" * 200, b"\xdd\xff\xff\xff\xff", b"\x00" * 7 + b"\x7f" + b"\x00" * 100):
        with bounded(data):
            TARGETS[name](data)
