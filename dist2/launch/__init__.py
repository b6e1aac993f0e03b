"""Ranks on this host by a function call, `local`, and ranks that other engines start: `dist2.launch.ray`.

``python -m dist2.run`` starts a program as ranks.
"""

from dist2.launch.processes import local

__all__ = ["local"]
