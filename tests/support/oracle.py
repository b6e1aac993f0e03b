"""Expected results of collectives, for tests of single modules."""

from dist2.testing.oracle import example, reduced

__all__ = ["example", "reduced"]
