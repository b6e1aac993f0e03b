"""Cython's refnanny, which checks reference counts in a debug build, made strict: an error ends the process.

Generated C imports a module of this name before Cython's own, which prints an error and goes on: pytest
would hide that, if the test passes. Cython's module keeps the `print` that it finds when it is imported.
"""

from __future__ import annotations

import builtins
import os
from unittest import mock


def _end(*words: object) -> None:
    """Print what refnanny prints: for an error first the function, then what is wrong with it."""
    text = " ".join(map(str, words))
    os.write(2, f"{text}\n".encode())
    if "REFNANNY" in text or "refnanny raised" in text:
        os.abort()


with mock.patch.object(builtins, "print", _end):
    from Cython.Runtime.refnanny import RefNannyAPI  # type: ignore[import-not-found]  # it is compiled

__all__ = ["RefNannyAPI"]
