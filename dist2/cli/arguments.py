"""What commands take: lists with commas, sizes; and how errors of the user's are told."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import click

from dist2.bench.sizes import parse_size

Callback = Callable[[click.Context, click.Parameter, str | None], list[str] | None]


def comma_list(choices: Iterable[str]) -> Callback:
    """Return the callback of an option that takes some of the choices, with commas between them.

    It raises `click.BadParameter` where one is unknown or there is none.
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
    if min(found) < 4:
        raise click.BadParameter("a float32 takes 4 bytes")
    return list(dict.fromkeys(found))


def make_folder(folder: Path, option: str) -> None:
    """Make the folder that results go to: before they are measured, which takes long.

    Raises:
        click.BadParameter: It cannot be made, or nothing can be written in it.
    """
    hint = f"'{option}'"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise click.BadParameter(
            f"{str(folder)!r} cannot be made: {error.strerror}", param_hint=hint
        ) from error
    if not os.access(folder, os.W_OK):
        raise click.BadParameter(f"{str(folder)!r} cannot be written to", param_hint=hint)


@contextmanager
def told(*kinds: type[Exception]) -> Iterator[None]:
    """End the command with the message of an error that the user can do something about."""
    try:
        yield
    except kinds as error:
        raise click.ClickException(str(error)) from error
