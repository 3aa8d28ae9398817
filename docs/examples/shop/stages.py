"""The stages that `demo.py` and `shuffled_rewards.py` are made of, and their settings."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from attrs import evolve, frozen

from toolbrain_core import Brain, Demonstration, Evaluation, Group, RewardResult, Task, Trace
from toolbrain_core.evaluation import evaluate_groups
from toolbrain_core.rewards import is_correct
from toolbrain_core.traces import json_line

from .agent import demonstrate, make_agent, make_model
from .tasks import grpo_tasks, held_out_tasks, sft_tasks, tool_calls
from .tools import TOOLS


@frozen
class Settings:
    """Sizes and learning rates of all stages.

    `demonstrations` are different one-call tasks; the warm start makes `warm_start_updates`
    updates of `rows_per_update` of them. GRPO makes `grpo_steps` updates, each on
    `tasks_per_step` tasks that it has not seen before, with `attempts` attempts at each. `beta`
    keeps it near the warm start, and is large for GRPO: Adam's updates are as large where rewards
    say nothing as where they do, and would carry the policy anywhere.
    Of the held-out tasks every `held_out_stride`-th is used.
    """

    seed: int = 0
    lora_rank: int = 16
    max_new_tokens: int = 48
    demonstrations: int = 80
    warm_start_updates: int = 10
    rows_per_update: int = 8
    sft_learning_rate: float = 5e-4
    grpo_steps: int = 16
    tasks_per_step: int = 8
    attempts: int = 8
    grpo_learning_rate: float = 7e-5
    beta: float = 0.5
    temperature: float = 1.0
    held_out_stride: int = 1


def fast(settings: Settings) -> Settings:
    """The same stages in less than a minute: they run, but nothing can be concluded from them."""
    return evolve(
        settings,
        max_new_tokens=8,
        demonstrations=2,
        warm_start_updates=2,
        rows_per_update=1,
        grpo_steps=1,
        tasks_per_step=1,
        attempts=2,
        held_out_stride=100,
    )


class Data(NamedTuple):
    """What all stages of one run are about."""

    held_out: list[Task]
    demonstrations: list[Demonstration]
    grpo: list[Task]


def make_data(settings: Settings, agent: Any) -> Data:
    """Held-out tasks, executed demonstrations of one-call tasks, tasks for GRPO."""
    return Data(
        held_out=held_out_tasks()[:: settings.held_out_stride],
        demonstrations=[
            demonstrate(agent, task) for task in sft_tasks(settings.demonstrations, settings.seed)
        ],
        grpo=grpo_tasks(settings.grpo_steps * settings.tasks_per_step, settings.seed),
    )


def reward(trace: Trace, gold_answer: Any, code: str) -> RewardResult:
    """1 for the right answer, and up to 0.4 for the right calls: right answers to tasks of several
    calls are too rare at first to learn from alone.

    The part for calls is the share of the task's tool calls that were made, less one for each call
    that the task does not need, and never below 0.
    """
    needed = Counter(tool_calls(code))
    made = Counter((c.name, *c.arguments.values()) for c in trace.calls if c.name in TOOLS)
    useful, useless = (needed & made).total(), (made - needed).total()
    calls = max(0, useful - useless) / needed.total()
    answer = float(is_correct(trace, gold_answer))
    return RewardResult(answer + 0.4 * calls, parts={"answer": answer, "calls": calls})


def make_brain(
    settings: Settings, run_dir: Path, reward_func: Callable[..., Any] = reward
) -> Brain:
    """A Brain on a freshly loaded model."""
    return Brain(
        make_agent(make_model(settings.max_new_tokens)),
        reward_func=reward_func,
        lora={"r": settings.lora_rank},
        tree="require",
        seed=settings.seed,
        run_dir=run_dir,
    )


@frozen
class Stage:
    """The evaluation of all held-out tasks, and of the two kinds of them.

    `known` tasks have chains of calls that GRPO trains on (with other items and numbers), `novel`
    tasks have not.
    """

    groups: tuple[Group, ...]
    evaluation: Evaluation
    known: Evaluation
    novel: Evaluation

    def as_dict(self) -> dict[str, Any]:
        """JSON data: the evaluation's, with those of the two kinds inside."""
        parts = {"known": self.known.as_dict(), "novel": self.novel.as_dict()}
        return {**self.evaluation.as_dict(), **parts}

    def lines(self, name: str) -> str:
        """The attempts as JSON lines, marked with the stage's name."""
        rollouts = [rollout for group in self.groups for rollout in group.rollouts]
        return "".join(json_line(rollout, stage=name) + "\n" for rollout in rollouts)


def evaluate(brain: Brain, tasks: Sequence[Task]) -> Stage:
    """One greedy attempt at each task."""
    groups = tuple(brain.rollout(tasks))
    known, novel = (
        evaluate_groups([g for g in groups if g.task.metadata["novel"] is wanted])
        for wanted in (False, True)
    )
    return Stage(groups, evaluate_groups(groups), known, novel)


@frozen
class Trained:
    """What a training stage took: wall-clock seconds with everything in them, and updates."""

    seconds: float
    updates: int


def train_sft(
    brain: Brain,
    demonstrations: Sequence[Demonstration],
    settings: Settings,
    updates: int,
    name: str,
) -> Trained:
    """`updates` updates on the demonstrations, pass after pass."""
    started = time.monotonic()
    result = brain.train(
        demonstrations,
        "sft",
        name=name,
        learning_rate=settings.sft_learning_rate,
        rows_per_step=settings.rows_per_update,
        num_iterations=math.ceil(updates * settings.rows_per_update / len(demonstrations)),
        max_updates=updates,
        checkpoint_every=0,
    )
    return Trained(time.monotonic() - started, result.updates)


def warm_start(brain: Brain, data: Data, settings: Settings) -> Trained:
    """The short SFT that GRPO begins with."""
    return train_sft(
        brain, data.demonstrations, settings, settings.warm_start_updates, "warm_start"
    )


def train_grpo(brain: Brain, data: Data, settings: Settings) -> Trained:
    """One pass over the tasks for GRPO."""
    started = time.monotonic()
    result = brain.train(
        data.grpo,
        "grpo",
        name="grpo",
        learning_rate=settings.grpo_learning_rate,
        tasks_per_step=settings.tasks_per_step,
        attempts=settings.attempts,
        beta=settings.beta,
        temperature=settings.temperature,
        resample=0,  # new tasks teach more here than more attempts at the same one
        checkpoint_every=0,
    )
    return Trained(time.monotonic() - started, result.updates)


def train_sft_for(
    seconds: float, pace: float, brain: Brain, data: Data, settings: Settings
) -> Trained:
    """SFT with a constant learning rate for about `seconds`, and not more than them.

    The number of updates must be known beforehand, so the time is filled by runs that go on from
    each other: as many updates as fit in what is left at the `pace` (seconds per update) of the
    run before. What is left in the end is too short for another run, or under 5 %.
    """
    spent, updates = 0.0, 0
    while (left := seconds - spent) > 0.05 * seconds and left >= pace:
        name = "sft_alone" if not updates else f"sft_alone_from_{updates}"
        run = train_sft(brain, data.demonstrations, settings, int(left / pace), name)
        spent, updates = spent + run.seconds, updates + run.updates
        pace = run.seconds / run.updates
    return Trained(spent, updates)
