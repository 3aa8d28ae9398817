"""Supervised fine-tuning on TRL's trainer, on exact rows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .algorithm import Sft

__all__ = ["Sft"]


def __getattr__(name: str) -> Any:
    if name == "Sft":
        from .algorithm import Sft

        return Sft
    raise AttributeError(name)
