"""Hooks of toolbrain-smolagents. Imports nothing heavy."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from toolbrain_core.hookspecs import hookimpl

if TYPE_CHECKING:
    from toolbrain_core.registry import Registry


@hookimpl
def toolbrain_register_adapters(registry: Registry) -> None:
    registry.add("smolagents", "toolbrain_smolagents.adapter:SmolagentsAdapter")


@hookimpl
def toolbrain_match_agent(agent: Any) -> tuple[str, type] | None:
    for cls in type(agent).__mro__:
        if cls.__module__.startswith("smolagents.") and cls.__name__ == "MultiStepAgent":
            return "smolagents", cls
    return None
