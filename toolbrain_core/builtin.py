"""What the core itself provides, registered through the hooks that every plugin uses."""

from __future__ import annotations

from .hookspecs import hookimpl
from .registry import Registry


@hookimpl
def toolbrain_register_rewards(registry: Registry) -> None:
    """The rewards of `toolbrain_core.rewards`."""
    registry.add("exact-match", "toolbrain_core.rewards:reward_exact_match")
    registry.add("tool-execution-success", "toolbrain_core.rewards:reward_tool_execution_success")
    registry.add("step-efficiency", "toolbrain_core.rewards:reward_step_efficiency")
