"""How our time and peak memory grow with group size, length of the prompt and number of turns.

    python tests/benchmarks/scaling.py [--new 64] [--dtype fp32|bf16] [--plot FILE] [--repeats 3]

Each shape has a process of its own, which alternates rollouts and updates: the attempts, in threads
of their own, sample `new` tokens a turn and call a tool that keeps a CPU busy for a while between
two turns; then GRPO's loss, its gradients and AdamW's step change the LoRA that the next rollouts
sample with. Activations are recomputed (`gradient_checkpointing=True`), since memory is measured
too. `fit` is the straight line of update time over distinct tokens, with its R².
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from statistics import correlation, linear_regression, median
from typing import Any, NamedTuple

from prompts import observation_ids, prompt_ids
from sides import Measure, Side, forget_peak, parser, peak_mb, running, serve


class Shape(NamedTuple):
    """Attempts, tokens of the prompt, turns of each attempt."""

    group: int = 8
    prompt: int = 1800
    turns: int = 1

    def __str__(self) -> str:
        return "/".join(map(str, self))


#: What varies, one thing at a time from the first shape on.
VARIED: dict[str, tuple[Shape, ...]] = {
    "group": tuple(Shape(group=n) for n in (2, 4, 8, 16, 32)),
    "prompt": tuple(Shape(prompt=n) for n in (250, 1000, 1800, 4000)),
    "turns": tuple(Shape(turns=n) for n in (1, 3, 5)),
}

Row = Mapping[str, Any]


def main() -> None:
    options = parse()
    if options.side:
        serve(partial(side, options))
        return
    shapes = sorted({shape for shapes in VARIED.values() for shape in shapes})
    rows = {shape: measured(shape, options.repeats) for shape in shapes}
    if options.plot:
        plot(rows, options.plot)
    print(json.dumps({"name": "scaling", "new": options.new, "dtype": options.dtype, **of(rows)}))


def parse() -> argparse.Namespace:
    made = parser(__doc__ or "")
    made.add_argument("--new", type=int, default=64, help="tokens sampled in each turn")
    made.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32")
    made.add_argument("--plot", type=Path, metavar="FILE", help="draw the table (PNG or SVG)")
    return made.parse_args()


def measured(shape: Shape, repeats: int) -> Row:
    """Medians, in seconds, and the peaks of memory of rollout and update."""
    with tempfile.TemporaryDirectory() as directory:
        child = Side(str(shape), directory)
        with running(child):
            answers = [child.measure(repeat) for repeat in range(repeats)]
    row = {
        **shape._asdict(),
        "tokens": answers[-1]["tokens"],
        **{key: round(median(a[key] for a in answers), 3) for key in ("rollout_s", "update_s")},
        **{key: max(a[key] for a in answers) for key in ("rollout_peak_mb", "update_peak_mb")},
    }
    print(json.dumps(row), file=sys.stderr, flush=True)
    return row


def of(rows: Mapping[Shape, Row]) -> dict[str, Any]:
    """The table, the fit, and the two comparisons of group sizes."""
    tokens = [row["tokens"] for row in rows.values()]
    seconds = [row["update_s"] for row in rows.values()]
    line = linear_regression(tokens, seconds)
    eight, sixteen, most = (rows[Shape(group=n)] for n in (8, 16, 32))
    return {
        "rows": list(rows.values()),
        "fit": {
            "ms_per_token": round(1000 * line.slope, 3),
            "intercept_s": round(line.intercept, 3),
            "r2": round(correlation(tokens, seconds) ** 2, 4),
        },
        "group_16_over_8": {
            key: round(sixteen[f"{key}_s"] / eight[f"{key}_s"], 3) for key in ("rollout", "update")
        },
        "update_peak_32_over_8": round(most["update_peak_mb"] / eight["update_peak_mb"], 3),
    }


# One shape ------------------------------------------------------------------------------------


def side(options: argparse.Namespace) -> Measure:
    import torch
    from policies import backward_of, grpo_trainer, load_policy
    from toolbrain_grpo.algorithm import Grpo
    from toolbrain_grpo.batches import WeightedRow, micro_batches

    from toolbrain_core.traces import Sampling, Turn

    shape = Shape(*map(int, options.side.split("/")))
    policy = load_policy(options.dtype)
    settings = Grpo(attempts=shape.group, gradient_checkpointing=True)
    trainer = grpo_trainer(policy, settings, options.directory)
    trained = [p for p in policy.model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-5, weight_decay=0.0)
    sampling = Sampling(temperature=1.0, max_new_tokens=options.new)

    def attempt(prompt: Sequence[int], number: int) -> list[Turn]:
        turns: list[Turn] = []
        ids = tuple(prompt)
        for turn in range(shape.turns):
            seed = shape.turns * number + turn
            got = policy.sampler.generate(ids, sampling, seed).result()
            turns.append(Turn((), "", ids, got.ids, got.logprobs, got.finish_reason, sampling))
            if turn + 1 < shape.turns:
                busy_tool()
                ids = (*ids, *got.ids, *observation_ids(policy.tokenizer, number, turn))
        return turns

    def rollout(repeat: int) -> list[list[Turn]]:
        prompt = prompt_ids(policy.tokenizer, shape.prompt, repeat)
        policy.model.eval()
        with policy.serving(), ThreadPoolExecutor(shape.group) as threads:
            return list(threads.map(partial(attempt, prompt), range(shape.group)))

    def update(rows: list[WeightedRow]) -> None:
        pieces = trainer._pieces_of(
            micro_batches([rows], settings.max_tokens_per_step, policy.cost_of)
        )
        backward_of(trainer, pieces)
        optimizer.step()
        optimizer.zero_grad()

    def measure(repeat: int) -> dict[str, float]:
        forget_peak()
        started = time.perf_counter()
        turns = rollout(repeat)
        rolled_out, rollout_peak = time.perf_counter(), peak_mb()
        rows = [
            WeightedRow(row, 1.0 if number % 2 else -1.0)
            for number, attempted in enumerate(turns)
            for row in policy.rows_of_turns(attempted)
        ]
        assert len(rows) == shape.group, "a conversation was broken into several rows"
        forget_peak()
        began = time.perf_counter()
        update(rows)
        return {
            "rollout_s": rolled_out - started,
            "rollout_peak_mb": rollout_peak,
            "update_s": time.perf_counter() - began,
            "update_peak_mb": peak_mb(),
            "tokens": policy.cost_of([weighted.row for weighted in rows]),
        }

    return measure


def busy_tool() -> int:
    """A tool in plain Python: some hundredths of a second of one CPU."""
    return sum(number * number for number in range(300_000))


# The plot -------------------------------------------------------------------------------------


def plot(rows: Mapping[Shape, Row], file: Path) -> None:
    """Update time over distinct tokens, and time and peak memory over what varied."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 6), dpi=120, layout="constrained")
    panels = figure.subplots(2, len(VARIED))
    for above, below, (name, shapes) in zip(*panels, VARIED.items(), strict=True):
        values = [getattr(shape, name) for shape in shapes]
        for key, marker in (("rollout", "o-"), ("update", "s--")):
            times = [rows[shape][f"{key}_s"] for shape in shapes]
            peaks = [rows[shape][f"{key}_peak_mb"] / 1000 for shape in shapes]
            above.plot(values, times, marker, label=key)
            below.plot(values, peaks, marker, label=key)
        above.set_ylabel("seconds")
        below.set_ylabel("peak memory, GB")
        below.set_xlabel(LABELS[name])
        for panel in (above, below):
            panel.set_ylim(bottom=0)
            panel.grid(alpha=0.3, linewidth=0.6)
            panel.legend(frameon=False)
    figure.savefig(file)


LABELS = {"group": "attempts", "prompt": "tokens of the prompt", "turns": "turns"}

if __name__ == "__main__":
    main()
