"""A Brain that trains the tiny agent with SFT."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from toolbrain_core import Brain, PluginManager


@pytest.fixture
def make_brain(
    make_agent: Callable[..., Any], trainers: PluginManager, tmp_path: Path
) -> Callable[..., Brain]:
    """A Brain with SFT. `agent` are options of the agent."""

    def make(agent: dict[str, Any] | None = None, **options: Any) -> Brain:
        defaults = {
            "algorithm": "sft",
            "dtype": "fp32",  # exact on every machine
            "progress": False,
            "run_dir": tmp_path / "runs",
            "plugins": trainers,
        }
        return Brain(make_agent(**(agent or {})), **{**defaults, **options})

    return make
