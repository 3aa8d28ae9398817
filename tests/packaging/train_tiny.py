"""Trains a tiny random model through core, smolagents and GRPO, as a user would.

usage: train_tiny.py TOKENIZER_DIR WORK_DIR

The reward is the share of sampled tokens with an even id: it varies from attempt to attempt, and
says nothing about whether the agent could parse what the model wrote. Exits with an assertion error
unless the adapter changed and the mean reward rose; prints the figures as JSON.
"""

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file
from smolagents import CodeAgent, TransformersModel, tool
from toolbrain_smolagents import compact_prompts
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

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


def make_model(tokenizer_dir: Path, model_dir: Path) -> None:
    """A random two-layer Llama with a real tokenizer, saved to `model_dir`."""
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_dir)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        tie_word_embeddings=False,
    )
    model = LlamaForCausalLM(config)
    # Wide enough that a few tokens hold most of the probability: LoRA leaves the head alone, and
    # over a flat distribution of 49,152 tokens it could not move the share of any of them.
    torch.nn.init.normal_(model.lm_head.weight, std=0.5)
    model.save_pretrained(model_dir)
    tokenizer.save_pretrained(model_dir)


def reward_even(trace) -> float:
    """The share of sampled tokens with an even id."""
    ids = [token for turn in trace.turns for token in turn.completion_ids]
    return sum(token % 2 == 0 for token in ids) / max(len(ids), 1)


def main(tokenizer_dir: Path, work: Path) -> None:
    make_model(tokenizer_dir, work / "model")
    model = TransformersModel(model_id=str(work / "model"), device_map="cpu", max_new_tokens=16)
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
    main(Path(sys.argv[1]), Path(sys.argv[2]))
