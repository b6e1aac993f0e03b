"""The version of dist2, apart from the package's top, which is above all others."""

__version__ = "0.1.0"
