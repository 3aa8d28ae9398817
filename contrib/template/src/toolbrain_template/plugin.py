"""Hook implementations, and nothing else: no heavy imports here."""

from __future__ import annotations

from typing import TYPE_CHECKING

from toolbrain_core.hookspecs import hookimpl

if TYPE_CHECKING:
    from toolbrain_core.registry import Registry


@hookimpl
def toolbrain_unavailable() -> str | None:
    """Why this plugin cannot work on this machine, or None. Remove it if it works everywhere."""
    return None


@hookimpl
def toolbrain_register_rewards(registry: Registry) -> None:
    """`Brain(agent, reward_func="template")`."""
    registry.add("template", "toolbrain_template.rewards:reward_template")
