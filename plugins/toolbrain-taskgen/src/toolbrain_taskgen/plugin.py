"""The hooks of toolbrain-taskgen: a task generator, and a command."""

from __future__ import annotations

from typing import TYPE_CHECKING

from toolbrain_core.hookspecs import hookimpl

if TYPE_CHECKING:
    import click

    from toolbrain_core.registry import Registry


@hookimpl
def toolbrain_register_task_generators(registry: Registry) -> None:
    registry.add("plans", "toolbrain_taskgen.generator:PlanGenerator")


@hookimpl
def toolbrain_register_commands(cli: click.Group) -> None:
    from .commands import tasks

    cli.add_command(tasks)
