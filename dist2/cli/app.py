"""The commands by name."""

from __future__ import annotations

import click

from dist2.cli.bench import bench
from dist2.cli.tune import tune
from dist2.compiled import language


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="dist2", message=f"dist2 %(version)s, hot path in {language()}")
def cli() -> None:
    """Measure dist2 on this machine, and fit it to it."""


cli.add_command(bench)
cli.add_command(tune)
