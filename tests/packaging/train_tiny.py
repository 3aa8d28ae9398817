"""Trains a tiny random model through core, smolagents and GRPO, as a user would.

usage: train_tiny.py WORK_DIR

The reward is the share of sampled tokens with an even id: it varies from attempt to attempt, and
says nothing about whether the agent could parse what the model wrote. Exits with an assertion error
unless the adapter changed and the mean reward rose; prints the figures as JSON.
"""

import json
import sys
from pathlib import Path

from safetensors.torch import load_file
from smolagents import CodeAgent, TransformersModel, tool
from toolbrain_smolagents import compact_prompts
from toolbrain_transformers.testing import save_tiny_model

from toolbrain_core import Brain
from toolbrain_core.traces import read_rollouts


@tool
def add(a: int, b: int) -> int:
    """Adds two numbers.

    Args:
        a: The first number.
        b: The second number.
    """
    return a + b


def reward_even(trace) -> float:
    """The share of sampled tokens with an even id."""
    ids = [token for turn in trace.turns for token in turn.completion_ids]
    return sum(token % 2 == 0 for token in ids) / max(len(ids), 1)


def main(work: Path) -> None:
    folder = save_tiny_model(work / "model")
    model = TransformersModel(model_id=str(folder), device_map="cpu", max_new_tokens=16)
    agent = CodeAgent(model=model, tools=[add], max_steps=1, prompt_templates=compact_prompts())
    tasks = [{"query": f"What is {a} + {a + 1}?", "gold_answer": 2 * a + 1} for a in range(4)]

    brain = Brain(agent, algorithm="GRPO", reward_func=reward_even, run_dir=work / "runs")
    result = brain.train(tasks, num_iterations=6, attempts=8, learning_rate=1e-2)
    brain.save(work / "saved")

    scores = [rollout.reward.score for rollout in read_rollouts(result.run_dir / "rollouts.jsonl")]
    part = len(scores) // 4
    first, last = sum(scores[:part]) / part, sum(scores[-part:]) / part
    weights = load_file(work / "saved" / "adapter_model.safetensors")
    moved = [name for name, w in weights.items() if "lora_B" in name and w.abs().max() > 0]

    print(json.dumps({"updates": result.updates, "first": first, "last": last}))
    assert result.updates > 0, result
    assert moved, "every LoRA B matrix is still zero: the adapter did not change"
    assert last > first + 0.1, f"the mean reward went from {first:.3f} to {last:.3f}"


if __name__ == "__main__":
    main(Path(sys.argv[1]))
