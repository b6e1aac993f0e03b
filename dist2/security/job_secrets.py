"""`JobSecrets`: the proof of membership of this process. It needs no torch, unlike connections with it."""

from __future__ import annotations

from typing import Self

import attrs

from dist2.runtime.config import Config
from dist2.runtime.secret import Secret
from dist2.security.tls import TlsFiles


@attrs.frozen
class JobSecrets:
    """The proof of this process's membership, and the proof that it requires of others.

    Attributes:
        secret: The members' common secret; None where connections are not authenticated.
        job_id: Connections of other jobs are refused.
        tls: Certificates; None where connections are not encrypted.
    """

    secret: Secret | None = None
    job_id: str = ""
    tls: TlsFiles | None = None

    @classmethod
    def of(cls, config: Config) -> Self:
        """Return those that the environment sets.

        Raises:
            InvalidUsageError: A certificate or key cannot be used.
        """
        files = (config.tls_cert, config.tls_key, config.tls_ca)
        cert, key, ca = files
        tls = TlsFiles(cert, key, ca) if cert and key and ca else None
        if tls is not None:
            tls.check()
        return cls(config.secret, config.job_id, tls)
