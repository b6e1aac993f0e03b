"""The commands by name: those of dist2, and those that installed packages bring.

A package that builds on dist2, such as `observability`, names its commands as entry points of the group
``dist2.commands``. Each command is loaded when it is called: `bench` needs packages that the others do not.
"""

from __future__ import annotations

import sys
from importlib.metadata import entry_points

import click

ENTRY_POINT_GROUP = "dist2.commands"


class _Commands(click.Group):
    """The commands of dist2, and of other packages."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted({"bench", *super().list_commands(ctx), *entry_points(group=ENTRY_POINT_GROUP).names})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name == "bench":
            from dist2.cli.bench.command import bench

            return bench
        known = super().get_command(ctx, cmd_name)
        if known is not None:
            return known
        found = [point.load() for point in entry_points(group=ENTRY_POINT_GROUP, name=cmd_name)]
        return next((each for each in found if isinstance(each, click.Command)), None)


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="dist2", message="dist2 %(version)s")
def cli() -> None:
    """Commands of dist2."""


@cli.command(context_settings={"ignore_unknown_options": True, "help_option_names": []})
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def doctor(arguments: tuple[str, ...]) -> None:
    """Check this machine and environment: cores, shared memory, limits, network, versions, variables."""
    from dist2.cli.doctor import main  # which reads the arguments

    sys.exit(main(arguments))
