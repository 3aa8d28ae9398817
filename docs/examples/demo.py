"""Train a small shop's agent, and measure what each part of the training did.

    make demo
    python docs/examples/demo.py [--run-dir DIR] [--steps N] [--seed N] [--fast]

The agent is a smolagents CodeAgent with four tools on the embedded model (135 million parameters).
It is evaluated on held-out tasks, warmed up with a little SFT on demonstrations of one-call tasks,
trained with GRPO on tasks of one to three calls, and evaluated again. Beside it, a second copy gets
SFT on the same demonstrations for as long as warm start and GRPO took together.

Everything is kept in the run directory: report.json, report.md, learning_curve.png, the attempts
of every evaluation (rollouts.jsonl), the trained adapter, and a run directory for each training.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from attrs import asdict, evolve, frozen
from rich.console import Console
from rich.table import Table
from shop.stages import (
    Settings,
    Stage,
    Trained,
    evaluate,
    fast,
    make_brain,
    make_data,
    train_grpo,
    train_sft_for,
    warm_start,
)
from toolbrain_report.plots import plot_learning_curve

from toolbrain_core import Brain, Comparison, Evaluation, Group, ToolBrainError, compare
from toolbrain_core.report import summarise, write_report
from toolbrain_core.rewards import is_correct
from toolbrain_core.runs import RunDirectory

#: The stages that are evaluated, in the order of the table.
STAGES = ("before", "warm_start", "after", "sft_alone")

#: What is compared in the report, in words.
CHANGES = {
    "gain": "Before to after",
    "grpo_gain": "GRPO's part, warm start to after",
    "gain_over_sft_alone": "SFT alone for the same time to after",
}

console = Console()


@frozen
class Outcome:
    """What the demo came to."""

    directory: Path
    stages: dict[str, Stage]
    changes: dict[str, Comparison]
    training: dict[str, Trained]


def main() -> None:
    settings, path = parse(__doc__ or "", Path("runs/demo"))
    quieten_libraries()
    with errors_in_words():
        show(run_demo(settings, fresh_directory(path)))


def parse(doc: str, run_dir: Path) -> tuple[Settings, Path]:
    """The settings and the run directory that the command line asks for."""
    parser = argparse.ArgumentParser(description=doc.splitlines()[0])
    parser.add_argument("--run-dir", type=Path, default=run_dir)
    parser.add_argument("--steps", type=int, help="updates by GRPO")
    parser.add_argument("--seed", type=int, default=Settings().seed)
    parser.add_argument("--fast", action="store_true", help="tiny sizes: only shows that it runs")
    options = parser.parse_args()
    settings = Settings(seed=options.seed)
    if options.fast:
        settings = fast(settings)
    if options.steps is not None:
        settings = evolve(settings, grpo_steps=options.steps)
    return settings, options.run_dir


def quieten_libraries() -> None:
    """Leave out what TRL's and smolagents' calls make transformers say about its next version."""
    warnings.filterwarnings("ignore", category=FutureWarning)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()


@contextmanager
def errors_in_words() -> Iterator[None]:
    """One line instead of a traceback for what toolbrain itself says; 130 for Ctrl-C."""
    try:
        yield
    except ToolBrainError as error:
        sys.exit(f"Error: {error}")
    except KeyboardInterrupt:
        sys.exit(130)


def fresh_directory(path: Path) -> RunDirectory:
    """An empty run directory. An earlier demo's is removed; anything else that is there is not."""
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        if not is_of_a_demo(path):
            sys.exit(f"Error: {path} holds something else than a demo; give another --run-dir")
        shutil.rmtree(path)
    path.mkdir(parents=True, exist_ok=True)
    return RunDirectory(path)


def is_of_a_demo(path: Path) -> bool:
    try:
        config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(config, dict) and config.get("demo") is True


def run_demo(settings: Settings, directory: RunDirectory) -> Outcome:
    """Every stage, with its evaluation; then the report and the plot."""
    brain = make_brain(settings, directory.path)
    write_config(directory, settings, brain)
    data = make_data(settings, brain.agent)
    stages: dict[str, Stage] = {}

    said(1, f"Evaluating the untrained agent on {len(data.held_out)} held-out tasks")
    stages["before"] = evaluate(brain, data.held_out)
    said(2, f"Warm start: SFT on {len(data.demonstrations)} demonstrations of one-call tasks")
    sft = warm_start(brain, data, settings)
    stages["warm_start"] = evaluate(brain, data.held_out)
    said(3, f"GRPO on {len(data.grpo)} tasks of one to three calls")
    grpo = train_grpo(brain, data, settings)
    stages["after"] = evaluate(brain, data.held_out)
    brain.save(directory.path / "adapter")

    seconds = sft.seconds + grpo.seconds
    said(4, f"SFT alone: the same demonstrations for the same time ({seconds:.0f} s)")
    other = make_brain(settings, directory.path)
    alone = train_sft_for(seconds, sft.seconds / sft.updates, other, data, settings)
    stages["sft_alone"] = evaluate(other, data.held_out)

    training = {"warm_start": sft, "grpo": grpo, "sft_alone": alone}
    outcome = Outcome(directory.path, stages, changes(stages, settings.seed), training)
    write_results(directory, settings, outcome)
    return outcome


def write_results(directory: RunDirectory, settings: Settings, outcome: Outcome) -> None:
    """The evaluations' attempts, the report, and the learning curve, which is GRPO's."""
    lines = "".join(stage.lines(name) for name, stage in outcome.stages.items())
    directory.write_text("rollouts.jsonl", lines)
    metrics = (directory.path / "grpo" / "metrics.jsonl").read_text(encoding="utf-8")
    directory.write_text("metrics.jsonl", metrics)
    grpo = outcome.training["grpo"]
    report = {
        **summarise(directory.path / "grpo"),
        "run": directory.path.name,
        "updates": grpo.updates,
        "seconds": round(grpo.seconds, 1),
        "stages": {name: stage.as_dict() for name, stage in outcome.stages.items()},
        **{name: change.as_dict() for name, change in outcome.changes.items()},
        "training": {name: asdict(part) for name, part in outcome.training.items()},
        "settings": asdict(settings),
        "seed": settings.seed,
        "machine": machine(),
    }
    write_report(directory.path, report)
    plot_learning_curve(directory.path)


def changes(stages: dict[str, Stage], seed: int) -> dict[str, Comparison]:
    """What is compared, task by task."""
    pairs = {
        "gain": ("before", "after"),
        "grpo_gain": ("warm_start", "after"),
        "gain_over_sft_alone": ("sft_alone", "after"),
    }
    return {
        name: compare(stages[old].evaluation, stages[new].evaluation, seed)
        for name, (old, new) in pairs.items()
    }


def write_config(directory: RunDirectory, settings: Settings, brain: Brain) -> None:
    """The run directory's config.json, by which a later demo knows that it may remove it."""
    config = {
        "schema": 1,
        "demo": True,
        "algorithm": "grpo",
        "settings": asdict(settings),
        "seed": settings.seed,
        "policy": dict(brain.policy.describe()),
        "machine": machine(),
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }
    directory.write_json("config.json", config)


def machine() -> dict[str, Any]:
    return {
        "cpus": os.cpu_count(),
        "torch": torch.__version__,
        "torch_threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "platform": platform.platform(),
    }


def said(number: int, words: str) -> None:
    say(f"[{number}/4] {words}")


def show(outcome: Outcome) -> None:
    """The table, what can be said of the changes, and one task before and after."""
    console.print(table_of(outcome.stages))
    for name, words in CHANGES.items():
        say(f"{words}: {outcome.changes[name].sentence()}")
    minutes = [
        f"{name.replace('_', ' ')} {part.seconds / 60:.1f} min, {part.updates} updates"
        for name, part in outcome.training.items()
    ]
    say(f"Training: {'; '.join(minutes)}.")
    say(f"Learning curve: {outcome.directory / 'learning_curve.png'}")
    say(f"Report: {outcome.directory / 'report.md'}\n")
    show_one_task(outcome.stages)


def say(words: str) -> None:
    console.print(words, markup=False, highlight=False, soft_wrap=True)


def table_of(stages: dict[str, Stage]) -> Table:
    known, novel = stages["before"].known.n, stages["before"].novel.n
    table = Table(title=f"{known + novel} held-out tasks, one greedy attempt at each")
    table.add_column("stage")
    columns = ("accuracy", "95 % interval", f"known ({known})", f"novel ({novel})", "valid format")
    for column in columns:
        table.add_column(column, justify="right")
    for name in STAGES:
        stage = stages[name]
        low, high = stage.evaluation.ci95 or (0.0, 0.0)
        accuracies = [percent(e) for e in (stage.evaluation, stage.known, stage.novel)]
        table.add_row(
            name.replace("_", " ").replace("sft", "SFT"),
            accuracies[0],
            f"{100 * low:.1f} to {100 * high:.1f} %",
            *accuracies[1:],
            f"{100 * stage.evaluation.valid_format:.1f} %",
        )
    return table


def percent(evaluation: Evaluation) -> str:
    return f"{100 * (evaluation.accuracy or 0.0):.1f} %"


def show_one_task(stages: dict[str, Stage]) -> None:
    """The longest chain that was wrong before and right after, else the first task."""
    pairs = list(zip(stages["before"].groups, stages["after"].groups, strict=True))
    mended = [(b, a) for b, a in pairs if is_right(a) and not is_right(b)]
    if not mended:
        say("No task was wrong before and right after. The first one:")
    old, new = max(mended, key=lambda pair: pair[0].task.metadata["calls"], default=pairs[0])
    task = old.task
    lines = [f"Task {task.id}: {task.query}", f"Gold answer: {task.gold_answer}"]
    for name, group in (("before", old), ("after", new)):
        trace = group.rollouts[0].trace
        wrote = "\n".join(turn.text for turn in trace.turns)
        lines += [f"\n--- {name}, the policy wrote:", wrote.strip()]
        failed = f" ({trace.error.kind}: {trace.error.message})" if trace.error else ""
        lines.append(f"--- {name}, its answer: {trace.final_answer}{failed}")
    say("\n".join(lines))


def is_right(group: Group) -> bool:
    return is_correct(group.rollouts[0].trace, group.task.gold_answer)


if __name__ == "__main__":
    main()
