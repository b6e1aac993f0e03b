"""`make debug-test` tests what it says: the extensions of the debug build, with all of their checks on.

No pattern of pytest finds this file: without a debug build, its tests fail.
"""

from __future__ import annotations

import ctypes
import importlib
import signal
import subprocess
import sys
from pathlib import Path

import dist2
from dist2.operation import runner

ROOT = Path(__file__).parents[2]
BUILD = ROOT / "build/debug/lib"

LEAK = """
from ctypes import POINTER, PYFUNCTYPE, c_char_p, c_ssize_t, c_void_p, byref, py_object
import refnanny
INCREF, DECREF, GOTREF, GIVEREF, SETUP, FINISH = (c_void_p * 6).from_address(refnanny.RefNannyAPI)
context = c_void_p(PYFUNCTYPE(c_void_p, c_char_p, c_ssize_t, c_char_p)(SETUP)(b"leaks", 1, b"leaks.pyx"))
PYFUNCTYPE(None, c_void_p, py_object, c_ssize_t)(GOTREF)(context, object(), 7)
PYFUNCTYPE(None, POINTER(c_void_p))(FINISH)(byref(context))
"""
"""A function that gets a reference and loses it, as generated C tells refnanny."""

USE_AFTER_FREE = """
from ctypes import CDLL, c_size_t, c_void_p
allocator = CDLL(None)
allocator.malloc.restype, allocator.malloc.argtypes = c_void_p, [c_size_t]
allocator.free.argtypes = allocator.puts.argtypes = [c_void_p]
at = allocator.malloc(64)
allocator.free(at)
allocator.puts(at)
"""


def ended(program: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=50)


def test_every_extension_is_built_with_the_checks() -> None:
    """The names are those of what generated C calls; each extension is the one that would be imported."""
    assert Path(dist2.__file__).parent == BUILD / "dist2"
    source = ROOT / "dist2"
    pure = [each for each in source.rglob("*.py") if each.with_suffix(".pxd").exists()]
    built = list(BUILD.rglob("*.so"))
    assert len(built) == len([*source.rglob("*.pyx"), *pure])
    for each in built:
        content = each.read_bytes()
        for name in (b"Cython.Runtime.refnanny", b"__asan_report_load8", b"__ubsan_handle"):
            assert name in content, (each, name)


def test_the_extensions_in_use_are_those() -> None:
    assert Path(runner.__file__).parent == BUILD / "dist2/operation"
    assert "refnanny" in sys.modules
    assert importlib.import_module("refnanny").__file__ == str(Path(__file__).with_name("refnanny.py"))
    assert hasattr(ctypes.CDLL(None), "__asan_init")


def test_a_wrong_reference_count_ends_the_process() -> None:
    done = ended(LEAK)
    assert done.returncode == -signal.SIGABRT, done
    assert "REFNANNY: References leaked" in done.stderr


def test_a_use_of_freed_memory_ends_the_process() -> None:
    done = ended(USE_AFTER_FREE)
    assert "heap-use-after-free" in done.stderr
    assert done.returncode != 0
