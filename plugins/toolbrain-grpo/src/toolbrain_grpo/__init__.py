"""GRPO on TRL's trainer, with rollouts of the user's own agent."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .algorithm import Grpo

__all__ = ["Grpo"]


def __getattr__(name: str) -> Any:
    if name == "Grpo":
        from .algorithm import Grpo

        return Grpo
    raise AttributeError(name)
