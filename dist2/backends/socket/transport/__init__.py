"""Transport of bytes between ranks: shared memory inside a host, links between processes."""
