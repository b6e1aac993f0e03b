"""Certificates for tests, made when they are needed."""

from __future__ import annotations

from pathlib import Path

import attrs
import trustme


@attrs.frozen
class Certificates:
    """Files of one member of a job.

    Attributes:
        variables: The environment variables that select them.
    """

    variables: dict[str, str]


def make(directory: Path, authority: trustme.CA | None = None, name: str = "127.0.0.1") -> Certificates:
    """Write a certificate for a name, its key and its CA into a new directory."""
    authority = authority or trustme.CA()
    directory.mkdir()
    issued = authority.issue_cert(name)
    files = {name: directory / f"{name}.pem" for name in ("cert", "key", "ca")}
    for blob in issued.cert_chain_pems:
        blob.write_to_path(files["cert"], append=True)
    issued.private_key_pem.write_to_path(files["key"])
    files["key"].chmod(0o600)
    authority.cert_pem.write_to_path(files["ca"])
    return Certificates({f"DIST2_TLS_{name.upper()}": str(path) for name, path in files.items()})
