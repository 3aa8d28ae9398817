"""Hook implementations; imports nothing heavy."""

from __future__ import annotations

from typing import TYPE_CHECKING

from toolbrain_core.hookspecs import hookimpl

if TYPE_CHECKING:
    import click

    from toolbrain_core.registry import Registry


@hookimpl
def toolbrain_register_policies(registry: Registry) -> None:
    registry.add("transformers", "toolbrain_transformers.policy:TransformersPolicy")


@hookimpl
def toolbrain_register_samplers(registry: Registry) -> None:
    registry.add("in-process", "toolbrain_transformers.sampler:InProcessSampler")


@hookimpl
def toolbrain_register_commands(cli: click.Group) -> None:
    from .commands import model

    cli.add_command(model)
