"""The stub of NCCL (see ``nccl_stub/stub.h``): built once where a compiler is, loaded as libnccl.so.2."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import shutil
import struct
import subprocess
import tempfile
import threading
from importlib import import_module
from pathlib import Path

import attrs

from dist2.backends.nccl.functions import Functions
from dist2.backends.nccl.library import Library, from_cupy, from_functions

SOURCE = Path(__file__).parent / "nccl_stub"
COMPILER = shutil.which("cc") or shutil.which("gcc")
_MAX_RANKS = 16
_FLAGS = ("-std=gnu11", "-O2", "-Wall", "-Wextra", "-fPIC", "-shared", "-Wl,-soname,libnccl.so.2")


def missing() -> str | None:
    """Return why there is no stub here; None where there is one."""
    return None if COMPILER else "there is no C compiler to build the stub of NCCL with"


@functools.cache
def path() -> Path:
    """Build the stub, unless these sources were built before, and return the library."""
    assert COMPILER is not None
    sources = sorted(SOURCE.glob("*.[ch]"))
    digest = hashlib.blake2b(b"".join(each.read_bytes() for each in sources), digest_size=8).hexdigest()
    folder = Path(tempfile.gettempdir()) / f"dist2-nccl-stub-{os.getuid()}-{digest}"
    built = folder / "libnccl.so.2"
    if not built.exists():
        folder.mkdir(mode=0o700, exist_ok=True)
        made = folder / f"{os.getpid()}-{threading.get_ident()}.so"
        files = [str(each) for each in sources if each.suffix == ".c"]
        subprocess.run(
            [COMPILER, *_FLAGS, "-o", str(made), *files, "-lpthread", "-lrt"], check=True, timeout=60
        )
        made.rename(built)  # in one step: other threads and processes may build it as well
    return built


@functools.cache
def stub() -> ctypes.CDLL:
    """Return the stub. cupy finds it as well from now on, as the library of that name that is loaded."""
    library = ctypes.CDLL(str(path()), ctypes.RTLD_GLOBAL)
    pointer = ctypes.c_void_p
    signatures = {
        "stub_stream_create": (pointer, (ctypes.c_int, ctypes.c_uint)),
        "stub_stream_destroy": (None, (pointer,)),
        "stub_stream_run": (None, (pointer, pointer, pointer)),
        "stub_event_create": (pointer, ()),
        "stub_event_destroy": (None, (pointer,)),
        "stub_event_record": (None, (pointer, pointer)),
        "stub_stream_wait_event": (None, (pointer, pointer)),
        "stub_event_query": (ctypes.c_int, (pointer,)),
        "stub_event_elapsed_ms": (ctypes.c_double, (pointer, pointer)),
        "stub_set_async_error": (None, (pointer, ctypes.c_int)),
    }
    for name, (result, arguments) in signatures.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library


def sweep() -> None:
    """Remove the shared memory of communicators whose ranks were all killed while they met."""
    for left in Path("/dev/shm").glob("dist2-nccl-*"):
        try:
            _, *pids = struct.unpack_from(f"{1 + _MAX_RANKS}i", left.read_bytes())
        except (OSError, struct.error):
            continue  # gone meanwhile, or not filled yet
        if any(pids) and not any(pid and Path(f"/proc/{pid}").exists() for pid in pids):
            left.unlink(missing_ok=True)


@functools.cache
def has_cupy() -> bool:
    """Whether cupy is installed, and takes the stub."""
    stub()
    try:
        return bool(import_module("cupy.cuda.nccl").available)
    except ImportError:
        return False


def library() -> Library:
    """Return the stub through cupy where that is installed, else through the twin."""
    return through_cupy() if has_cupy() else through_ctypes()


def through_cupy() -> Library:
    """Return the stub as cupy calls it, also where torch has loaded an NCCL of its own."""
    return attrs.evolve(from_cupy(import_module("cupy.cuda.nccl")), functions=Functions(stub()))


def through_ctypes() -> Library:
    """Return the stub as the twin of cupy's communicator calls it."""
    return from_functions(Functions(stub()))
