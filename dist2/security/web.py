"""The handshake of the control plane, in HTTP headers, without input or output.

Each request proves that its sender knows the secret, and each answer that its server does: a challenge is
good for one request, so nothing that was overheard can be used again, and no secret is sent. What is
proved covers the job, the method, the path with its query, and the answer's status and body.

==================  =========================================================================================
client              ``Authorization: Dist2 version="1"``
server              401, ``WWW-Authenticate: Dist2 version="1", challenge="..."``
client              ``Authorization: Dist2 version="1", job="...", challenge="...", nonce="...", proof="..."``
server              ``Authentication-Info: Dist2 proof="..."`` with the answer
==================  =========================================================================================

Source: RFC 7616 (Digest), whose shape it has, with HMAC-SHA256 and challenges that are used once.
"""

from __future__ import annotations

import re
import secrets
import time
from hashlib import sha256

import attrs

from dist2.errors import AuthenticationError
from dist2.secret import Secret
from dist2.security.handshake import NONCE_BYTES, Reason, identity, refused_there

SCHEME = "Dist2"
VERSION = "1"
CHALLENGE_S = 30.0
"""How long a challenge may be answered."""

STALE = "stale_challenge"
"""The reason for which a client may try again, with the challenge that comes with it."""

_CALLER_PROVES = "dist2 control: caller"
_LISTENER_PROVES = "dist2 control: listener"
_CHALLENGES = "dist2 control: challenge"
_FIELD = re.compile(r'([a-z]+)="([^"]*)"')
_TIME_DIGITS = 16
_REASONS = {reason.label: reason for reason in Reason}


@attrs.frozen
class Admission:
    """A request that was let in.

    Attributes:
        proof: What the client proved itself with.
    """

    proof: str
    _secret: Secret = attrs.field(repr=False)

    def attest(self, status: int, body: bytes) -> str:
        """Return the value of ``Authentication-Info`` that goes with an answer."""
        return _header(proof=_answer_mac(self._secret, self.proof, status, body).hex())


class Doorkeeper:
    """The server's side.

    Nothing is kept of those who cannot prove anything: challenges vouch for themselves.

    Args:
        secret: What both sides know.
        job_id: The job that both sides belong to.
    """

    def __init__(self, secret: Secret, job_id: str) -> None:
        self._secret = secret
        self._job_id = job_id
        self._own = Secret(secrets.token_bytes(NONCE_BYTES))
        self._used: dict[str, float] = {}

    def challenge(self) -> str:
        """Return the value of ``WWW-Authenticate`` that asks for a proof."""
        return _header(version=VERSION, challenge=self._new_challenge())

    def admit(self, authorization: str, method: str, target: str) -> Admission | None:
        """Return the admission of a request; None for one that only asks for a challenge.

        Args:
            authorization: Its ``Authorization``, of our scheme.
            method: ``GET``.
            target: Path and query, as sent.

        Raises:
            AuthenticationError: It proves nothing.
        """
        fields = _fields(authorization)
        if fields.get("version") != VERSION:
            raise _refused(Reason.OTHER_VERSION)
        if "proof" not in fields:
            return None
        if fields.get("job") != _job(self._job_id):
            raise _refused(Reason.OTHER_JOB)
        challenge, nonce, proof = (fields.get(name, "") for name in ("challenge", "nonce", "proof"))
        expires = self._expiry(challenge)
        now = time.monotonic()
        if expires is None or not now < expires:
            raise AuthenticationError("its challenge is not of this server, or too old", reason=STALE)
        mac = _request_mac(self._secret, self._job_id, challenge, nonce, method, target)
        if not secrets.compare_digest(_hex_bytes(proof), mac):
            raise _refused(Reason.WRONG_SECRET)
        for old in [each for each, until in self._used.items() if until <= now]:
            del self._used[old]
        if challenge in self._used:
            raise AuthenticationError("it repeats what was said before", reason="replayed")
        self._used[challenge] = expires  # only members come as far as this
        return Admission(mac.hex(), self._secret)

    def _new_challenge(self) -> str:
        text = (
            f"{int((time.monotonic() + CHALLENGE_S) * 1000):0{_TIME_DIGITS}x}{secrets.token_hex(NONCE_BYTES)}"
        )
        return text + self._own.mac(_CHALLENGES, text.encode()).hex()

    def _expiry(self, challenge: str) -> float | None:
        """Return until when a challenge may be answered; None if it is not of this server."""
        text, mac = challenge[: _TIME_DIGITS + 2 * NONCE_BYTES], challenge[_TIME_DIGITS + 2 * NONCE_BYTES :]
        if not self._own.vouches(_hex_bytes(mac), _CHALLENGES, text.encode(errors="surrogatepass")):
            return None
        return int(text[:_TIME_DIGITS], 16) / 1000


class Visitor:
    """The client's side, for one request: send `opener`, `prove`, then `check` the answer.

    Args:
        secret: What both sides know.
        job_id: The job that both sides belong to.
        method: ``GET``.
        target: Path and query, as they will be sent.
    """

    opener = f'{SCHEME} version="{VERSION}"'
    """The value of ``Authorization`` that asks for a challenge."""

    def __init__(self, secret: Secret, job_id: str, method: str, target: str) -> None:
        self._secret = secret
        self._job_id = job_id
        self._request = (method, target)
        self._proof = ""

    def prove(self, challenges: str) -> str:
        """Return the value of ``Authorization`` that answers a challenge.

        Args:
            challenges: The answer's ``WWW-Authenticate``.

        Raises:
            AuthenticationError: The server asks for none, or refuses this process.
        """
        fields = _fields(challenges)
        refused = fields.get("refused")
        if refused is not None:
            raise refused_there(_REASONS.get(refused, Reason.UNKNOWN).code)
        challenge = fields.get("challenge")
        if challenge is None or fields.get("version") != VERSION:
            raise AuthenticationError(
                "it does not authenticate itself: set the same DIST2_SECRET there",
                reason=Reason.NO_SECRET_THERE.label,
            )
        nonce = secrets.token_hex(NONCE_BYTES)
        mac = _request_mac(self._secret, self._job_id, challenge, nonce, *self._request)
        self._proof = mac.hex()
        return _header(
            version=VERSION, job=_job(self._job_id), challenge=challenge, nonce=nonce, proof=self._proof
        )

    def check(self, info: str, status: int, body: bytes) -> None:
        """Check that an answer to this very request comes from a process that knows the secret.

        Args:
            info: The answer's ``Authentication-Info``.
            status: Its status.
            body: All of it.

        Raises:
            AuthenticationError: It does not.
        """
        mac = _answer_mac(self._secret, self._proof, status, body)
        if not secrets.compare_digest(_hex_bytes(_fields(info).get("proof", "")), mac):
            raise _refused(Reason.WRONG_SECRET)


def is_proof(authorization: str) -> bool:
    """Whether an ``Authorization`` is of our scheme."""
    return authorization.partition(" ")[0].lower() == SCHEME.lower()


def refusal(reason: str) -> str:
    """Return the value of ``WWW-Authenticate`` that tells a client why it is refused."""
    return _header(version=VERSION, refused=reason)


def _header(**fields: str) -> str:
    return f"{SCHEME} " + ", ".join(f'{name}="{value}"' for name, value in fields.items())


def _fields(header: str) -> dict[str, str]:
    """Return the fields of our scheme in a header that may have those of others."""
    at = header.lower().find(f"{SCHEME.lower()} ")
    return {} if at < 0 else dict(_FIELD.findall(header, at))


def _job(job_id: str) -> str:
    return identity(job_id).hex()


def _request_mac(secret: Secret, job_id: str, *parts: str) -> bytes:
    return secret.mac(_CALLER_PROVES, *(part.encode(errors="surrogatepass") for part in (job_id, *parts)))


def _answer_mac(secret: Secret, proof: str, status: int, body: bytes) -> bytes:
    return secret.mac(_LISTENER_PROVES, proof.encode(), str(status).encode(), sha256(body).digest())


def _hex_bytes(text: str) -> bytes:
    try:
        return bytes.fromhex(text)
    except ValueError:
        return b""


def _refused(reason: Reason) -> AuthenticationError:
    return AuthenticationError(reason.words, reason=reason.label)
