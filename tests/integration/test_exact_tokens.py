"""What is trained is what was sampled, to the token: real agents on the embedded model in fp32."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from smolagents import CodeAgent, LogLevel, ToolCallingAgent, TransformersModel, tool
from toolbrain_smolagents import compact_prompts
from toolbrain_transformers.embedded import embedded_model_path

from toolbrain_core import Brain, Sampling, Task, Trace
from toolbrain_core.rollouts import Rollouts


@tool
def price(item: str) -> float:
    """Price of one item in euros.

    Args:
        item: Name of the item.
    """
    return {"mug": 6.5}.get(item, 1.0)


@pytest.fixture(scope="module", params=["code", "toolcalling"])
def traces(request: pytest.FixtureRequest) -> tuple[Brain, list[Trace]]:
    """Eight attempts of three steps each, sampled at temperature 1."""
    model = TransformersModel(str(embedded_model_path()), max_new_tokens=20, do_sample=False)
    kind: Any = CodeAgent if request.param == "code" else ToolCallingAgent
    agent = kind(
        [price],
        model,
        prompt_templates=compact_prompts(request.param),
        max_steps=3,
        verbosity_level=LogLevel.OFF,
    )
    brain = Brain(agent, dtype="fp32", progress=False)
    with torch.no_grad():  # an adapter that does something
        for name, parameter in brain.policy.model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.01)
    rollouts = Rollouts(adapter=brain.adapter, policy=brain.policy, agent=agent)
    [group] = rollouts.run(
        [Task("t", "What do 3 mugs cost?")],
        8,
        run_name="exact",
        iteration=0,
        seed=1,
        sampling=Sampling(temperature=1.0, max_new_tokens=20),
    )
    return brain, [rollout.trace for rollout in group.rollouts]


def test_recorded_log_probabilities_are_those_of_a_fresh_forward(
    traces: tuple[Brain, list[Trace]],
) -> None:
    brain, runs = traces
    compared = 0
    for trace in runs:
        for turn in trace.turns:
            ids = torch.tensor([[*turn.prompt_ids, *turn.completion_ids]])
            with torch.no_grad():
                logits = brain.policy.model(input_ids=ids).logits[0].float()
            start = len(turn.prompt_ids)
            fresh = logits.log_softmax(-1)[start - 1 : -1].gather(1, ids[0, start:, None])[:, 0]
            assert torch.allclose(fresh, torch.tensor(turn.logprobs), atol=1e-4)
            compared += len(turn.logprobs)
    assert compared > 100


def test_runs_take_three_turns_that_continue_their_row(traces: tuple[Brain, list[Trace]]) -> None:
    """Of an agent that only appends to its history. Left out is where smolagents does not: its last
    call after max_steps has another system prompt, and it strips white space from what was said."""
    brain, _ = traces
    items = ("mugs", "chairs", "red lamps", "books", "umbrellas", "wooden spoons", "pens", "hats")
    tasks = [Task(item, f"What do 3 {item} cost?") for item in items]
    runs = [group.rollouts[0].trace for group in brain.rollout(tasks, purpose="train")]
    assert all(trace.turns[0].row_break == "first" for trace in runs)
    later = [
        turn
        for trace in runs
        for earlier, turn in pairwise(trace.turns[:3])
        if earlier.text == earlier.text.strip()
    ]
    assert max(len(trace.turns) for trace in runs) >= 3
    assert len(later) >= 8
    assert sum(turn.row_break is None for turn in later) >= 0.9 * len(later), [
        turn.row_break for turn in later
    ]
    for trace in runs:
        trained = sum(sum(row.trained) for row in brain.policy.rows(trace))
        assert trained == sum(len(turn.completion_ids) for turn in trace.turns)
