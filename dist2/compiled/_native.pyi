"""The extension: a module with its parts as attributes."""

from dist2.compiled import _messages as messages
from dist2.compiled import _steps as steps

__all__ = ["messages", "steps"]
