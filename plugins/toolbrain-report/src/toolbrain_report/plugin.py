"""The hooks of toolbrain-report: a command, and a plot at the end of every run."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from toolbrain_core.hookspecs import hookimpl

if TYPE_CHECKING:
    import click

    from toolbrain_core.runs import Run, TrainResult

logger = logging.getLogger(__name__)


@hookimpl
def toolbrain_register_commands(cli: click.Group) -> None:
    from .commands import report

    cli.add_command(report)


@hookimpl
def toolbrain_run_finished(run: Run, result: TrainResult | None) -> None:
    from toolbrain_core.report import read_metrics

    if not read_metrics(run.directory.path):
        logger.info("no learning curve: %s has no metrics yet", run.directory.path)
        return
    from .plots import plot_learning_curve

    plot_learning_curve(run.directory.path)
