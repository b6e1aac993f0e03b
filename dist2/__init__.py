"""dist2: process groups as objects for PyTorch.

    pg = dist2.new_group("socket")
    pg.all_reduce(tensor)

See the README for the three faces: objects, the old global API (`dist2.legacy`), and scraping.

The names are loaded, and torch with them, when the first of them is used. So the parts of the library that
need no torch, such as the commands that ask a job, start in a tenth of the time.
"""

from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING

from dist2.runtime.process import before_fork
from dist2.runtime.version import __version__ as __version__

if TYPE_CHECKING:
    from dist2.group.public import *  # noqa: F403 - it lists its names
    from dist2.group.public import __all__ as __all__

_ON_DEMAND = ("functional", "launch", "legacy", "torch_backend")


def __getattr__(name: str) -> ModuleType:
    """Return a name or a part, which is loaded when it is first used."""
    if name in _ON_DEMAND:
        return import_module(f"{__name__}.{name}")
    if name.startswith("_") and name != "__all__":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    public = _load_names()
    if name not in globals():
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}{public.instead(name)}")
    found: ModuleType = globals()[name]  # or any other public name: type checkers know the names above
    return found


def _load_names() -> ModuleType:
    """Load the public names; return their module."""
    from dist2.group import public

    globals().update({name: getattr(public, name) for name in ("__all__", *public.__all__)})
    return public


@before_fork
def _load_before_fork() -> None:
    """Load the modules that a first group needs, so that forked ranks share them: each would import them.

    It took 4 ranks on 2 cores half a second.
    """
    _load_names().load_all()


def __dir__() -> list[str]:
    return sorted({*_load_names().__all__, *_ON_DEMAND, "__version__"})
