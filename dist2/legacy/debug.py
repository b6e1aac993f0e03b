"""Debug levels: torch's own, as torch reads and keeps them."""

from torch.distributed import DebugLevel, get_debug_level, set_debug_level, set_debug_level_from_env

__all__ = ["DebugLevel", "get_debug_level", "set_debug_level", "set_debug_level_from_env"]
