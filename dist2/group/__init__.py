"""`ProcessGroup`: the object that users hold, and how one is made."""

from dist2.group.process_group import ProcessGroup

__all__ = ["ProcessGroup"]
