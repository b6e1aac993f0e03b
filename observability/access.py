"""The token of a control plane, and over which connections it may be sent.

One bearer token (RFC 6750) for all ranks of a job: given by the program, or derived from the job's secret.
It is sent as it is, so it is only sent inside of this host or under TLS.
"""

from __future__ import annotations

import ipaddress
from base64 import urlsafe_b64encode
from collections.abc import Sequence
from functools import lru_cache

from dist2.security.job_secrets import JobSecrets

_PURPOSE = "dist2 control plane: token"

NEEDS_TLS = "the token needs TLS, set DIST2_TLS_CERT, DIST2_TLS_KEY and DIST2_TLS_CA"


def job_token(secrets: JobSecrets) -> str | None:
    """Return the token that is derived from the secret and the id of the job; None without a secret."""
    if secrets.secret is None:
        return None
    mac = secrets.secret.mac(_PURPOSE, secrets.job_id.encode())
    return urlsafe_b64encode(mac).decode().rstrip("=")


@lru_cache(maxsize=4096)  # asked before each request to another rank
def is_loopback(host: str) -> bool:
    """Whether an address is of this host alone."""
    if host == "localhost":
        return True
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return (mapped or address).is_loopback


def peer_name(address: Sequence[object] | None) -> str:
    """Return the other end of a connection in words, for a log."""
    return "unknown" if address is None else "{}:{}".format(*address[:2])
