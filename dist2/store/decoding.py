"""From a byte stream to the store protocol's messages, however the stream was fragmented.

Without input or output. Lengths are checked before any wait or allocation for their content.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterator
from typing import Generic, TypeVar

from dist2.errors import WireError
from dist2.store.protocol import (
    DEFAULT_LIMITS,
    INT64,
    LENGTH,
    REPLY_FIELDS,
    REQUEST_FIELDS,
    WORD,
    Field,
    Limits,
    Query,
    Reply,
    Request,
)

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
