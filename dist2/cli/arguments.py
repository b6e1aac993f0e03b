"""Arguments of the commands: lists with commas, sizes, numbers; Ctrl-C; and the report of users' errors."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from math import isnan
from pathlib import Path

import click

from dist2.cli.bench.sizes import parse_size

INTERRUPTED = 130
"""Exit code of a command ended by Ctrl-C, as shells have it."""

Callback = Callable[[click.Context, click.Parameter, str | None], list[str] | None]


def comma_list(choices: Iterable[str]) -> Callback:
    """Return the callback of an option that takes some of the choices, with commas between them.

    It raises `click.BadParameter` for an unknown choice, or none at all.
    """
    known = tuple(choices)

    def split(_context: click.Context, _option: click.Parameter, text: str | None) -> list[str] | None:
        if text is None:
            return None
        found = [each.strip() for each in text.split(",") if each.strip()]
        if not found:
            raise click.BadParameter("it is empty")
        for each in found:
            if each not in known:
                raise click.BadParameter(f"{each!r} is none of {', '.join(known)}")
        return list(dict.fromkeys(found))

    return split


def sizes(_context: click.Context, _option: click.Parameter, text: str | None) -> list[int] | None:
    """Return the bytes of sizes with commas between them. A callback.

    Raises:
        click.BadParameter: One is no size, or too small for a float32.
    """
    if text is None:
        return None
    try:
        found = [parse_size(each) for each in text.split(",")]
    except ValueError as error:
        raise click.BadParameter(str(error)) from error
    for nbytes in found:
        if nbytes < 4:
            raise click.BadParameter(f"{nbytes} bytes are too few: a float32 takes 4")
    return list(dict.fromkeys(found))


def number(_context: click.Context, _option: click.Parameter, value: float | None) -> float | None:
    """Return a number unless it is "nan", which lies outside of no range. A callback.

    Raises:
        click.BadParameter: It is none.
    """
    if value is not None and isnan(value):
        raise click.BadParameter(f"{value} is not a number")
    return value


def make_folder(folder: Path, option: str) -> None:
    """Make the folder that results go to: before they are measured, which takes long.

    Raises:
        click.BadParameter: It cannot be made, or no file in it.
    """
    hint = f"'{option}'"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise click.BadParameter(
            f"{str(folder)!r} cannot be made: {error.strerror}", param_hint=hint
        ) from error
    try:
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise click.BadParameter(
            f"nothing can be written in {str(folder)!r}: {error.strerror}", param_hint=hint
        ) from error


def until_ctrl_c(measure: Callable[[], object], has_found: Callable[[], bool]) -> bool:
    """Measure; return whether Ctrl-C ended it after there were results to show."""
    try:
        measure()
    except KeyboardInterrupt:
        if not has_found():
            raise
        return True
    return False


@contextmanager
def told(*kinds: type[Exception]) -> Iterator[None]:
    """End the command with the message of an error that the user can do something about."""
    try:
        yield
    except kinds as error:
        raise click.ClickException(str(error)) from error
