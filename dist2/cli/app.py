"""The commands by name."""

from __future__ import annotations

import click

from dist2.cli.bench.command import bench
from dist2.compiled import language


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="dist2", message=f"dist2 %(version)s, hot path in {language()}")
def cli() -> None:
    """Commands of dist2."""


cli.add_command(bench)
