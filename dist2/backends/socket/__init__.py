"""The CPU data plane: shared memory inside a host, TCP between hosts."""
