"""Backends: what moves the tensors of a group. See `dist2.backends.base`."""
