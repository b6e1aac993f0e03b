"""Authentication of processes: secrets, the handshake, TLS. ``docs/security.md`` has the threat model."""
