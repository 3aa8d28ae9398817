"""Real parts: a tiny random Llama with SmolLM2's tokenizer in a real CodeAgent."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from smolagents import CodeAgent, LogLevel, TransformersModel, tool
from toolbrain_smolagents import compact_prompts

from toolbrain_core import Brain


@tool
def add(a: int, b: int) -> int:
    """Adds two numbers.

    Args:
        a: The first number.
        b: The second number.
    """
    return a + b


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    from toolbrain_transformers.embedded import embedded_model_path
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(embedded_model_path())


@pytest.fixture(scope="session")
def model_dir(tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random two-layer Llama whose next token is far from uniform."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("tiny-llama")
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=tokenizer.bos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = LlamaForCausalLM(config)
    torch.nn.init.normal_(model.lm_head.weight, std=0.5)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def make_agent(model_dir: Path) -> Callable[..., CodeAgent]:
    """A CodeAgent on a freshly loaded model: `max_steps` 1, 8 tokens a turn, greedy in use."""

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


@pytest.fixture
def make_brain(make_agent: Callable[..., CodeAgent], tmp_path: Path) -> Callable[..., Brain]:
    """A Brain with SFT. `agent` are options of the agent."""

    def make(agent: dict[str, Any] | None = None, **options: Any) -> Brain:
        defaults = {"algorithm": "sft", "progress": False, "run_dir": tmp_path / "runs"}
        return Brain(make_agent(**(agent or {})), **{**defaults, **options})

    return make
