"""From scores to advantages: plain Python, one group or one batch at a time."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Literal

from toolbrain_core.traces import Group, Rollout

#: Keeps the division finite where all scores of a group are nearly equal (as in TRL).
EPSILON = 1e-4

Scale = Literal["group", "batch", "none"]
OnError = Literal["mask", "zero"]


def score_of(rollout: Rollout, on_error: OnError = "mask") -> float | None:
    """What an attempt is worth in training; None leaves it out.

    The policy's own mistakes are scored like any answer. An attempt that ended for another reason
    (time limit, infrastructure), or that could not be scored, is left out, or counts 0.0 where
    `on_error` is "zero".
    """
    error = rollout.trace.error
    lost = error is not None and not error.is_own_mistake
    score = rollout.reward.score if rollout.reward else None
    if lost or score is None:
        return 0.0 if on_error == "zero" else None
    return score


def has_signal(scores: Sequence[float | None]) -> bool:
    """Whether a group teaches anything: at least two scores that differ."""
    known = [score for score in scores if score is not None]
    return len(known) > 1 and max(known) - min(known) > 1e-8


def advantages_of(
    groups: Sequence[Group], scale: Scale = "group", on_error: OnError = "mask"
) -> list[list[float | None]]:
    """A_i = (r_i - mean(r)) / (std(r) + 1e-4) within each group (GRPO, arXiv 2402.03300, eq. 3
    with outcome supervision); one list per group, None where an attempt is left out.

    `std` is the sample standard deviation, over the group or over the whole batch; "none" leaves
    the division out (Dr. GRPO, arXiv 2503.20783).
    """
    scores = [[score_of(r, on_error) for r in group.rollouts] for group in groups]
    everyone = [s for group in scores for s in group if s is not None]
    batch_std = statistics.stdev(everyone) if len(everyone) > 1 else 0.0
    return [_group_advantages(group, scale, batch_std) for group in scores]


def _group_advantages(
    scores: list[float | None], scale: Scale, batch_std: float
) -> list[float | None]:
    known = [s for s in scores if s is not None]
    if not known:
        return [None] * len(scores)
    mean = statistics.fmean(known)
    std = batch_std if scale == "batch" else (statistics.stdev(known) if len(known) > 1 else 0.0)
    divisor = 1.0 if scale == "none" else std + EPSILON
    return [None if s is None else (s - mean) / divisor for s in scores]


def why_no_signal(groups: Sequence[Group], on_error: OnError = "mask") -> str:
    """In words, why none of these groups could teach anything, and what to try."""
    attempts = [r for group in groups for r in group.rollouts]
    if not attempts:
        return (
            "the run that was resumed had no step left, and none before had a group with signal. "
            "Its metrics.jsonl and rollouts.jsonl show how its attempts were scored."
        )
    scored = [s for r in attempts if (s := score_of(r)) is not None]
    if not scored:
        causes = [_why_unscored(r) for r in attempts]
        return (
            f"no attempt could be scored ({len(attempts)} attempts; most often: "
            f"{statistics.mode(causes)}). All errors are in rollouts.jsonl."
        )
    scores = [s for r in attempts if (s := score_of(r, on_error)) is not None]
    if min(scores) == max(scores):
        low = max(scores) <= 0
        advice = (
            "the tasks are too hard for the policy as it is: warm up with algorithm='sft' on "
            "demonstrations, take easier tasks, or give partial credit in the reward"
            if low
            else "the tasks are too easy, or the reward does not tell answers apart"
        )
        return f"all {len(scores)} rewards were {scores[0]:g}: {advice}."
    if not any(sum(score_of(r, on_error) is not None for r in g.rollouts) > 1 for g in groups):
        return (
            f"fewer than two attempts of each group could be scored ({len(scores)} of "
            f"{len(attempts)}). Look at the errors in rollouts.jsonl."
        )
    return (
        "rewards differed between tasks, never within a group: raise attempts= or temperature=, "
        "or reward partial progress."
    )


def _why_unscored(rollout: Rollout) -> str:
    error = rollout.trace.error
    lost = error and not error.is_own_mistake
    word = error.kind if error and lost else "the reward failed"
    failure = error if lost else rollout.reward and rollout.reward.failure
    if not failure or not failure.message:
        return word
    kind = f"{failure.exception}: " if lost and failure.exception else ""
    return f"{word}: {kind}{failure.message:.200}"
