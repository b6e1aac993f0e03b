"""`ProcessGroup`: the object that users hold, and how one is made."""

from dist2.group.public import ProcessGroup

__all__ = ["ProcessGroup"]
