"""The tiny agent that the tests of several plugins train."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from toolbrain_core import PluginManager


@pytest.fixture(scope="session")
def trainers() -> PluginManager:
    """The plugins that train the tiny agent, without the one that plots each run at its end."""
    from toolbrain_grpo import plugin as grpo
    from toolbrain_sft import plugin as sft
    from toolbrain_smolagents import plugin as smolagents
    from toolbrain_transformers import plugin as transformers

    return PluginManager.with_plugins(grpo, sft, smolagents, transformers)


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    """SmolLM2's tokenizer, whose pad token is its end-of-sequence token. Not to be changed."""
    from toolbrain_transformers.testing import tiny_tokenizer

    return tiny_tokenizer()


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Llama with its tokenizer, whose next token is far from uniform."""
    from toolbrain_transformers.testing import save_tiny_model

    return save_tiny_model(tmp_path_factory.mktemp("tiny-llama"))


@pytest.fixture
def make_agent(model_dir: Path) -> Callable[..., Any]:
    """A CodeAgent on a freshly loaded model: `max_steps` 1, 8 tokens a turn, greedy in use."""
    from smolagents import CodeAgent, LogLevel, TransformersModel, tool
    from toolbrain_smolagents import compact_prompts

    @tool
    def add(a: int, b: int) -> int:
        """Adds two numbers.

        Args:
            a: The first number.
            b: The second number.
        """
        return a + b

    def make(max_new_tokens: int = 8, **options: Any) -> CodeAgent:
        model = TransformersModel(
            model_id=str(model_dir),
            device_map="cpu",
            max_new_tokens=max_new_tokens,
            do_sample=False,
        )
        options = {"tools": [add], "max_steps": 1, **options}
        return CodeAgent(
            model=model,
            prompt_templates=compact_prompts(),
            verbosity_level=LogLevel.OFF,
            **options,
        )

    return make
