"""How bytes get from rank to rank: shared memory inside a host, links between processes."""
