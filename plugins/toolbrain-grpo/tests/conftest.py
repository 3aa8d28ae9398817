"""A Brain that trains the tiny agent with GRPO, and a recorder of what the optimiser gets."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from torch.optim.optimizer import register_optimizer_step_pre_hook

from toolbrain_core import Brain, PluginManager


def even_share(trace: Any) -> float:
    """The share of sampled tokens with an even id: differs from attempt to attempt."""
    ids = [token for turn in trace.turns for token in turn.completion_ids]
    return sum(token % 2 == 0 for token in ids) / max(len(ids), 1)


@pytest.fixture
def make_brain(
    make_agent: Callable[..., Any], trainers: PluginManager, tmp_path: Path
) -> Callable[..., Brain]:
    """A Brain with GRPO of 4 attempts at one task a step. `agent` are options of the agent."""

    def make(agent: dict[str, Any] | None = None, **options: Any) -> Brain:
        defaults = {
            "algorithm": "grpo",
            "dtype": "fp32",  # exact on every machine
            "reward_func": even_share,
            "attempts": 4,
            "tasks_per_step": 1,
            "learning_rate": 1e-2,
            "probe": False,
            "progress": False,
            "run_dir": tmp_path / "runs",
            "plugins": trainers,
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
