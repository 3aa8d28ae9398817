"""One GRPO iteration of a CodeAgent: ours against toolbrain 0.1.4 (PyPI).

    python tests/benchmarks/peer_toolbrain.py --peer PYTHON [--attempts 2] [--alone 8] [--new 128]
                                              [--repeats 3]

The agent is that of the peer's README: one tool, one task, the stock prompts, one step (and the
request for a last answer). `--peer` names the Python of an environment that has `toolbrain`, which
runs as it comes, with these exceptions: a chat template that flattens list-shaped content, without
which it has no training data here; no turn ends before `new` tokens at an end-of-sequence token, on
both sides; and a reward that differs between attempts, so that there is always an update. Ours
takes the peer's LoRA, learning rate, KL weight and three optimiser steps on each batch, and
recomputes activations (`gradient_checkpointing=True`). `--alone` is a second group size, of ours
only.
"""

from __future__ import annotations

import argparse
import itertools
import tempfile
import time
from typing import Any

from sides import Measure, Side, measured_in_turn, ours_against, parser, run, running

TASK = {"query": "Use the add tool to calculate 5 + 7", "gold_answer": "12"}

#: SmolLM2's template for content that may be a list of parts.
FLATTENING = """\
{% for message in messages %}<|im_start|>{{ message['role'] }}
{% if message['content'] is string %}{{ message['content'] }}{% else %}\
{% for part in message['content'] %}{{ part['text'] }}{% endfor %}{% endif %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def main() -> None:
    run(parse(), SIDES, compare)


def parse() -> argparse.Namespace:
    made = parser(__doc__ or "")
    made.add_argument("--peer", metavar="PYTHON", required=True, help="the Python that has it")
    made.add_argument("--attempts", type=int, default=2, help="attempts on both sides")
    made.add_argument("--alone", type=int, default=8, help="attempts of ours alone")
    made.add_argument("--new", type=int, default=128, help="tokens sampled in each turn")
    return made.parse_args()


def compare(options: argparse.Namespace) -> dict[str, Any]:
    shapes = {key: getattr(options, key) for key in ("attempts", "alone", "new")}
    with tempfile.TemporaryDirectory() as directory:
        sides = [Side("ours", directory), Side("alone", directory)]
        with running(*sides):  # first: they leave the model's path
            peer = Side("peer", directory, options.peer)
            with running(peer):
                measured = measured_in_turn([*sides, peer], options.repeats)
    alone = measured["alone"]
    return {
        "name": "peer_toolbrain",
        **shapes,
        **ours_against(["peer"], measured),
        "alone_s": alone["median_s"],
        "alone_peak_mb": alone["peak_mb"],
        "sides": measured,
    }


def agent_on(model: Any) -> Any:
    from smolagents import CodeAgent, LogLevel, tool

    @tool  # type: ignore[untyped-decorator]
    def add(a: int, b: int) -> int:
        """Add two integers.

        Args:
            a: First addend.
            b: Second addend.
        """
        return a + b

    return CodeAgent(tools=[add], model=model, max_steps=1, verbosity_level=LogLevel.OFF)


def rising() -> Any:
    """A reward that is larger for each attempt."""
    scores = itertools.count(1)
    return lambda trace, **_: float(next(scores))


def ours(options: argparse.Namespace, attempts: int) -> Measure:
    from smolagents import TransformersModel
    from toolbrain_transformers.embedded import embedded_model_path

    from toolbrain_core import Brain

    path = str(embedded_model_path())
    (options.directory / "model").write_text(path, encoding="utf-8")
    model = TransformersModel(model_id=path, device_map="cpu", max_new_tokens=options.new)
    brain = Brain(
        agent_on(model),
        algorithm="grpo",
        reward_func=rising(),
        attempts=attempts,
        tasks_per_step=1,
        updates_per_batch=3,
        beta=0.04,
        learning_rate=3e-5,
        checkpoint_every=0,
        gradient_checkpointing=True,
        lora={"r": 8, "alpha": 16, "target_modules": ("q_proj", "v_proj")},
        dtype="fp32",  # as the peer computes
        tree="require",
        probe=False,
        progress=False,
        run_dir=options.directory / f"runs-{attempts}",
    )
    brain.policy.eos_ids = frozenset()  # type: ignore[attr-defined]

    def measure(repeat: int) -> dict[str, float]:
        started = time.perf_counter()
        result = brain.train([TASK], name=f"run-{repeat}")
        seconds = time.perf_counter() - started
        assert result.updates == 3, result.warnings
        return {"seconds": seconds, "sampled_tokens": result.metrics["trained_tokens"]}

    return measure


def peer(options: argparse.Namespace) -> Measure:
    from smolagents import TransformersModel
    from toolbrain import Brain

    path = (options.directory / "model").read_text(encoding="utf-8")
    sampled: list[int] = []

    class Counting(TransformersModel):  # type: ignore[misc]
        def generate(self, *arguments: Any, **keywords: Any) -> Any:
            message = super().generate(*arguments, **keywords)
            sampled.append(message.token_usage.output_tokens)
            return message

    model = Counting(
        model_id=path, device_map="cpu", max_new_tokens=options.new, min_new_tokens=options.new
    )
    model.tokenizer.chat_template = FLATTENING
    brain = Brain(
        agent_on(model),
        algorithm="GRPO",
        reward_func=rising(),
        num_group_members=options.attempts,
    )

    def measure(repeat: int) -> dict[str, float]:
        sampled.clear()
        steps = brain.learning_module.training_steps
        started = time.perf_counter()
        brain.train([TASK], num_iterations=1)
        seconds = time.perf_counter() - started
        assert brain.learning_module.training_steps == steps + 1, "the peer made no update"
        return {"seconds": seconds, "sampled_tokens": sum(sampled)}

    return measure


SIDES = {
    "ours": lambda options: ours(options, options.attempts),
    "alone": lambda options: ours(options, options.alone),
    "peer": peer,
}

if __name__ == "__main__":
    main()
