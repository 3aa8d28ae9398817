"""Runs smolagents agents as they are, for toolbrain.

>>> from toolbrain_smolagents import compact_prompts
>>> agent = CodeAgent(tools=[price], model=model, prompt_templates=compact_prompts())
"""

from __future__ import annotations

from typing import Any

__all__ = ["SmolagentsAdapter", "compact_prompts"]


def __getattr__(name: str) -> Any:
    """Public names, imported on first use: smolagents takes seconds."""
    if name == "compact_prompts":
        from .prompts import compact_prompts

        return compact_prompts
    if name == "SmolagentsAdapter":
        from .adapter import SmolagentsAdapter

        return SmolagentsAdapter
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
