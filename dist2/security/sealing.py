"""Seals: texts that members hand to each other where strangers may write as well, such as in a store.

A seal says that whoever wrote a text knows the secret, and what the text was written for: the one of
another job, group or rank, or of another use, does not fit. It keeps nothing from being read.
"""

from __future__ import annotations

from dist2.errors import AuthenticationError
from dist2.security.entrance import Credentials
from dist2.security.handshake import Reason, identity

_BEGINS = "dist2-seal-1"
_JOB_BYTES = 8
_PURPOSE = "dist2 seal"


def seal(credentials: Credentials, text: str, *about: str) -> str:
    """Return a text as members of the job can check it; as it is where there is no secret.

    Args:
        credentials: This process's credentials.
        text: What it says.
        about: What it is for: the reader must name the same.
    """
    secret = credentials.secret
    if secret is None:
        return text
    mac = secret.mac(_PURPOSE, *_parts(credentials, text, about))
    return f"{_BEGINS}:{_job(credentials)}:{mac.hex()}:{text}"


def unseal(credentials: Credentials, sealed: str, *about: str) -> str:
    """Return the text that somebody has sealed.

    Args:
        credentials: This process's credentials.
        sealed: What `seal` returned there.
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
