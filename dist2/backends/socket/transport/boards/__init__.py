"""Synchronisation of a group's members on one host: fences in shared memory, waiting, and failures."""
