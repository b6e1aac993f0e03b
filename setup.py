"""Builds the extensions of dist2, which are required: the hot path is in C and Cython.

Each `.pyx` is compiled, and each `.py` with a `.pxd` beside it (Cython's pure Python mode: the `.pxd` has
the C types). The first lines of a `.pyx` name the files of `dist2/core`, plain C, that it binds. Generated C
stays below `build/`.
"""

import os
from pathlib import Path

from Cython.Build import cythonize
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import BaseError, CCompilerError

CORE = Path("dist2/core")
HEADERS = sorted(map(str, CORE.glob("*.h")))

FLAGS = [
    "-std=gnu11",
    "-O3",
    "-fvisibility=hidden",
    "-ffp-contract=off",  # the same sums on every processor
    "-g0",  # half of the time, and a tenth of the size
]

LINK_FLAGS = ["-Wl,--strip-debug"]  # Python's own flags ask for debug information: two thirds of the file

SANITIZERS = "-fsanitize=address,undefined"
DEBUG_FLAGS = [
    "-O1",
    "-g",
    "-UNDEBUG",
    "-DCYTHON_REFNANNY=1",  # generated code counts the references that each function takes and gives
    "-fno-omit-frame-pointer",
    SANITIZERS,
    "-fno-sanitize-recover=undefined",
]
"""Of `build --debug`, see `make debug-test`: they follow, and so override, `FLAGS`."""

WAYS_OUT = """
dist2 was not installed: its extensions could not be compiled. There are three ways out:
* install a C compiler and the headers of Python (Debian: apt install gcc python3-dev), then dist2 again;
* use the compiler on the package index: pip install ziglang setuptools cython, then
  CC="python -m ziglang cc" pip install --no-build-isolation dist2 (or the folder of its sources);
* install a wheel built on another machine with a compiler: pip wheel --no-deps dist2.
"""


class BuildExtension(build_ext):
    """Compiles on all cores, and names the ways out if the compiler is missing or fails."""

    def finalize_options(self):
        super().finalize_options()
        self.parallel = self.parallel or os.cpu_count()

    def build_extension(self, ext):
        if self.debug:
            ext.extra_compile_args, ext.extra_link_args = [*FLAGS, *DEBUG_FLAGS], [SANITIZERS]
        try:
            super().build_extension(ext)
        except (BaseError, CCompilerError, OSError) as error:
            raise SystemExit(f"error: {error}\n{WAYS_OUT}") from error


def in_cython():
    """Return an extension for each module in Cython."""
    pure = [each for each in Path("dist2").rglob("*.py") if each.with_suffix(".pxd").exists()]
    modules = [*Path("dist2").rglob("*.pyx"), *pure]
    return [
        Extension(
            ".".join(each.with_suffix("").parts),
            sources=[str(each)],
            depends=HEADERS,
            include_dirs=[str(CORE)],
            extra_compile_args=FLAGS,
            extra_link_args=LINK_FLAGS,
        )
        for each in sorted(modules)
    ]


setup(
    cmdclass={"build_ext": BuildExtension},
    ext_modules=cythonize(in_cython(), build_dir="build/cython", language_level=3, quiet=True),
)
