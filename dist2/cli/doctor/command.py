"""``dist2 doctor`` in the list of commands; its arguments are read by `dist2.cli.doctor.main`."""

from __future__ import annotations

import sys

import click


@click.command(context_settings={"ignore_unknown_options": True, "help_option_names": []})
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def doctor(arguments: tuple[str, ...]) -> None:
    """Check this machine and environment: cores, shared memory, limits, network, versions, variables."""
    from dist2.cli.doctor import main

    sys.exit(main(arguments))
