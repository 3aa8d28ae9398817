"""A control for the demo: the same GRPO from the same warm start, with shuffled rewards.

    python docs/examples/shuffled_rewards.py [--run-dir DIR] [--steps N] [--seed N] [--fast]

Within each group the true rewards are dealt out at random among the attempts. Everything else is
as in `demo.py`: the same tasks, attempts, learning rate and number of updates. What is then left
of a gain cannot come from the reward, so the interval of `grpo_gain` should include 0.
"""

from __future__ import annotations

import random
from pathlib import Path

from attrs import asdict
from demo import (
    errors_in_words,
    fresh_directory,
    machine,
    parse,
    quieten_libraries,
    say,
    write_config,
)
from shop.stages import (
    Settings,
    evaluate,
    make_brain,
    make_data,
    reward,
    train_grpo,
    warm_start,
)

from toolbrain_core import Comparison, Group, RewardResult, compare
from toolbrain_core.report import summarise, write_report
from toolbrain_core.rewards import as_reward
from toolbrain_core.runs import RunDirectory


class ShuffledReward:
    """The demo's reward, permuted within each group. Equal seeds give equal permutations."""

    def __init__(self, seed: int):
        self.seed = seed
        self.true = as_reward(reward)

    def __call__(self, group: Group) -> list[RewardResult]:
        results = self.true(group)
        # A group that is sampled again has other attempt numbers, and so another permutation.
        first = group.rollouts[0].attempt
        random.Random(f"{self.seed}/{group.task.id}/{first}").shuffle(results)
        return results


def main() -> None:
    settings, path = parse(__doc__ or "", Path("runs/shuffled"))
    quieten_libraries()
    with errors_in_words():
        change = run_control(settings, fresh_directory(path))
        say(f"GRPO on shuffled rewards, warm start to after: {change.sentence()}")
        low, high = change.ci95
        verdict = "includes" if low <= 0 <= high else "does NOT include"
        say(f"The interval {verdict} 0. Report: {path / 'report.md'}")


def run_control(settings: Settings, directory: RunDirectory) -> Comparison:
    """Warm start, evaluation, GRPO on shuffled rewards, evaluation; then the report."""
    brain = make_brain(settings, directory.path, ShuffledReward(settings.seed))
    write_config(directory, settings, brain)
    data = make_data(settings, brain.agent)
    sft = warm_start(brain, data, settings)
    before = evaluate(brain, data.held_out)
    grpo = train_grpo(brain, data, settings)
    after = evaluate(brain, data.held_out)
    change = compare(before.evaluation, after.evaluation, settings.seed)
    report = {
        **summarise(directory.path / "grpo"),
        "run": directory.path.name,
        "updates": grpo.updates,
        "seconds": round(grpo.seconds, 1),
        "stages": {"warm_start": before.as_dict(), "after": after.as_dict()},
        "grpo_gain": change.as_dict(),
        "training": {"warm_start": asdict(sft), "grpo": asdict(grpo)},
        "settings": asdict(settings),
        "seed": settings.seed,
        "machine": machine(),
    }
    write_report(directory.path, report)
    return change


if __name__ == "__main__":
    main()
