"""The names that this plugin adds."""

from __future__ import annotations

from typing import TYPE_CHECKING

from toolbrain_core.hookspecs import hookimpl

if TYPE_CHECKING:
    from toolbrain_core.registry import Registry


@hookimpl
def toolbrain_register_rewards(registry: Registry) -> None:
    """`hello`: pays for an answer that greets."""
    registry.add("hello", "toolbrain_hello.rewards:reward_hello")
