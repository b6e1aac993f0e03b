"""Builds the extension of dist2, which is required: the hot path is in C. pyproject.toml has the rest."""

from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import BaseError, CCompilerError

SOURCE = Path("dist2/compiled/source")

WAYS_OUT = """
dist2 was not installed: its extension in C could not be compiled. There are three ways out:
* install a C compiler and the headers of Python (Debian: apt install gcc python3-dev), then dist2 again;
* use the compiler on the package index: pip install ziglang setuptools, then
  CC="python -m ziglang cc" pip install --no-build-isolation dist2 (or the folder of its sources);
* install a wheel built on another machine with a compiler: pip wheel --no-deps dist2.
"""


class BuildExtension(build_ext):
    """Names the ways out if the compiler is missing or fails."""

    def build_extension(self, ext):
        try:
            super().build_extension(ext)
        except (BaseError, CCompilerError, OSError) as error:
            raise SystemExit(f"error: {error}\n{WAYS_OUT}") from error


setup(
    cmdclass={"build_ext": BuildExtension},
    ext_modules=[
        Extension(
            "dist2.compiled._native",
            sources=sorted(map(str, SOURCE.rglob("*.c"))),
            depends=sorted(map(str, SOURCE.rglob("*.h"))),
            include_dirs=[str(SOURCE)],
            extra_compile_args=[
                "-std=gnu11",
                "-O3",
                "-fvisibility=hidden",
                "-ffp-contract=off",  # the same sums on every processor
                "-Wall",
                "-Wextra",
            ],
        )
    ],
)
