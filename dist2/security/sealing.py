"""Seals: authenticated texts that members exchange where strangers may write too, such as in a store.

A seal proves that its writer knows the secret, and binds the text to a purpose: the text of another job,
group, rank or use does not verify. It does not encrypt.
"""

from __future__ import annotations

from dist2.errors import AuthenticationError
from dist2.security.authenticator import Credentials
from dist2.security.handshake import Reason, identity

_BEGINS = "dist2-seal-1"
_JOB_BYTES = 8
_PURPOSE = "dist2 seal"


def seal(credentials: Credentials, text: str, *about: str) -> str:
    """Return a text with a seal that members of the job can verify; without a secret, the text itself.

    Args:
        credentials: This process's credentials.
        text: The text.
        about: Its purpose: the reader must give the same.
    """
    secret = credentials.secret
    if secret is None:
        return text
    mac = secret.mac(_PURPOSE, *_parts(credentials, text, about))
    return f"{_BEGINS}:{_job(credentials)}:{mac.hex()}:{text}"


def unseal(credentials: Credentials, sealed: str, *about: str) -> str:
    """Verify a seal, and return the text.

    Args:
        credentials: This process's credentials.
        sealed: A result of `seal`.
        about: As there.

    Raises:
        AuthenticationError: A member of this job has not written it for this.
    """
    secret = credentials.secret
    is_sealed = sealed.startswith(f"{_BEGINS}:")
    if secret is None:
        if is_sealed:
            raise _refused(
                Reason.NO_SECRET_HERE, "it is sealed, and no secret is set here: set the same DIST2_SECRET"
            )
        return sealed
    fields = sealed.split(":", 3)
    if not is_sealed or len(fields) != 4:
        raise _refused(Reason.NO_SECRET_THERE, "it is not sealed: set the same DIST2_SECRET there")
    _, job, mac, text = fields
    if job != _job(credentials):
        raise _refused(Reason.OTHER_JOB, "it belongs to another job (DIST2_JOB_ID)")
    if not secret.vouches(_bytes_of(mac), _PURPOSE, *_parts(credentials, text, about)):
        why = "its seal is wrong: it has another secret (DIST2_SECRET), or was made for something else"
        raise _refused(Reason.WRONG_SECRET, why)
    return text


def _parts(credentials: Credentials, text: str, about: tuple[str, ...]) -> list[bytes]:
    parts = (credentials.job_id, *about, text)
    return [part.encode(errors="surrogatepass") for part in parts]


def _job(credentials: Credentials) -> str:
    return identity(credentials.job_id)[:_JOB_BYTES].hex()


def _bytes_of(text: str) -> bytes:
    try:
        return bytes.fromhex(text)
    except ValueError:
        return b""


def _refused(reason: Reason, why: str) -> AuthenticationError:
    return AuthenticationError(why, reason=reason.label)
