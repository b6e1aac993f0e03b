"""Checks of the software and its settings: versions, variables, launcher, GPUs."""

from __future__ import annotations

import platform
import sys
from collections.abc import Callable, Iterable, Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from dist2.cli.doctor.finding import Finding
from dist2.errors import Dist2Error
from dist2.rendezvous.launchers import launched
from dist2.runtime.config import Config, environment_value, own_variables, unknown_variables

LEAST_PYTHON = (3, 11)
LEAST_TORCH = (2, 8)
EXTRAS = {
    "control-plane": (
        ("starlette", "uvicorn", "click", "rich"),
        "the HTTP control plane, and the commands why, top and trace",
    ),
    "bench": (("click", "rich", "matplotlib", "numpy"), "the command bench, and the demo"),
}
_BUILD_FOR_GPUS = (
    "for GPUs, of which this machine has none",
    "it takes several GB of disk; groups work alike",
    "in a new environment, install the build for CPUs first, by the line that https://pytorch.org has for it",
)


def versions() -> Iterator[Finding]:
    """Python, torch and dist2 itself."""
    python = f"Python {platform.python_version()}"
    if sys.version_info[:2] < LEAST_PYTHON:
        yield Finding.problem("Python", python, "dist2 does not run on it", "install Python 3.11 or newer")
    else:
        yield Finding.ok("Python", python)
    numbers = tuple(int(part) for part in torch.__version__.split(".")[:2])
    found = f"torch {torch.__version__}"
    if numbers < LEAST_TORCH:
        yield Finding.problem(
            "torch", found, "dist2 is not tested on it and may fail", "install torch 2.8 or newer"
        )
    else:
        yield Finding.ok("torch", found)
    yield Finding.ok("dist2", f"dist2 {_version('dist2') or 'from a source tree, not installed'}")


def extras() -> Iterator[Finding]:
    """Packages of the extras that commands and the control plane need."""
    for extra, (packages, purpose) in EXTRAS.items():
        missing = [name for name in packages if _version(name) is None]
        if missing:
            install = f"for {purpose}: pip install 'dist2[{extra}]'"
            yield Finding.skipped(f"extra {extra}", f"not installed: {', '.join(missing)}; {install}")
        else:
            found = ", ".join(f"{name} {_version(name)}" for name in packages)
            yield Finding.ok(f"extra {extra}", found)


def variables() -> Iterator[Finding]:
    """The variables of dist2: unknown names and invalid values."""
    for name, suggestion in unknown_variables().items():
        remedy = (
            f"did you mean {suggestion}?" if suggestion else "unset it; docs/environment.md has all names"
        )
        yield Finding.warning("variables", f"unknown variable {name}", "it has no effect", remedy)
    names = own_variables()
    try:
        Config.from_environment(names)
    except (Dist2Error, OSError) as error:
        remedy = "docs/environment.md has the values of each variable"
        yield Finding.problem("variables", str(error), "no group can be made", remedy)
        return
    found = ", ".join(sorted(names)) if names else "none set"
    yield Finding.ok("variables", f"{found}; values are valid" if names else found)


def launcher() -> Iterator[Finding]:
    """The launcher of this process."""
    found = launched()
    if found is not None:
        yield Finding.ok("launcher", f"{found.launcher}: rank {found.rank} of {found.world_size}")
        return
    rank, size = environment_value("RANK"), environment_value("WORLD_SIZE")
    if rank and size:
        name = "torchrun" if environment_value("TORCHELASTIC_RUN_ID") else "RANK and WORLD_SIZE"
        yield Finding.ok("launcher", f"{name}: rank {rank} of {size}")
    elif rank or size:
        yield Finding.problem(
            "launcher",
            "only one of RANK and WORLD_SIZE is set",
            "env:// fails",
            "set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, or use a launcher",
        )
    else:
        yield Finding.ok("launcher", "none: this process is not one of several ranks")


def gpus() -> Iterator[Finding]:
    """GPUs, cupy and NCCL, or the reason why backend ``nccl`` cannot be used."""
    has_device = any(Path(each).exists() for each in ("/dev/nvidia0", "/dev/kfd"))
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not has_device and not count:
        yield Finding.skipped("GPUs", "no device of a GPU on this machine; backend 'nccl' is not checked")
        if torch.version.cuda or torch.version.hip:
            yield Finding.warning("torch's build", *_BUILD_FOR_GPUS)
        return
    from dist2.backends.nccl.library import load, version_text

    try:
        library = load()
    except Dist2Error as error:
        yield Finding.warning("GPUs", str(error), "backend 'nccl' cannot be used", "see docs/nccl.md")
        return
    names = sorted({torch.cuda.get_device_name(index) for index in range(count)})
    cupy = next(
        (found for name in ("cupy-cuda13x", "cupy-cuda12x", "cupy") if (found := _version(name))), "?"
    )
    yield Finding.ok(
        "GPUs", f"{count} x {', '.join(names)}; NCCL {version_text(library.version)}, cupy {cupy}"
    )


CHECKS: tuple[Callable[[], Iterable[Finding]], ...] = (versions, extras, variables, launcher, gpus)


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
