"""The wire protocol of stores: recorded bytes, round trips, and malformed input."""

from __future__ import annotations

import struct
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dist2.errors import WireError
from dist2.store.protocol import (
    MAGIC,
    REPLY_FIELDS,
    REQUEST_FIELDS,
    Decoder,
    Field,
    Limits,
    Query,
    Reply,
    ReplyDecoder,
    Request,
    RequestDecoder,
    encode_reply,
    encode_request,
)

Q = Query

# Seen between torch 2.13's client and its server.
RECORDED: list[tuple[bytes, Request, bytes, Reply]] = [
    (b"\x00\xce\xf7\x85<", Request(Q.VALIDATE, number=MAGIC), b"", Reply()),
    (b"\rj\x14\0\0", Request(Q.PING, number=0x146A), b"j\x14\0\0", Reply(0x146A)),
    (
        b"\x04\x05\0\0\0\0\0\0\0init/\x01\0\0\0\0\0\0\0",
        Request(Q.ADD, (b"init/",), number=1),
        b"\x01\0\0\0\0\0\0\0",
        Reply(1),
    ),
    (
        b"\x04\x02\0\0\0\0\0\0\0/n\xf9\xff\xff\xff\xff\xff\xff\xff",
        Request(Q.ADD, (b"/n",), number=-7),
        b"\xfe\xff\xff\xff\xff\xff\xff\xff",
        Reply(-2),
    ),
    (
        b"\x01\x02\0\0\0\0\0\0\0/k\x02\0\0\0\0\0\0\0v1",
        Request(Q.SET, (b"/k",), (b"v1",)),
        b"",
        Reply(),
    ),
    (
        b"\x02\x03\0\0\0\0\0\0\0/cm\x03\0\0\0\0\0\0\0exp\x03\0\0\0\0\0\0\0des",
        Request(Q.COMPARE_SET, (b"/cm",), (b"exp", b"des")),
        b"\x03\0\0\0\0\0\0\0exp",
        Reply(values=(b"exp",)),
    ),
    (
        b"\x03\x02\0\0\0\0\0\0\0/k",
        Request(Q.GET, (b"/k",)),
        b"\x02\0\0\0\0\0\0\0v1",
        Reply(values=(b"v1",)),
    ),
    (
        b"\x05\x02\0\0\0\0\0\0\0\x02\0\0\0\0\0\0\0/k\x05\0\0\0\0\0\0\0/nope",
        Request(Q.CHECK, (b"/k", b"/nope")),
        b"\x01",
        Reply(1),
    ),
    (b"\x06\x01\0\0\0\0\0\0\0\x02\0\0\0\0\0\0\0/k", Request(Q.WAIT, (b"/k",)), b"\0", Reply(0)),
    (b"\x0c", Request(Q.CANCEL_WAIT), b"\x01", Reply(1)),
    (b"\x07", Request(Q.GETNUMKEYS), b"\x04\0\0\0\0\0\0\0", Reply(4)),
    (b"\x08\x02\0\0\0\0\0\0\0/k", Request(Q.DELETE_KEY, (b"/k",)), b"\x01\0\0\0\0\0\0\0", Reply(1)),
    (
        b"\t\x02\0\0\0\0\0\0\0/k\x02\0\0\0\0\0\0\0aa",
        Request(Q.APPEND, (b"/k",), (b"aa",)),
        b"",
        Reply(),
    ),
    (
        b"\x0b\x02\0\0\0\0\0\0\0\x02\0\0\0\0\0\0\0/a\x01\0\0\0\0\0\0\x001\x02\0\0\0\0\0\0\0/b\x01\0\0\0\0\0\0\x002",
        Request(Q.MULTI_SET, (b"/a", b"/b"), (b"1", b"2")),
        b"",
        Reply(),
    ),
    (
        b"\n\x02\0\0\0\0\0\0\0\x02\0\0\0\0\0\0\0/a\x02\0\0\0\0\0\0\0/b",
        Request(Q.MULTI_GET, (b"/a", b"/b")),
        b"\x01\0\0\0\0\0\0\x001\x01\0\0\0\0\0\0\x002",
        Reply(values=(b"1", b"2")),
    ),
    (
        b"\x0e\x02\0\0\0\0\0\0\0/q\x01\0\0\0\0\0\0\0x",
        Request(Q.QUEUE_PUSH, (b"/q",), (b"x",)),
        b"",
        Reply(),
    ),
    (
        b"\x0f\x02\0\0\0\0\0\0\0/q",
        Request(Q.QUEUE_POP, (b"/q",)),
        b"\x03\0\0\0\0\0\0\0\x01\0\0\0\0\0\0\0a",
        Reply(3, (b"a",)),
    ),
    (b"\x0f\x02\0\0\0\0\0\0\0/q", Request(Q.QUEUE_POP, (b"/q",)), bytes(8), Reply(0)),
    (b"\x10\x02\0\0\0\0\0\0\0/q", Request(Q.QUEUE_LEN, (b"/q",)), b"\x01\0\0\0\0\0\0\0", Reply(1)),
    (
        b"\x11",
        Request(Q.LIST_KEYS),
        b"\x02\0\0\0\0\0\0\0\x02\0\0\0\0\0\0\0/b\x05\0\0\0\0\0\0\0init/",
        Reply(values=(b"/b", b"init/")),
    ),
    (
        b"\x12\x04\0\0\0\0\0\0\0/bk2\x02\0\0\0\0\0\0\0",
        Request(Q.BARRIER, (b"/bk2",), number=2),
        b"\0",
        Reply(0),
    ),
]


def test_every_query_was_recorded() -> None:
    assert {request.query for _, request, _, _ in RECORDED} == set(Query)


@pytest.mark.parametrize(("sent", "request_", "answered", "reply"), RECORDED)
def test_recorded_bytes(sent: bytes, request_: Request, answered: bytes, reply: Reply) -> None:
    assert encode_request(request_) == sent
    assert list(RequestDecoder().feed(sent)) == [request_]
    assert encode_reply(request_.query, reply) == answered
    decoder = ReplyDecoder()
    decoder.expect(request_)
    assert list(decoder.feed(answered)) == ([reply] if answered else [])


keys = st.binary(max_size=40)
values = st.binary(max_size=200)
int64s = st.integers(-(1 << 63), (1 << 63) - 1)
words = st.integers(0, (1 << 32) - 1)


@st.composite
def requests(draw: st.DrawFn) -> Request:
    query = draw(st.sampled_from(Query))
    names: list[bytes] = []
    held: list[bytes] = []
    number = 0
    for field in REQUEST_FIELDS[query]:
        if field is Field.KEY:
            names.append(draw(keys))
        elif field is Field.VALUE:
            held.append(draw(values))
        elif field is Field.INT64:
            number = draw(int64s)
        elif field is Field.WORD:
            number = draw(words)
        else:
            names = draw(st.lists(keys, max_size=5))
            if field is Field.PAIRS:
                held = [draw(values) for _ in names]
    return Request(query, tuple(names), tuple(held), number)


@st.composite
def exchanges(draw: st.DrawFn) -> tuple[Request, Reply]:
    request = draw(requests())
    match REPLY_FIELDS.get(request.query):
        case None:
            return request, Reply()
        case Field.BYTE:
            return request, Reply(draw(st.integers(0, 255)))
        case Field.INT64:
            return request, Reply(draw(int64s))
        case Field.WORD:
            return request, Reply(draw(words))
        case Field.VALUE:
            return request, Reply(values=(draw(values),))
        case Field.VALUES:
            return request, Reply(values=tuple(draw(values) for _ in request.keys))
        case Field.POPPED:
            number = draw(st.integers(0, 1 << 40))
            return request, Reply(number, (draw(values),) if number else ())
        case _:
            return request, Reply(values=tuple(draw(st.lists(keys, max_size=5))))


def in_pieces(decoder: Decoder[object], data: bytes, cuts: list[int]) -> list[object]:
    """Feed data in pieces; a cut is where a piece ends."""
    ends = sorted({min(cut, len(data)) for cut in cuts} | {len(data)})
    found: list[object] = []
    start = 0
    for end in ends:
        found.extend(decoder.feed(data[start:end]))
        start = end
    return found


@given(st.lists(requests(), max_size=6), st.lists(st.integers(0, 600), max_size=12))
def test_requests_survive_the_wire_however_cut(sent: list[Request], cuts: list[int]) -> None:
    stream = b"".join(map(encode_request, sent))
    assert in_pieces(RequestDecoder(), stream, cuts) == sent


@given(st.lists(exchanges(), max_size=6), st.lists(st.integers(0, 600), max_size=12))
def test_replies_survive_the_wire_however_cut(sent: list[tuple[Request, Reply]], cuts: list[int]) -> None:
    decoder = ReplyDecoder()
    for request, _ in sent:
        decoder.expect(request)
    stream = b"".join(encode_reply(request.query, reply) for request, reply in sent)
    assert in_pieces(decoder, stream, cuts) == [reply for request, reply in sent if request.is_answered]


@given(st.lists(requests(), min_size=1, max_size=3))
def test_byte_by_byte(sent: list[Request]) -> None:
    stream = b"".join(map(encode_request, sent))
    assert in_pieces(RequestDecoder(), stream, list(range(len(stream)))) == sent


@given(st.binary(max_size=400), st.lists(st.integers(0, 400), max_size=5))
def test_garbage_is_decoded_or_refused(garbage: bytes, cuts: list[int]) -> None:
    decoder = RequestDecoder()
    try:
        found = in_pieces(decoder, garbage, cuts)
    except WireError:
        return
    # The decoded messages cannot be longer than the input.
    assert sum(len(encode_request(request)) for request in found) <= len(garbage)


@given(requests(), st.binary(max_size=200))
def test_garbage_as_an_answer(request: Request, garbage: bytes) -> None:
    decoder = ReplyDecoder()
    decoder.expect(request)
    try:
        found = list(decoder.feed(garbage))
    except WireError:
        return
    assert len(found) <= 1


SMALL = Limits(key_bytes=10, value_bytes=20, keys=3, message_bytes=45)


def length(value: int) -> bytes:
    return struct.pack("<Q", value)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"\x13", "unknown query 19"),
        (b"\xff", "unknown query 255"),
        (b"\x03" + length(11), "key length 11 exceeds the limit of 10"),
        (b"\x03" + length((1 << 64) - 1), "key length 18446744073709551615"),
        (b"\x01" + length(1) + b"k" + length(21), "value length 21 exceeds the limit of 20"),
        (b"\x05" + length(4), "number of keys 4 exceeds the limit of 3"),
        (b"\x05" + length(1 << 60), "number of keys"),
        (
            b"\x0b" + length(3) + (length(10) + b"k" * 10 + length(20) + b"v" * 20) * 2,
            "message exceeds the limit of 45 bytes",
        ),
    ],
)
def test_what_is_too_much_is_refused_when_announced(data: bytes, words: str) -> None:
    with pytest.raises(WireError, match=words):
        list(RequestDecoder(SMALL).feed(data))


def test_messages_before_garbage_are_delivered() -> None:
    ping = Request(Query.PING, number=7)
    stream = RequestDecoder().feed(encode_request(ping) + b"\xff")
    assert next(stream) == ping
    with pytest.raises(WireError, match="unknown query 255"):
        next(stream)


def test_an_answer_that_nobody_asked_for_is_refused() -> None:
    with pytest.raises(WireError, match="without a request"):
        list(ReplyDecoder().feed(b"\0"))


def test_a_cancelled_wait_is_answered_once() -> None:
    decoder = ReplyDecoder()
    decoder.expect(Request(Query.WAIT, (b"/k",)))
    decoder.expect(Request(Query.CANCEL_WAIT))
    assert list(decoder.feed(b"\x01")) == [Reply(1)]
    decoder.unexpect()
    decoder.expect(Request(Query.GETNUMKEYS))
    assert list(decoder.feed(length(5))) == [Reply(5)]


@pytest.mark.parametrize("make", [RequestDecoder, ReplyDecoder])
def test_memory_follows_what_arrives_and_not_what_is_announced(
    make: Callable[[Limits], Decoder[object]],
) -> None:
    decoder = make(Limits(value_bytes=1 << 40, message_bytes=1 << 41))
    if isinstance(decoder, ReplyDecoder):
        decoder.expect(Request(Query.GET, (b"/k",)))
        announced = length(1 << 40)
    else:
        announced = b"\x01" + length(1) + b"k" + length(1 << 40)
    assert list(decoder.feed(announced + b"x" * 1000)) == []
    assert len(decoder._buffer) <= 1000 + len(announced)
