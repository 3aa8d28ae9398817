"""Evaluation: how good an agent is, how sure that is, and whether one is better than another.

Plain Python. The unit is the task: attempts at one task are not independent of each other, so every
interval is over tasks, and two evaluations are compared task by task.
"""

from __future__ import annotations

import math
import random
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from attrs import Factory, asdict, frozen

from .errors import ConfigurationError, DataError
from .rewards import is_correct
from .traces import Group, Rollout

#: The 97.5 % quantile of the normal distribution: for two-sided 95 % intervals.
Z95 = 1.959963984540054

#: A difference whose p-value is above it is not called one.
ALPHA = 0.05

Interval = tuple[float, float]


@frozen
class Evaluation:
    """What an agent did on a set of tasks.

    - `n`: tasks; `attempts`: attempts at all of them together.
    - `per_task`: for each task that has a gold answer, the share of its attempts that were correct.
    - `accuracy`: the mean of `per_task`, None where no task has a gold answer. An attempt that
      failed for any reason (`errors`) counts as not correct.
    - `ci95`: Wilson's score interval of the accuracy, with tasks as its units.
    - `valid_format`: share of attempts whose every turn the agent's framework could parse.
    - `mean_reward`: over the attempts that were scored, None where none was;
      `reward_failures` are those whose reward failed.
    - `turns`, `tokens` (sampled), `seconds`: means per attempt.
    - `errors`: attempts that failed, by kind; `turn_errors`: turns that failed, by kind.
    """

    n: int
    accuracy: float | None
    ci95: Interval | None
    valid_format: float
    mean_reward: float | None
    turns: float
    tokens: float
    errors: Mapping[str, int]
    per_task: Mapping[str, float]
    attempts: int
    reward_failures: int = 0
    seconds: float = 0.0
    turn_errors: Mapping[str, int] = Factory(dict)

    def as_dict(self) -> dict[str, Any]:
        """JSON data, by the names of the fields."""
        data = asdict(self)
        return {**data, "ci95": list(self.ci95) if self.ci95 else None}

    def lines(self) -> list[str]:
        """Lines of text for a person."""
        per_attempt = f"{self.turns:.1f} turns, {self.tokens:.0f} tokens, {self.seconds:.1f} s"
        lines = [
            self._accuracy_line(),
            f"valid format  {_percent(self.valid_format)} of {self.attempts} attempts",
            f"per attempt   {per_attempt}",
        ]
        if self.mean_reward is not None:
            lines.append(f"mean reward   {self.mean_reward:.3f}")
        if self.reward_failures:
            lines.append(f"not scored    {self.reward_failures} attempts, whose reward failed")
        for label, counts in ("failed", self.errors), ("failed turns", self.turn_errors):
            if counts:
                words = ", ".join(f"{kind} {count}" for kind, count in counts.items())
                lines.append(f"{label:<13} {words}")
        return lines

    def _accuracy_line(self) -> str:
        if self.accuracy is None or self.ci95 is None:
            return f"accuracy      unknown: none of {self.n} tasks has a gold_answer"
        low, high = (_percent(bound) for bound in self.ci95)
        tasks = f"{self.n} tasks"
        if len(self.per_task) < self.n:
            tasks = f"the {len(self.per_task)} of {self.n} tasks that have a gold_answer"
        return f"accuracy      {_percent(self.accuracy)} (95 % interval {low} to {high}; {tasks})"


def evaluate_groups(groups: Iterable[Group]) -> Evaluation:
    """The evaluation of finished groups. Groups at one task (the same id) count as one.

    A part of them (one split of a data set, say) is evaluated as
    `evaluate_groups([g for g in groups if g.task.metadata["split"] == "hard"])`.
    Errors: DataError where there is no attempt at all.
    """
    groups = list(groups)
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    if not rollouts:
        raise DataError("nothing to evaluate: give at least one group with an attempt in it")
    per_task = _correctness(rollouts)
    accuracy = _mean(per_task.values())
    turns = [turn for rollout in rollouts for turn in rollout.trace.turns]
    rewards = [r.reward for r in rollouts if r.reward is not None]
    return Evaluation(
        n=len({rollout.task.id for rollout in rollouts}),
        accuracy=accuracy,
        ci95=None if accuracy is None else wilson_interval(accuracy, len(per_task)),
        valid_format=sum(r.trace.well_formed for r in rollouts) / len(rollouts),
        mean_reward=_mean(reward.score for reward in rewards if reward.score is not None),
        turns=len(turns) / len(rollouts),
        tokens=sum(r.trace.usage.completion_tokens for r in rollouts) / len(rollouts),
        errors=_counts(r.trace.error.kind for r in rollouts if r.trace.error),
        per_task=per_task,
        attempts=len(rollouts),
        reward_failures=sum(reward.failure is not None for reward in rewards),
        seconds=sum(r.trace.usage.seconds for r in rollouts) / len(rollouts),
        turn_errors=_counts(turn.error.kind for turn in turns if turn.error),
    )


def wilson_interval(share: float, n: int, z: float = Z95) -> Interval:
    """Wilson's score interval of a share of `n` units.

    E. B. Wilson, "Probable inference, the law of succession, and statistical inference", JASA 22
    (1927). `share` may be a mean of numbers within [0, 1] (several attempts at each task): their
    variance is at most share * (1 - share), so that the interval is then wide enough or wider.
    """
    if n < 1 or not 0 <= share <= 1:
        raise ConfigurationError(
            f"an interval needs a share within [0, 1] of n >= 1, not {share}, {n}"
        )
    centre = (share + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n))
    # At shares 0 and 1 one bound is the share itself, up to rounding.
    return max(0.0, min(share, centre - half)), min(1.0, max(share, centre + half))


@frozen
class Comparison:
    """The change in accuracy from one evaluation to another, task by task.

    `mean` and `ci95` are in units of accuracy (0.1 is ten points). `better` and `worse` count the
    tasks that changed. `p_value` is that of the paired sign-flip test. `significant` only where
    the interval excludes zero and `p_value` is at most 0.05.
    """

    mean: float
    ci95: Interval
    n: int
    better: int
    worse: int
    p_value: float
    significant: bool

    def as_dict(self) -> dict[str, Any]:
        """JSON data, by the names of the fields."""
        return {**asdict(self), "ci95": list(self.ci95)}

    def sentence(self) -> str:
        """What can be said of it. No gain or loss is claimed that is not `significant`."""
        low, high = (_points(bound) for bound in self.ci95)
        facts = (
            f"{self.n} tasks: {self.better} better, {self.worse} worse; "
            f"95 % interval {low} to {high}, p = {self.p_value:.2g}"
        )
        if self.significant:
            verb = "rose" if self.mean > 0 else "fell"
            return f"Accuracy {verb} by {100 * abs(self.mean):.1f} points ({facts})."
        if not self.better and not self.worse:
            return f"No change is shown: all {self.n} tasks came out the same."
        return f"No change is shown: {_points(self.mean)} points could be chance ({facts})."


def compare(
    before: Evaluation, after: Evaluation, seed: int = 0, resamples: int = 10_000
) -> Comparison:
    """`after` minus `before` on the same tasks: paired bootstrap over tasks, and a sign-flip test.

    The interval is the percentile interval of the mean difference (B. Efron and R. J. Tibshirani,
    "An Introduction to the Bootstrap", 1993, chapter 13). With few changed tasks it is too narrow
    (one task that changed gives an interval of no width), so a paired sign-flip test (R. A.
    Fisher, "The Design of Experiments", 1935) must agree before a difference is significant.
    Equal seeds give equal results.
    Errors: DataError where the tasks differ, or have no gold answers.
    """
    if resamples < 1:
        raise ConfigurationError(f"resamples is {resamples}; it must be at least 1")
    differences = _differences(before, after)
    mean = math.fsum(differences) / len(differences)
    interval = _bootstrap_interval(differences, random.Random(seed), resamples)
    p_value = _sign_flip_p(differences, random.Random(seed), resamples)
    return Comparison(
        mean=mean,
        ci95=interval,
        n=len(differences),
        better=sum(d > 0 for d in differences),
        worse=sum(d < 0 for d in differences),
        p_value=p_value,
        significant=(interval[0] > 0 or interval[1] < 0) and p_value <= ALPHA,
    )


def _correctness(rollouts: Iterable[Rollout]) -> dict[str, float]:
    attempts: dict[str, list[bool]] = defaultdict(list)
    for rollout in rollouts:
        if rollout.task.gold_answer is not None:
            correct = is_correct(rollout.trace, rollout.task.gold_answer)
            attempts[rollout.task.id].append(correct)
    return {task_id: sum(made) / len(made) for task_id, made in attempts.items()}


def _differences(before: Evaluation, after: Evaluation) -> list[float]:
    for label, evaluation in ("before", before), ("after", after):
        if not evaluation.per_task:
            raise DataError(
                f"nothing to compare: no task of the evaluation {label!r} has a gold_answer"
            )
    apart = before.per_task.keys() ^ after.per_task.keys()
    if apart:
        sides = [
            f"{len(missing)} only {label} ({', '.join(sorted(missing)[:5])})"
            for label, missing in (
                ("before", before.per_task.keys() - after.per_task.keys()),
                ("after", after.per_task.keys() - before.per_task.keys()),
            )
            if missing
        ]
        raise DataError(
            f"the two evaluations are of different tasks: {'; '.join(sides)}. Evaluate both on "
            "the same tasks."
        )
    return [after.per_task[task_id] - share for task_id, share in before.per_task.items()]


def _bootstrap_interval(values: Sequence[float], rng: random.Random, resamples: int) -> Interval:
    n = len(values)
    means = sorted(math.fsum(rng.choices(values, k=n)) / n for _ in range(resamples))
    cut = int(resamples * ALPHA / 2)  # the same number of means is left out at either end
    return means[cut], means[-1 - cut]


def _sign_flip_p(differences: Sequence[float], rng: random.Random, resamples: int) -> float:
    """The share of random signs that make the sum at least as large, both sides.

    The observed signs count as one of the draws, so that the share is never 0 (B. Phipson and
    G. K. Smyth, "Permutation p-values should never be zero", 2010).
    """
    changed = [d for d in differences if d]
    observed = abs(math.fsum(changed)) - 1e-9
    hits = 0
    for _ in range(resamples):
        signs = rng.choices((-1.0, 1.0), k=len(changed))
        hits += abs(math.fsum(map(float.__mul__, changed, signs))) >= observed
    return (hits + 1) / (resamples + 1)


def _mean(values: Iterable[float]) -> float | None:
    numbers = list(values)
    return math.fsum(numbers) / len(numbers) if numbers else None


def _counts(kinds: Iterable[str]) -> dict[str, int]:
    return dict(Counter(kinds).most_common())


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _points(difference: float) -> str:
    return f"{100 * difference:+.1f}"


__all__ = ["Comparison", "Evaluation", "compare", "evaluate_groups", "wilson_interval"]
