"""Who may talk to a process: secrets, the handshake, TLS. ``docs/security.md`` has the threat model."""
