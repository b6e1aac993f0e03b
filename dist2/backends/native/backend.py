"""`NativeBackend`: all operations over one of torch's backends.

An operation is a generator (see ``turns.py``): it stages its tensors, yields what it started, and puts
the results in place when resumed.
"""

from __future__ import annotations

from dist2.backends.native.messages import Messages
from dist2.backends.native.moves import Moves
from dist2.backends.native.reductions import Reductions


class NativeBackend(Reductions, Moves, Messages):
    """A group of one of torch's backends."""
