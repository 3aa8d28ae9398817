from __future__ import annotations

import math
import statistics

import pytest
from toolbrain_grpo.advantages import advantages_of, has_signal, score_of, why_no_signal

from toolbrain_core.traces import OWN_MISTAKES, Failure, Group, RewardResult, Rollout, Task, Trace

LOST = ["time_limit", "infrastructure"]


def attempt(score=None, error=None, task="t"):
    """An attempt with a score, or one whose reward failed; `error` is the kind of its failure."""
    failure = None if score is not None else Failure("reward", "it raised")
    trace = Trace(error=Failure(error, "it failed") if error else None)
    return Rollout(Task(task, "?"), trace, RewardResult(score, failure=failure))


def group(*scores, errors=()):
    errors = [*errors, *[None] * (len(scores) - len(errors))]
    return Group(
        Task("t", "?"),
        tuple(attempt(s, error=e) for s, e in zip(scores, errors, strict=True)),
    )


@pytest.mark.parametrize("kind", sorted(OWN_MISTAKES))
@pytest.mark.parametrize("on_error", ["mask", "zero"])
def test_the_policys_own_mistakes_are_scored_like_any_answer(kind, on_error):
    assert score_of(attempt(0.25, error=kind), on_error) == 0.25


@pytest.mark.parametrize("kind", LOST)
def test_attempts_that_were_lost_are_left_out_or_count_zero(kind):
    assert score_of(attempt(0.25, error=kind)) is None
    assert score_of(attempt(0.25, error=kind), "zero") == 0.0


def test_attempts_that_could_not_be_scored_are_left_out_or_count_zero():
    assert score_of(attempt()) is None
    assert score_of(attempt(), "zero") == 0.0
    assert score_of(Rollout(Task("t", "?"), Trace())) is None


@pytest.mark.parametrize(
    ("scores", "expected"),
    [
        ([0.0, 1.0], True),
        ([0.5, None, 0.75], True),
        ([1.0, 1.0, 1.0], False),
        ([None, 1.0], False),
        ([None, None], False),
        ([0.1 + 0.2, 0.3], False),  # equal but for rounding
    ],
)
def test_a_group_has_signal_where_two_known_scores_differ(scores, expected):
    assert has_signal(scores) is expected


def test_advantages_within_a_group_are_centred_and_scaled_by_its_sample_deviation():
    [advantages] = advantages_of([group(0.0, 1.0, 1.0, 0.5)])
    scores = [0.0, 1.0, 1.0, 0.5]
    std = statistics.stdev(scores)
    assert advantages == pytest.approx([(s - 0.625) / (std + 1e-4) for s in scores])
    assert sum(advantages) == pytest.approx(0)


def test_what_is_left_out_has_no_advantage_and_no_part_in_the_others():
    with_lost = group(0.0, 0.9, 1.0, errors=[None, "time_limit"])
    [[low, lost, high]] = advantages_of([with_lost])
    assert lost is None
    assert [[low, high]] == advantages_of([group(0.0, 1.0)])
    [counted] = advantages_of([with_lost], on_error="zero")
    assert counted == advantages_of([group(0.0, 0.0, 1.0)])[0]


def test_scaling_by_the_batch_keeps_the_groups_means_apart():
    groups = [group(0.0, 1.0), group(10.0, 12.0)]
    std = statistics.stdev([0.0, 1.0, 10.0, 12.0]) + 1e-4
    assert advantages_of(groups, "batch") == [
        pytest.approx([-0.5 / std, 0.5 / std]),
        pytest.approx([-1.0 / std, 1.0 / std]),
    ]
    assert advantages_of(groups, "none") == [[-0.5, 0.5], [-1.0, 1.0]]


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_equal_or_missing_scores_give_finite_advantages(scale):
    groups = [group(1.0, 1.0), group(None, None), group(3.0)]
    first, second, third = advantages_of(groups, scale)
    assert first == [0.0, 0.0]
    assert second == [None, None]
    assert third == [0.0]
    assert all(math.isfinite(a) for a in first)


@pytest.mark.parametrize(
    ("groups", "says"),
    [
        ([group(0.0, 0.0), group(0.0, 0.0)], ["all 4 rewards were 0", "too hard", "sft"]),
        ([group(1.0, 1.0)], ["all 2 rewards were 1", "too easy"]),
        ([group(0.0, 0.0), group(1.0, 1.0)], ["never within a group", "attempts="]),
        ([], ["no step left", "metrics.jsonl"]),
        ([group(1.0, 0.0, errors=LOST)], ["no attempt could be scored (2 attempts", "time_limit"]),
        ([group(None, None)], ["no attempt could be scored", "the reward failed"]),
        # What the agents did wrong is not why these could not be scored.
        ([group(None, None, errors=["format", "format"])], ["the reward failed"]),
        ([group(0.5, None), group(0.75, None)], ["fewer than two attempts", "2 of 4"]),
    ],
)
def test_the_reason_for_no_signal_is_said_in_words(groups, says):
    reason = why_no_signal(groups)
    for words in says:
        assert words in reason


def test_lost_attempts_that_count_zero_are_not_called_too_hard():
    reason = why_no_signal([group(1.0, 1.0, errors=["infrastructure"] * 2)], "zero")
    assert "no attempt could be scored" in reason
    assert "infrastructure" in reason
