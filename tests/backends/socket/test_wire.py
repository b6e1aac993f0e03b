"""Frames: decoding returns the encoded values for any cut of the stream, and garbage is always refused."""

from __future__ import annotations

import json
import tracemalloc
from contextlib import suppress

import attrs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dist2 import WireError
from dist2.backends.socket.wire import (
    EAGER_BYTES,
    HEADER_BYTES,
    HELLO_BYTES,
    PROMPT_BYTES,
    SEGMENT_BYTES,
    TEXT_BYTES,
    WAKE,
    FrameReader,
    Header,
    Hello,
    Kind,
)

LIMITS = {
    Kind.HELLO: HELLO_BYTES,
    Kind.EAGER: PROMPT_BYTES,
    Kind.DATA: SEGMENT_BYTES,
    Kind.CANCEL: TEXT_BYTES,
    Kind.LEAVE: TEXT_BYTES,
    Kind.REVOKE: TEXT_BYTES,
    Kind.MISMATCH: TEXT_BYTES,
    Kind.DEATH: TEXT_BYTES,
    Kind.RING: TEXT_BYTES,
    Kind.VOTE: TEXT_BYTES,
    Kind.DECISION: TEXT_BYTES,
    Kind.PROBE: TEXT_BYTES,
    Kind.CALLED: TEXT_BYTES,
    Kind.ORIGIN: TEXT_BYTES,
    Kind.GAVE_UP: TEXT_BYTES,
}
STAGING_BYTES = 1 << 16
words = st.integers(0, 2**64 - 1)


@st.composite
def headers(draw: st.DrawFn, longest: int = SEGMENT_BYTES) -> Header:
    kind = draw(st.sampled_from(Kind))
    most = EAGER_BYTES if kind is Kind.EAGER else LIMITS.get(kind, 0)  # `DATA` has longer ones
    nbytes = draw(st.integers(0, min(most, longest)))
    total = draw(words)
    if kind is Kind.EAGER:
        total = nbytes
    elif kind is Kind.ANNOUNCE:
        total = draw(st.integers(EAGER_BYTES + 1, 2**64 - 1))
    return Header(
        kind,
        draw(st.integers(0, 2**16 - 1)),
        draw(words),
        draw(words),
        draw(st.integers(-(2**63), 2**63 - 1)),
        draw(words),
        nbytes,
        draw(words),
        total,
    )


class Sinks:
    """Takes frames, each into a place of just its size, or nowhere."""

    def __init__(self, discard: frozenset[int] = frozenset()) -> None:
        self.frames: list[tuple[Header, bytes | None]] = []
        self.begun: list[Header] = []
        self.reader = FrameReader(self.begin, self.end)
        self._discard = discard
        self._place: bytearray | None = None

    def begin(self, header: Header) -> memoryview | None:
        self._place = None if len(self.begun) in self._discard else bytearray(header.nbytes)
        self.begun.append(header)
        return None if self._place is None else memoryview(self._place)

    def end(self, header: Header) -> None:
        self.frames.append((header, None if self._place is None else bytes(self._place)))

    def feed(self, stream: bytes, sizes: list[int]) -> None:
        """Give the reader ``stream``, never more at once than it has room for; sizes take turns."""
        position = turn = 0
        while position < len(stream):
            target = self.reader.target()
            assert len(target)
            part = stream[position : position + min(len(target), sizes[turn % len(sizes)])]
            target[: len(part)] = part
            self.reader.received(len(part))
            position += len(part)
            turn += 1


def payload_of(header: Header, salt: int = 0) -> bytes:
    pattern = bytes((salt + each) % 251 for each in range(251))
    return (pattern * (header.nbytes // 251 + 1))[: header.nbytes]


@given(headers())
def test_a_header_is_read_as_it_was_written(header: Header) -> None:
    encoded = header.encode()
    assert len(encoded) == HEADER_BYTES
    assert Header.decode(encoded) == header


@settings(max_examples=60)
@given(
    st.lists(headers(longest=3 * STAGING_BYTES), min_size=1, max_size=6),
    st.lists(st.integers(1, 1 << 18), min_size=1, max_size=8),
    st.frozensets(st.integers(0, 5)),
    st.booleans(),
)
def test_frames_come_out_however_the_stream_is_cut(
    sent: list[Header], sizes: list[int], discard: frozenset[int], wakes: bool
) -> None:
    payloads = [payload_of(header, salt) for salt, header in enumerate(sent)]
    between = WAKE * 3 if wakes else b""
    stream = b"".join(
        between + header.encode() + payload for header, payload in zip(sent, payloads, strict=True)
    )
    # Single bytes for the beginning, where headers are cut in every place.
    sinks = Sinks(discard)
    sinks.feed(stream[:200], [1])
    sinks.feed(stream[200:], sizes)
    expected = [None if index in discard else payload for index, payload in enumerate(payloads)]
    assert sinks.frames == list(zip(sent, expected, strict=True))


def test_a_long_payload_goes_straight_into_its_place() -> None:
    header = Header(Kind.DATA, nbytes=SEGMENT_BYTES)
    place = memoryview(bytearray(SEGMENT_BYTES))
    ended: list[Header] = []
    reader = FrameReader(lambda _: place, ended.append)
    target = reader.target()
    target[:HEADER_BYTES] = header.encode()
    reader.received(HEADER_BYTES)
    direct = reader.target()
    assert len(direct) == SEGMENT_BYTES
    direct[0] = 77
    assert place[0] == 77  # no copy is between them
    reader.received(SEGMENT_BYTES)
    assert ended == [header]


def test_who_awaits_a_long_frame_reads_its_header_alone() -> None:
    frames = [Header(Kind.DATA, nbytes=nbytes) for nbytes in (SEGMENT_BYTES, 10, SEGMENT_BYTES, 0)]
    sinks = Sinks()
    sinks.reader.awaits_long = True
    stream = b"".join(header.encode() + payload_of(header) for header in frames)
    assert len(sinks.reader.target()) == HEADER_BYTES
    sinks.feed(stream[: HEADER_BYTES + 1], [30])
    assert len(sinks.reader.target()) == SEGMENT_BYTES - 1
    sinks.feed(stream[HEADER_BYTES + 1 :], [1 << 20])
    assert sinks.frames == [(header, payload_of(header)) for header in frames]


@pytest.mark.parametrize("taken_back_after", [0, 1, 1000, SEGMENT_BYTES - 10, SEGMENT_BYTES - 1])
def test_a_place_that_is_taken_back_is_not_touched_any_more(taken_back_after: int) -> None:
    header = Header(Kind.DATA, nbytes=SEGMENT_BYTES)
    sinks = Sinks()
    stream = header.encode() + b"\1" * SEGMENT_BYTES + Header(Kind.BYE).encode()
    cut = HEADER_BYTES + taken_back_after
    sinks.feed(stream[:cut], [1 << 20])
    sinks.reader.divert()
    sinks.feed(stream[cut:], [1 << 20])
    assert [header.kind for header, _ in sinks.frames] == [Kind.DATA, Kind.BYE]
    received = sinks.frames[0][1]
    assert received == b"\1" * taken_back_after + bytes(SEGMENT_BYTES - taken_back_after)


@settings(max_examples=200)
@given(st.binary(max_size=400), headers(longest=100), st.integers(0, HEADER_BYTES - 1), st.integers(0, 255))
def test_garbage_is_refused_and_nothing_else(garbage: bytes, header: Header, at: int, byte: int) -> None:
    broken = bytearray(header.encode() + payload_of(header))
    broken[at] = byte
    for stream in (garbage, bytes(broken) + garbage):
        sinks = Sinks()
        with suppress(WireError):
            sinks.feed(stream, [1 << 16])
        assert all(header.nbytes <= LIMITS.get(header.kind, 0) for header in sinks.begun)


@pytest.mark.parametrize("kind", Kind)
def test_a_payload_longer_than_its_kind_may_have_is_refused_before_its_place_is_made(kind: Kind) -> None:
    limit = LIMITS.get(kind, 0)
    total = limit + 1 if kind is Kind.EAGER else 1 << 20
    Header.decode(Header(kind, nbytes=limit, total=limit if kind is Kind.EAGER else total).encode())
    for nbytes in (limit + 1, 2**32 - 1):
        sinks = Sinks()
        with pytest.raises(WireError, match="longer than"):
            sinks.feed(Header(kind, nbytes=nbytes, total=total).encode(), [HEADER_BYTES])
        assert not sinks.begun


@pytest.mark.parametrize(
    "header",
    [
        Header(Kind.EAGER, nbytes=100, total=10),
        Header(Kind.EAGER, nbytes=10, total=100),
        Header(Kind.ANNOUNCE, total=EAGER_BYTES),
        Header(Kind.ANNOUNCE, total=0),
    ],
)
def test_lengths_that_contradict_each_other_are_refused(header: Header) -> None:
    with pytest.raises(WireError, match="for a message of"):
        Header.decode(header.encode())


# Hellos

texts = st.text(max_size=60)


@given(texts, texts, texts, texts, st.integers(0, 1000))
def test_a_hello_is_read_as_it_was_written(
    job: str, caller: str, target: str, ring: str, version: int
) -> None:
    hello = Hello(job, caller, target, ring, version)
    frame = hello.encode()
    header = Header.decode(frame[:HEADER_BYTES])
    assert (header.kind, header.nbytes) == (Kind.HELLO, len(frame) - HEADER_BYTES)
    assert Hello.decode(frame[HEADER_BYTES:]) == hello


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=6,
)
FIELDS = attrs.asdict(Hello("job", "caller", "target"))


@given(
    st.binary(max_size=200)
    | values.map(lambda value: json.dumps(value).encode())
    | st.dictionaries(st.sampled_from([*FIELDS, "other"]), values).map(
        lambda changed: json.dumps({**FIELDS, **changed}).encode()
    )
)
def test_a_hostile_hello_is_refused_or_has_the_types_it_must(payload: bytes) -> None:
    try:
        hello = Hello.decode(payload)
    except WireError:
        return
    assert {type(text) for text in (hello.job_id, hello.fabric_id, hello.target, hello.ring)} == {str}
    assert type(hello.version) is int


@pytest.mark.parametrize(
    "payload",
    [
        b"[" * HELLO_BYTES,
        b'{"job_id":' * (HELLO_BYTES // 10),
        b"9" * HELLO_BYTES,
        b"\xff" * 10,
        b"",
        json.dumps({**FIELDS, "version": True}).encode(),
        json.dumps({**FIELDS, "version": "1"}).encode(),
        json.dumps({**FIELDS, "extra": 1}).encode(),
        json.dumps({key: value for key, value in FIELDS.items() if key != "target"}).encode(),
    ],
    ids=["deep list", "deep dict", "long number", "no text", "empty", "true", "text", "too many", "too few"],
)
def test_a_hello_that_is_none_is_refused(payload: bytes) -> None:
    with pytest.raises(WireError, match="hello"):
        Hello.decode(payload)


def test_a_reader_holds_no_more_than_its_staging_buffer() -> None:
    tracemalloc.start()
    try:
        reader = FrameReader(lambda _: None, lambda _: None)  # discards all
        frame = Header(Kind.DATA, nbytes=SEGMENT_BYTES).encode() + bytes(SEGMENT_BYTES)
        before = tracemalloc.get_traced_memory()[0]
        tracemalloc.reset_peak()
        for _ in range(8):
            position = 0
            while position < len(frame):
                target = reader.target()
                count = min(len(target), len(frame) - position)
                target[:count] = memoryview(frame)[position : position + count]
                reader.received(count)
                position += count
        assert tracemalloc.get_traced_memory()[1] - before < 2 * STAGING_BYTES
    finally:
        tracemalloc.stop()
