"""`toolbrain report RUN_DIR`."""

from __future__ import annotations

from pathlib import Path

import click


@click.command()
@click.argument("run_dir", type=click.Path(file_okay=False, path_type=Path))
def report(run_dir: Path) -> None:
    """Write report.md, report.json and learning_curve.png of RUN_DIR again.

    Works while the run still goes on.
    """
    from toolbrain_core.report import read_metrics, write_report

    click.echo(write_report(run_dir))
    if not read_metrics(run_dir):
        click.echo("no learning curve: the run has no metrics yet", err=True)
        return
    from .plots import plot_learning_curve

    click.echo(plot_learning_curve(run_dir))
