"""The commands by name."""

from __future__ import annotations

import click

from dist2.cli.bench import bench
from dist2.cli.tune import tune


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="dist2", message="dist2 %(version)s")
def cli() -> None:
    """Measure dist2 on this machine, and fit it to it."""


cli.add_command(bench)
cli.add_command(tune)
