"""Backends: they move the tensors of a group. See `dist2.backends.base`."""
