"""Real parts: a tiny random Llama with SmolLM2's tokenizer in a real CodeAgent, and a recorder of
what the optimiser gets."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from smolagents import CodeAgent, LogLevel, TransformersModel, tool
from toolbrain_smolagents import compact_prompts
from torch.optim.optimizer import register_optimizer_step_pre_hook

from toolbrain_core import Brain


@tool
def add(a: int, b: int) -> int:
    """Adds two numbers.

    Args:
        a: The first number.
        b: The second number.
    """
    return a + b


def even_share(trace: Any) -> float:
    """The share of sampled tokens with an even id: differs from attempt to attempt."""
    ids = [token for turn in trace.turns for token in turn.completion_ids]
    return sum(token % 2 == 0 for token in ids) / max(len(ids), 1)


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
    """A Brain with GRPO of 4 attempts at one task a step. `agent` are options of the agent."""

    def make(agent: dict[str, Any] | None = None, **options: Any) -> Brain:
        defaults = {
            "algorithm": "grpo",
            "reward_func": even_share,
            "attempts": 4,
            "tasks_per_step": 1,
            "learning_rate": 1e-2,
            "probe": False,
            "progress": False,
            "run_dir": tmp_path / "runs",
        }
        return Brain(make_agent(**(agent or {})), **{**defaults, **options})

    return make


@pytest.fixture
def tasks() -> Callable[[int], list[dict[str, Any]]]:
    return lambda n: [
        {"query": f"What is {a} + {a + 1}?", "gold_answer": 2 * a + 1} for a in range(n)
    ]


class Updates:
    """What each optimiser step of a model got: `gradients[k]`, and the weights before it."""

    def __init__(self, model: Any):
        self.model = model
        self.gradients: list[dict[str, Any]] = []
        self.weights: list[dict[str, Any]] = []

    def note(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        named = dict(self.model.named_parameters())
        own = {id(p) for p in named.values()}
        if id(optimizer.param_groups[0]["params"][0]) not in own:
            return  # the hook is torch's, for every optimiser
        self.gradients.append({n: p.grad.clone() for n, p in named.items() if p.grad is not None})
        self.weights.append({n: p.detach().clone() for n, p in named.items()})


@pytest.fixture
def watch() -> Iterator[Callable[[Any], Updates]]:
    """`watch(model)` records its optimiser steps from now on."""
    handles = []

    def start(model: Any) -> Updates:
        updates = Updates(model)
        hook = register_optimizer_step_pre_hook(updates.note)
        handles.append(hook)
        return updates

    yield start
    for handle in handles:
        handle.remove()
