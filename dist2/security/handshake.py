"""The handshake of two processes that share a secret, without input or output.

The caller opens, the listener challenges, the caller proves that it knows the secret, and the listener
proves it in turn. Each proof covers all bytes before it: version, kind of connection, job, both ends and
a fresh random number of either side. So bytes of another connection prove nothing, and neither side can
be made to answer its own challenge. ``docs/security.md`` has the bytes.

Source: Bellare and Rogaway, "Entity Authentication and Key Distribution", 1993 (the protocol MAP1).
"""

from __future__ import annotations

import secrets
import struct
from abc import ABC, abstractmethod
from enum import Enum, IntEnum
from hashlib import sha256

from dist2.errors import AuthenticationError
from dist2.runtime.secret import Secret

MAGIC = b"dist2-hs"
"""How every message begins. Neither a frame, a store query nor TLS does."""
VERSION = 1
NONCE_BYTES = 32

_PREFIX = struct.Struct("<8sHBBBxxx")
_ID_BYTES = 32
OPENER_BYTES = _PREFIX.size + NONCE_BYTES + 3 * _ID_BYTES
MESSAGE_BYTES = _PREFIX.size + 32
"""Length of every message but the opener."""

_CALLER_PROVES = "dist2 handshake: caller"
_LISTENER_PROVES = "dist2 handshake: listener"


class Plane(IntEnum):
    """The kind of connection."""

    DATA = 1
    STORE = 2


class Step(IntEnum):
    """Type of a message."""

    OPENER = 1
    CHALLENGE = 2
    PROOF = 3
    WELCOME = 4
    REFUSAL = 5


class Reason(Enum):
    """Why a connection is refused: the code on the wire, and words about the other side."""

    NOT_THE_PROTOCOL = (1, "it does not speak the handshake")
    OTHER_VERSION = (2, "it speaks another version of the handshake")
    OTHER_PLANE = (3, "it means another kind of connection")
    OTHER_JOB = (4, "it belongs to another job (DIST2_JOB_ID)")
    OTHER_TARGET = (5, "it addresses another process")
    WRONG_SECRET = (
        6,
        "its proof is wrong: it has another secret (DIST2_SECRET), or replays an old handshake",
    )
    NO_SECRET_THERE = (7, "it does not authenticate itself: set the same DIST2_SECRET there")
    NO_SECRET_HERE = (8, "it wants to authenticate, and no secret is set here: set the same DIST2_SECRET")
    UNKNOWN = (255, "it gives no reason that is known here")

    def __init__(self, code: int, words: str) -> None:
        self.code = code
        self.words = words

    @property
    def label(self) -> str:
        """Its name in metrics and logs."""
        return self.name.lower()


_REASONS = {reason.code: reason for reason in Reason}
_AS_TOLD = {
    Reason.NOT_THE_PROTOCOL: "it did not understand this process's handshake",
    Reason.OTHER_VERSION: "it speaks another version of the handshake",
    Reason.OTHER_PLANE: "it serves another kind of connection",
    Reason.OTHER_JOB: "it belongs to another job (DIST2_JOB_ID)",
    Reason.OTHER_TARGET: "it is not the process that was meant",
    Reason.WRONG_SECRET: "it has another secret (DIST2_SECRET)",
    Reason.NO_SECRET_THERE: "it asks for a secret: set the same DIST2_SECRET here",
    Reason.NO_SECRET_HERE: "it has no secret, and this process has: set the same DIST2_SECRET there",
    Reason.UNKNOWN: Reason.UNKNOWN.words,
}
"""The reasons in a refusal, as the refused side says them."""


_IF_TORCH = (
    ". If it is torch.distributed of a rank: it gets in after dist2 has met here in the same process, "
    "or with store=pg.get_group_store(), or at another port"
)


class RefusalError(AuthenticationError):
    """A connection is refused.

    Attributes:
        reply: Bytes to send before the connection is closed; empty where the other side refused.
    """

    def __init__(self, message: str, *, reason: str, reply: bytes = b"") -> None:
        super().__init__(message, reason=reason)
        self.reply = reply


def refused_here(reason: Reason, plane: Plane) -> RefusalError:
    """Return the error of a side that refuses the other."""
    is_torch_maybe = plane is Plane.STORE and reason is Reason.NO_SECRET_THERE
    words = f"{reason.words}{_IF_TORCH}" if is_torch_maybe else reason.words
    return RefusalError(words, reason=reason.label, reply=refusal(reason, plane))


def refused_there(code: int) -> RefusalError:
    """Return the error of a side that was refused."""
    reason = _REASONS.get(code, Reason.UNKNOWN)
    text = f"the other side refused the connection: {_AS_TOLD[reason]}"
    return RefusalError(text, reason=f"refused_there_{reason.label}")


def refusal(reason: Reason, plane: Plane) -> bytes:
    """Return the message that tells the other side why it is refused."""
    return _message(plane, Step.REFUSAL, bytes(32), reason.code)


def explanation(data: bytes) -> AuthenticationError | None:
    """Return the error for the first bytes of a peer that has no secret, where one is required; else None.

    Args:
        data: The first bytes that the other side sent.
    """
    if len(data) >= _PREFIX.size and data.startswith(MAGIC):
        _, _, _, step, code = _PREFIX.unpack(data[: _PREFIX.size])
        if step == Step.REFUSAL:
            return refused_there(code)
    if data[:2] == b"\x15\x03":  # an alert
        return AuthenticationError(
            "the other side refused the connection: it speaks TLS, set DIST2_TLS_CERT, DIST2_TLS_KEY and "
            "DIST2_TLS_CA here, too",
            reason="refused_there_tls",
        )
    return None


class Handshake(ABC):
    """One side of one handshake. Read at most `wanted` bytes, `feed` them, send what that returns.

    Attributes:
        done: The other side has proved that it knows the secret, and was notified.
    """

    def __init__(self, secret: Secret, plane: Plane, job_id: str) -> None:
        self.done = False
        self._secret = secret
        self._plane = plane
        self._job = identity(job_id)
        self._nonce = secrets.token_bytes(NONCE_BYTES)
        self._buffer = b""

    @property
    def wanted(self) -> int:
        """How many bytes of the next message are missing: never more than the other side may send now."""
        return self._expected_bytes() - len(self._buffer)

    def feed(self, data: bytes) -> bytes:
        """Process received bytes; return the bytes to send.

        Raises:
            RefusalError: The other side does not know the secret, or is not the one that is meant.
        """
        self._buffer += data
        message = self._buffer
        if not MAGIC.startswith(message[: len(MAGIC)]):
            raise self._not_a_handshake()
        if len(message) >= _PREFIX.size:
            self._check_prefix(message)
        if len(message) < self._expected_bytes():
            return b""
        self._buffer = b""
        return self._take(message)

    @abstractmethod
    def _expected(self) -> Step: ...

    @abstractmethod
    def _take(self, message: bytes) -> bytes:
        """Take a message of the right length and kind."""

    def _expected_bytes(self) -> int:
        return OPENER_BYTES if self._expected() is Step.OPENER else MESSAGE_BYTES

    def _not_a_handshake(self) -> RefusalError:
        return self._refused(Reason.NOT_THE_PROTOCOL)

    def _check_prefix(self, message: bytes) -> None:
        _, version, plane, step, code = _PREFIX.unpack(message[: _PREFIX.size])
        if step == Step.REFUSAL and self._expected() is not Step.OPENER:
            raise refused_there(code)
        if version != VERSION:
            raise self._refused(Reason.OTHER_VERSION)
        if plane != self._plane:
            raise self._refused(Reason.OTHER_PLANE)
        if message[: _PREFIX.size] != _prefix(self._plane, self._expected()):
            raise self._refused(Reason.NOT_THE_PROTOCOL)

    def _refused(self, reason: Reason) -> RefusalError:
        return refused_here(reason, self._plane)


class Caller(Handshake):
    """The side that connects. Send `opener` first.

    Args:
        secret: The common secret.
        plane: The kind of connection.
        job_id: The job that both sides belong to.
        me: The caller's identity.
        target: The identity that the caller means to reach.
    """

    def __init__(self, secret: Secret, plane: Plane, job_id: str, me: str, target: str) -> None:
        super().__init__(secret, plane, job_id)
        ids = self._job + identity(me) + identity(target)
        self.opener = _message(plane, Step.OPENER, self._nonce + ids)
        self._challenge = self._proof = b""

    def _expected(self) -> Step:
        return Step.WELCOME if self._challenge else Step.CHALLENGE

    def _take(self, message: bytes) -> bytes:
        if not self._challenge:
            self._challenge = message
            mac = self._secret.mac(_CALLER_PROVES, self.opener, message)
            self._proof = _message(self._plane, Step.PROOF, mac)
            return self._proof
        mac = message[_PREFIX.size :]
        if not self._secret.vouches(mac, _LISTENER_PROVES, self.opener, self._challenge, self._proof):
            raise self._refused(Reason.WRONG_SECRET)
        self.done = True
        return b""


class Listener(Handshake):
    """The side that is connected to.

    Args:
        secret: The common secret.
        plane: The kind of connection.
        job_id: The job that both sides belong to.
        me: The listener's identity.

    Attributes:
        caller: `identity` of the caller; proved once the handshake is done.
    """

    def __init__(self, secret: Secret, plane: Plane, job_id: str, me: str) -> None:
        super().__init__(secret, plane, job_id)
        self.caller = b""
        self._me = identity(me)
        self._opener = self._challenge = b""

    @property
    def addressed(self) -> bool:
        """Whether the caller has named this very process: strangers do not know how."""
        return bool(self._opener)

    def _expected(self) -> Step:
        return Step.PROOF if self._opener else Step.OPENER

    def _not_a_handshake(self) -> RefusalError:
        # Most likely a process of ours that has no secret: tell it.
        return self._refused(Reason.NOT_THE_PROTOCOL if self._opener else Reason.NO_SECRET_THERE)

    def _take(self, message: bytes) -> bytes:
        if not self._opener:
            ids = message[_PREFIX.size + NONCE_BYTES :]
            job, caller, target = (ids[start : start + _ID_BYTES] for start in range(0, len(ids), _ID_BYTES))
            if job != self._job:
                raise self._refused(Reason.OTHER_JOB)
            if target != self._me:
                raise self._refused(Reason.OTHER_TARGET)
            self._opener, self.caller = message, caller
            self._challenge = _message(self._plane, Step.CHALLENGE, self._nonce)
            return self._challenge
        mac = message[_PREFIX.size :]
        if not self._secret.vouches(mac, _CALLER_PROVES, self._opener, self._challenge):
            raise self._refused(Reason.WRONG_SECRET)
        self.done = True
        answer = self._secret.mac(_LISTENER_PROVES, self._opener, self._challenge, message)
        return _message(self._plane, Step.WELCOME, answer)


def identity(text: str) -> bytes:
    """Return the 32 bytes that stand for a name of any length."""
    return sha256(text.encode()).digest()


def _prefix(plane: Plane, step: Step, code: int = 0) -> bytes:
    return _PREFIX.pack(MAGIC, VERSION, plane, step, code)


def _message(plane: Plane, step: Step, body: bytes, code: int = 0) -> bytes:
    return _prefix(plane, step, code) + body
