"""`Library`: the NCCL library of this process, or the reason why there is none.

cupy's `cupy.cuda.nccl` makes the calls on the hot path. It lacks some functions; `Functions` calls those
through ctypes, on the same library. Nothing here is imported before a group asks for NCCL.
"""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Callable, Mapping
from functools import partial
from importlib import import_module
from typing import Any

import attrs
import torch

from dist2.backends.nccl.functions import UNIQUE_ID_BYTES, ConfiguredCommunicator, Functions
from dist2.errors import BackendUnavailableError

SONAMES = ("libnccl.so.2", "librccl.so.1")
"""RCCL has NCCL's functions; torch for AMD GPUs brings it."""

FLOOR = 21800
"""Oldest version that dist2 works with: the first with `ncclCommSplit`."""

_INSTALL = "install it with: pip install 'dist2[nccl]'"


def version_text(version: int) -> str:
    """Return a version as people write it: 22809 is 2.28.9."""
    return f"{version // 10000}.{version // 100 % 100}.{version % 100}"


@attrs.frozen(eq=False)
class Library:
    """The functions of one NCCL library.

    Attributes:
        version: Its version: major * 10000 + minor * 100 + patch.
        functions: The functions that cupy lacks, through ctypes.
        communicator: cupy's class of communicators, or one with the same methods.
        group_start: Begins a group of calls; they are launched together.
        group_end: Launches them.
        make_unique_id: Returns the id that the ranks of a new communicator must share: 128 bytes; some
            versions of cupy give a tuple of signed ones.
    """

    version: int
    functions: Functions
    communicator: Any
    group_start: Callable[[], None]
    group_end: Callable[[], None]
    make_unique_id: Callable[[], bytes | tuple[int, ...]]

    def unique_id(self) -> bytes:
        """Return a new unique id: one rank makes it, and all ranks connect with it."""
        made = self.make_unique_id()
        return made if isinstance(made, bytes) else struct.pack(f"{UNIQUE_ID_BYTES}b", *made)

    def configured(self, settings: Mapping[str, int | str]) -> Library:
        """Return a library whose communicators have settings, which only `ConfiguredCommunicator` takes."""
        if not settings:
            return self
        return attrs.evolve(self, communicator=partial(ConfiguredCommunicator, self.functions, settings))


def load() -> Library:
    """Return the library for the GPUs of this process.

    Raises:
        BackendUnavailableError: torch or cupy has no support for GPUs, there is no GPU, or NCCL is missing or
            too old; the message says which and how to install what is missing.
    """
    if torch.version.cuda is None and torch.version.hip is None:
        raise BackendUnavailableError(
            f"backend 'nccl' needs a build of torch for GPUs; this one ({torch.__version__}) is for CPUs "
            f"only: see https://pytorch.org for the install line of your platform"
        )
    if not torch.cuda.is_available():
        raise BackendUnavailableError(
            "backend 'nccl' needs a GPU, and torch sees none: check the driver, the devices that a container "
            "is given, and CUDA_VISIBLE_DEVICES; or use backend 'socket' on CPUs"
        )
    try:
        cupy_nccl = import_module("cupy.cuda.nccl")
    except ImportError as error:
        raise BackendUnavailableError(
            f"backend 'nccl' needs cupy, which cannot be imported ({error}): {_INSTALL}"
        ) from error
    if not cupy_nccl.available:
        raise BackendUnavailableError(
            f"backend 'nccl' needs {' or '.join(SONAMES)}, which cupy cannot find: install the one for "
            f"your GPU, for example with: pip install nvidia-nccl-cu13"
        )
    return from_cupy(cupy_nccl)


def from_cupy(cupy_nccl: Any) -> Library:
    """Return the library that cupy has found.

    Raises:
        BackendUnavailableError: It is too old.
    """
    check_version(cupy_nccl.get_version())
    if not hasattr(cupy_nccl.NcclCommunicator, "commSplit"):
        raise BackendUnavailableError(
            "backend 'nccl' needs cupy 14 or newer, which can split communicators: "
            "pip install --upgrade 'dist2[nccl]'"
        )
    return Library(
        version=cupy_nccl.get_version(),
        functions=Functions(_loaded()),
        communicator=cupy_nccl.NcclCommunicator,
        group_start=cupy_nccl.groupStart,
        group_end=cupy_nccl.groupEnd,
        make_unique_id=cupy_nccl.get_unique_id,
    )


def from_functions(functions: Functions) -> Library:
    """Return a library without cupy: all calls through ctypes. It is slower, and the tests' second way.

    Raises:
        BackendUnavailableError: It is too old.
    """
    check_version(functions.version())
    return Library(
        version=functions.version(),
        functions=functions,
        communicator=functions.communicator,
        group_start=functions.group_start,
        group_end=functions.group_end,
        make_unique_id=functions.unique_id,
    )


def check_version(version: int) -> None:
    """Raise if a version is older than dist2 works with.

    Raises:
        BackendUnavailableError: It is.
    """
    if version < FLOOR:
        raise BackendUnavailableError(
            f"backend 'nccl' needs NCCL {version_text(FLOOR)} or newer, found {version_text(version)}: "
            f"upgrade it with: pip install --upgrade nvidia-nccl-cu13"
        )


def _loaded() -> ctypes.CDLL:
    """Return the library that cupy has loaded: no second one."""
    for name in SONAMES:
        try:
            return ctypes.CDLL(name, os.RTLD_NOLOAD | os.RTLD_NOW)
        except OSError:
            continue
    raise BackendUnavailableError(f"cupy uses a library of collectives that is none of {', '.join(SONAMES)}")
