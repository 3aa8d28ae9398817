"""Evaluation and comparison, on groups with real traces."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from toolbrain_core.errors import ConfigurationError, DataError
from toolbrain_core.evaluation import compare, evaluate_groups, wilson_interval
from toolbrain_core.traces import Failure, Group, RewardResult, Rollout, Task, Trace, Turn, Usage


def group(task_id, answers, gold="yes", rewards=None, errors=None):
    task = Task(task_id, "a question", gold)
    rollouts = []
    for i, answer in enumerate(answers):
        trace = Trace(
            turns=(Turn(messages=(), text=str(answer)),),
            final_answer=answer,
            error=errors[i] if errors else None,
            usage=Usage(completion_tokens=10, seconds=0.5),
        )
        rollouts.append(Rollout(task, trace, rewards[i] if rewards else None, i))
    return Group(task, tuple(rollouts))


def evaluation(correct):
    """One attempt at each task; `correct` says which of them are right."""
    return evaluate_groups(group(str(i), ["yes" if c else "no"]) for i, c in enumerate(correct))


def test_accuracy_is_the_share_of_answers_that_match():
    result = evaluation([True, True, False, True])
    assert result.accuracy == 0.75
    assert result.n == result.attempts == 4
    assert result.per_task == {"0": 1.0, "1": 1.0, "2": 0.0, "3": 1.0}
    assert result.tokens == 10
    assert result.turns == 1
    assert result.seconds == 0.5


@pytest.mark.parametrize(("share", "n"), [(0.75, 20), (0.0, 150), (1.0, 7), (0.44, 48)])
def test_the_interval_is_wilsons(share, n):
    # Wilson's bounds are the p at which the score test just rejects: |share - p| = z * sqrt(...).
    for bound in wilson_interval(share, n):
        if bound != share:
            assert abs(share - bound) == pytest.approx(1.959964 * (bound * (1 - bound) / n) ** 0.5)


def test_an_answer_of_a_failed_attempt_or_of_a_tool_does_not_count():
    late = Failure("time_limit", "late")
    result = evaluate_groups([group("a", ["yes"], errors=[late]), group("b", [None])])
    assert result.accuracy == 0.0
    assert result.errors == {"time_limit": 1}


def test_attempts_at_one_task_make_one_unit_of_the_interval():
    result = evaluate_groups([group("a", ["yes"] * 8), group("b", ["yes", "no"] * 4)])
    assert result.per_task == {"a": 1.0, "b": 0.5}
    assert (result.n, result.attempts) == (2, 16)
    assert result.ci95 == wilson_interval(0.75, 2)


def test_without_gold_answers_there_is_no_accuracy_and_the_lines_say_so():
    result = evaluate_groups([group("a", ["yes"], gold=None)])
    assert result.accuracy is None
    assert result.ci95 is None
    assert "none of 1 tasks has a gold_answer" in "\n".join(result.lines())


def test_tasks_without_a_gold_answer_are_left_out_of_the_accuracy():
    result = evaluate_groups([group("a", ["yes"]), group("b", ["yes"], gold=None)])
    assert result.accuracy == 1.0
    assert "1 of 2 tasks" in result.lines()[0]


def test_unscored_attempts_are_counted_and_not_averaged():
    lost = RewardResult(None, failure=Failure("reward", "raised"))
    result = evaluate_groups([group("a", ["yes", "no"], rewards=[RewardResult(0.5), lost])])
    assert result.mean_reward == 0.5
    assert result.reward_failures == 1
    nothing = evaluate_groups([group("a", ["yes"], rewards=[lost])])
    assert nothing.mean_reward is None


def test_valid_format_and_turn_errors_come_from_the_turns():
    bad = Turn(messages=(), text="?", error=Failure("format", "no code"))
    good = Turn(messages=(), text="final_answer('yes')")
    task = Task("a", "a question", "yes")
    traces = [
        Trace(turns=(bad, good), final_answer="yes"),
        Trace(turns=(good,), final_answer="yes"),
    ]
    rollouts = tuple(Rollout(task, trace, attempt=i) for i, trace in enumerate(traces))
    result = evaluate_groups([Group(task, rollouts)])
    assert result.accuracy == 1.0
    assert result.valid_format == 0.5
    assert result.turn_errors == {"format": 1}
    assert result.errors == {}
    assert "format 1" in "\n".join(result.lines())


def test_an_evaluation_goes_to_json():
    data = json.loads(json.dumps(evaluation([True, False]).as_dict()))
    assert data["accuracy"] == 0.5
    assert data["n"] == 2
    assert len(data["ci95"]) == 2


def test_nothing_to_evaluate_is_an_error():
    with pytest.raises(DataError, match="nothing to evaluate"):
        evaluate_groups([])


def test_equal_evaluations_show_no_change():
    same = evaluation([True, False, True])
    comparison = compare(same, same)
    assert (comparison.mean, comparison.ci95, comparison.p_value) == (0.0, (0.0, 0.0), 1.0)
    assert not comparison.significant
    assert "No change" in comparison.sentence()


def test_a_clear_gain_and_a_clear_loss_are_claimed():
    low, high = evaluation([False] * 40), evaluation([True] * 20 + [False] * 20)
    gain, loss = compare(low, high), compare(high, low)
    assert gain.significant
    assert gain.mean == 0.5
    assert 0 < gain.ci95[0] < 0.5 < gain.ci95[1] < 1
    assert (gain.better, gain.worse, gain.n) == (20, 0, 40)
    assert gain.sentence().startswith("Accuracy rose by 50.0 points")
    assert loss.sentence().startswith("Accuracy fell by 50.0 points")


def test_a_gain_whose_interval_includes_zero_is_not_claimed():
    before = evaluation([True] * 10 + [False] * 10 + [False] * 20)
    after = evaluation([False] * 10 + [True] * 12 + [False] * 18)
    comparison = compare(before, after)
    assert comparison.mean > 0
    assert comparison.ci95[0] <= 0 <= comparison.ci95[1]
    assert not comparison.significant
    assert "rose" not in comparison.sentence()


def test_too_few_changed_tasks_are_not_enough_although_the_interval_excludes_zero():
    comparison = compare(evaluation([False] * 3), evaluation([True] * 3))
    assert comparison.ci95 == (1.0, 1.0)
    assert not comparison.significant
    assert "rose" not in comparison.sentence()


def test_different_tasks_cannot_be_compared():
    with pytest.raises(DataError, match=r"1 only after \(2\)"):
        compare(evaluation([True, True]), evaluation([True, True, True]))


def test_without_gold_answers_there_is_nothing_to_compare():
    unknown = evaluate_groups([group("0", ["yes"], gold=None)])
    with pytest.raises(DataError, match="'after' has a gold_answer"):
        compare(evaluation([True]), unknown)


def test_equal_seeds_give_equal_comparisons():
    before, after = evaluation([True, False] * 10), evaluation([True, True, False, True] * 5)
    assert compare(before, after, seed=3) == compare(before, after, seed=3)
    assert json.loads(json.dumps(compare(before, after).as_dict()))["n"] == 20


@pytest.mark.parametrize(("share", "n"), [(0.5, 0), (-0.1, 3), (1.1, 3)])
def test_an_interval_of_no_share_is_refused(share, n):
    with pytest.raises(ConfigurationError):
        wilson_interval(share, n)


@given(st.integers(1, 500), st.floats(0, 1))
def test_wilson_bounds_lie_within_the_unit_interval_and_around_the_share(n, share):
    low, high = wilson_interval(share, n)
    assert 0 <= low <= share <= high <= 1
    assert low < high


@given(st.lists(st.tuples(st.booleans(), st.booleans()), min_size=1, max_size=12))
def test_a_comparison_the_other_way_round_is_its_mirror_image(pairs):
    before, after = (evaluation(side) for side in zip(*pairs, strict=True))
    there = compare(before, after, resamples=200)
    back = compare(after, before, resamples=200)
    assert back.mean == -there.mean
    assert back.ci95 == (-there.ci95[1], -there.ci95[0])
    assert back.p_value == there.p_value
    assert back.significant == there.significant
    assert (back.better, back.worse) == (there.worse, there.better)
