"""The wire protocol of torch 2.13's TCPStore, without input or output: values to bytes and back.

There is no published text. This description comes from a recording proxy between torch's own client
and both of its servers (libuv and the older one, which differ only in lacking queues), and the names
and numbers of the queries are those of torch's ``TCPStoreBackend.hpp``. ``docs/store.md`` has the table.

All integers are little-endian. A string is its length (uint64) and its bytes; a list is its length
(uint64) and its items. A request is a query number (one byte) and its fields; it has an answer or not,
and answers do not name their request, so both sides must keep count.

Decoders take a stream of bytes, however it was fragmented. They check lengths before they wait or allocate
memory for the content.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Generator, Iterator
from enum import Enum, IntEnum
from typing import Generic, TypeVar

import attrs

from dist2.errors import WireError

MAGIC = 0x3C85F7CE
"""The number that a client sends with VALIDATE, before anything else."""


class Query(IntEnum):
    """Type of a request; the value is its first byte."""

    VALIDATE = 0
    SET = 1
    COMPARE_SET = 2
    GET = 3
    ADD = 4
    CHECK = 5
    WAIT = 6
    GETNUMKEYS = 7
    DELETE_KEY = 8
    APPEND = 9
    MULTI_GET = 10
    MULTI_SET = 11
    CANCEL_WAIT = 12
    PING = 13
    QUEUE_PUSH = 14
    QUEUE_POP = 15
    QUEUE_LEN = 16
    LIST_KEYS = 17
    BARRIER = 18


READY, NOT_READY = 0, 1
"""Answers to CHECK."""

STOP_WAITING, WAIT_CANCELED = 0, 1
"""Answers to WAIT and BARRIER, and to CANCEL_WAIT."""


class Field(Enum):
    """A part of a message."""

    KEY = "string, a key"
    VALUE = "string, a value"
    KEYS = "list of keys"
    VALUES = "as many values as the request had keys"
    PAIRS = "list of key and value"
    INT64 = "signed 64 bit"
    WORD = "unsigned 32 bit"
    BYTE = "one byte"
    POPPED = "length of the queue before, and a value unless that is 0"


REQUEST_FIELDS: dict[Query, tuple[Field, ...]] = {
    Query.VALIDATE: (Field.WORD,),
    Query.SET: (Field.KEY, Field.VALUE),
    Query.COMPARE_SET: (Field.KEY, Field.VALUE, Field.VALUE),
    Query.GET: (Field.KEY,),
    Query.ADD: (Field.KEY, Field.INT64),
    Query.CHECK: (Field.KEYS,),
    Query.WAIT: (Field.KEYS,),
    Query.GETNUMKEYS: (),
    Query.DELETE_KEY: (Field.KEY,),
    Query.APPEND: (Field.KEY, Field.VALUE),
    Query.MULTI_GET: (Field.KEYS,),
    Query.MULTI_SET: (Field.PAIRS,),
    Query.CANCEL_WAIT: (),
    Query.PING: (Field.WORD,),
    Query.QUEUE_PUSH: (Field.KEY, Field.VALUE),
    Query.QUEUE_POP: (Field.KEY,),
    Query.QUEUE_LEN: (Field.KEY,),
    Query.LIST_KEYS: (),
    Query.BARRIER: (Field.KEY, Field.INT64),
}

REPLY_FIELDS: dict[Query, Field] = {
    Query.COMPARE_SET: Field.VALUE,
    Query.GET: Field.VALUE,
    Query.ADD: Field.INT64,
    Query.CHECK: Field.BYTE,
    Query.WAIT: Field.BYTE,
    Query.GETNUMKEYS: Field.INT64,
    Query.DELETE_KEY: Field.INT64,
    Query.MULTI_GET: Field.VALUES,
    Query.CANCEL_WAIT: Field.BYTE,
    Query.PING: Field.WORD,
    Query.QUEUE_POP: Field.POPPED,
    Query.QUEUE_LEN: Field.INT64,
    Query.LIST_KEYS: Field.KEYS,
    Query.BARRIER: Field.BYTE,
}
"""Queries that are answered. The others (VALIDATE, SET, APPEND, MULTI_SET, QUEUE_PUSH) are not."""


@attrs.frozen
class Request:
    """A client's request.

    Attributes:
        query: The kind.
        keys: Its keys, in order.
        values: Its values, in order; for MULTI_SET as many as keys.
        number: The increment of ADD, the number of ranks of a BARRIER, a PING's nonce, VALIDATE's magic.
    """

    query: Query
    keys: tuple[bytes, ...] = ()
    values: tuple[bytes, ...] = ()
    number: int = 0

    @property
    def is_answered(self) -> bool:
        """Whether a server sends any bytes back."""
        # The answer to a MULTI_GET is nothing but its values.
        return self.query in REPLY_FIELDS and (bool(self.keys) or self.query is not Query.MULTI_GET)


@attrs.frozen
class Reply:
    """A server's answer: a number, strings, or both, as `REPLY_FIELDS` says."""

    number: int = 0
    values: tuple[bytes, ...] = ()


@attrs.frozen
class Limits:
    """How large a message may be; checked before anything is stored.

    torch's libuv server stops at 8 MiB a string and 131,072 keys a list, its older one at nothing.

    Attributes:
        key_bytes: Of one key.
        value_bytes: Of one value.
        keys: In one list.
        message_bytes: Of one whole message.
    """

    key_bytes: int = 64 << 10
    value_bytes: int = 64 << 20
    keys: int = 128 << 10
    message_bytes: int = 256 << 20


DEFAULT_LIMITS = Limits()
SENT_VALUE_BYTES = 8 << 20
"""Longest value that a client sends: torch's server, which any store may have, hangs up on a longer one."""

LENGTH = struct.Struct("<Q")
INT64 = struct.Struct("<q")
WORD = struct.Struct("<I")


def encode_request(request: Request) -> bytes:
    """Return the bytes of a request."""
    parts = [request.query.to_bytes(1, "little")]
    keys, values = iter(request.keys), iter(request.values)
    for field in REQUEST_FIELDS[request.query]:
        if field is Field.KEY:
            parts.append(_string(next(keys)))
        elif field is Field.VALUE:
            parts.append(_string(next(values)))
        elif field is Field.KEYS:
            parts.append(_list(request.keys))
        elif field is Field.PAIRS:
            parts.append(LENGTH.pack(len(request.keys)))
            parts.extend(_string(key) + _string(value) for key, value in zip(keys, values, strict=True))
        else:
            parts.append((INT64 if field is Field.INT64 else WORD).pack(request.number))
    return b"".join(parts)


def encode_reply(query: Query, reply: Reply) -> bytes:
    """Return the bytes that answer a query; none where it has no answer."""
    match REPLY_FIELDS.get(query):
        case None:
            return b""
        case Field.BYTE:
            return reply.number.to_bytes(1, "little")
        case Field.INT64:
            return INT64.pack(reply.number)
        case Field.WORD:
            return WORD.pack(reply.number)
        case Field.VALUE:
            return _string(reply.values[0])
        case Field.VALUES:
            return b"".join(map(_string, reply.values))
        case Field.POPPED:
            return INT64.pack(reply.number) + b"".join(map(_string, reply.values))
        case _:
            return _list(reply.values)


def _string(text: bytes) -> bytes:
    return LENGTH.pack(len(text)) + text


def _list(items: tuple[bytes, ...]) -> bytes:
    return LENGTH.pack(len(items)) + b"".join(map(_string, items))


# From bytes to messages

_T = TypeVar("_T")

Parser = Generator[int, bytes, _T]
"""Yields the number of bytes needed next, is sent exactly those, and returns the decoded message."""


class Decoder(Generic[_T]):
    """Cuts a byte stream into messages.

    Memory grows with the bytes that have arrived, never with an announced length. After a `WireError` the
    stream is out of step: drop the decoder and close the connection.
    """

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._parser: Parser[_T] | None = None
        self._need = 0

    def _start(self) -> Parser[_T]:
        """Return the parser of the message that starts here."""
        raise NotImplementedError

    def feed(self, data: bytes) -> Iterator[_T]:
        """Take bytes, and yield each message that they complete. Iterate to the end before the next call.

        Raises:
            WireError: The bytes after those messages are not the protocol, or exceed its limits.
        """
        buffer = self._buffer
        buffer += data
        at = 0
        while at < len(buffer) or self._parser is not None:
            if self._parser is None:
                self._parser = self._start()
                self._need = next(self._parser)
            if len(buffer) - at < self._need:
                break
            chunk = bytes(buffer[at : at + self._need])
            at += self._need
            try:
                self._need = self._parser.send(chunk)
            except StopIteration as stop:
                self._parser = None
                yield stop.value
        del buffer[:at]


class RequestDecoder(Decoder[Request]):
    """The server's side of the stream."""

    def __init__(self, limits: Limits = DEFAULT_LIMITS) -> None:
        super().__init__()
        self._limits = limits

    def _start(self) -> Parser[Request]:
        return _read_request(self._limits)


class ReplyDecoder(Decoder[Reply]):
    """The client's side. Answers are not self-describing: it must know each request."""

    def __init__(self, limits: Limits = DEFAULT_LIMITS) -> None:
        super().__init__()
        self._limits = limits
        self._expected: deque[Request] = deque()

    def expect(self, request: Request) -> None:
        """Note that a request was sent; its answer follows those of earlier ones."""
        if request.is_answered:
            self._expected.append(request)

    def unexpect(self) -> None:
        """Take back the last `expect`: that request will not be answered."""
        self._expected.pop()

    def _start(self) -> Parser[Reply]:
        if not self._expected:
            raise WireError("the server sent bytes without a request")
        return _read_reply(self._expected.popleft(), self._limits)


class _Budget:
    """The unused part of one message's `Limits.message_bytes`."""

    def __init__(self, limits: Limits) -> None:
        self._limit = limits.message_bytes
        self._left = limits.message_bytes

    def length(self, raw: bytes, limit: int, what: str) -> int:
        """Return a length, once it is known to be within limits."""
        length: int = LENGTH.unpack(raw)[0]
        if length > limit:
            raise WireError(f"{what} {length} exceeds the limit of {limit}")
        self._left -= length
        if self._left < 0:
            raise WireError(f"message exceeds the limit of {self._limit} bytes")
        return length


def _read_request(limits: Limits) -> Parser[Request]:
    code = (yield 1)[0]
    try:
        query = Query(code)
    except ValueError:
        raise WireError(f"unknown query {code}") from None
    budget = _Budget(limits)
    keys: list[bytes] = []
    values: list[bytes] = []
    number = 0
    for field in REQUEST_FIELDS[query]:
        if field is Field.KEY:
            keys.append((yield budget.length((yield 8), limits.key_bytes, "key length")))
        elif field is Field.VALUE:
            values.append((yield budget.length((yield 8), limits.value_bytes, "value length")))
        elif field is Field.INT64:
            number = INT64.unpack((yield 8))[0]
        elif field is Field.WORD:
            number = WORD.unpack((yield 4))[0]
        else:
            for _ in range(budget.length((yield 8), limits.keys, "number of keys")):
                keys.append((yield budget.length((yield 8), limits.key_bytes, "key length")))
                if field is Field.PAIRS:
                    values.append((yield budget.length((yield 8), limits.value_bytes, "value length")))
    return Request(query, tuple(keys), tuple(values), number)


def _read_reply(request: Request, limits: Limits) -> Parser[Reply]:
    budget = _Budget(limits)
    number = 0
    match REPLY_FIELDS[request.query]:
        case Field.BYTE:
            return Reply((yield 1)[0])
        case Field.INT64:
            return Reply(INT64.unpack((yield 8))[0])
        case Field.WORD:
            return Reply(WORD.unpack((yield 4))[0])
        case Field.VALUE:
            count = 1
        case Field.VALUES:
            count = len(request.keys)
        case Field.POPPED:
            number = INT64.unpack((yield 8))[0]
            count = min(number, 1)
        case _:
            count = budget.length((yield 8), limits.message_bytes, "number of keys")
    values = []
    for _ in range(count):
        values.append((yield budget.length((yield 8), limits.value_bytes, "value length")))  # noqa: PERF401 - no comprehension yields
    return Reply(number, tuple(values))
