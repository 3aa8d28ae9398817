"""Rewards: what a user's callable becomes, and the built-in ones."""

import asyncio
import functools
import threading
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from toolbrain_core.errors import ConfigurationError
from toolbrain_core.rewards import (
    answers_match,
    as_reward,
    check_reward,
    is_correct,
    reward_exact_match,
    reward_step_efficiency,
    reward_tool_execution_success,
)
from toolbrain_core.traces import (
    Failure,
    Group,
    RewardResult,
    Rollout,
    Task,
    ToolCall,
    ToolResult,
    Trace,
    Turn,
)

TASK = Task("t1", "What is 5 + 7?", "12", {"difficulty": 3})


def group(*answers, task=TASK):
    """A group with one attempt per answer."""
    turns = (Turn(messages=(), text="hm"),)
    traces = [Trace(turns=turns, final_answer=answer) for answer in answers]
    return Group(task, tuple(Rollout(task, trace, attempt=i) for i, trace in enumerate(traces)))


def scores(reward, *answers):
    return [result.score for result in as_reward(reward)(group(*answers))]


def the_failure(reward):
    [result] = as_reward(reward)(group("12"))
    assert result.score is None
    assert result.failure.kind == "reward"
    return result.failure


# ---- shapes


def test_a_function_of_one_trace_scores_each():
    assert scores(lambda trace: len(trace.final_answer), "a", "bb") == [1.0, 2.0]


def test_a_function_of_traces_scores_the_whole_group_at_once():
    assert scores(lambda traces: range(len(traces)), "a", "b", "c") == [0.0, 1.0, 2.0]


@pytest.mark.parametrize("annotation", [list, list[Trace], Sequence[Trace], "Sequence[Trace]"])
def test_an_annotation_tells_that_a_reward_takes_all_traces(annotation):
    def rank(attempts):
        return [float(i) for i, _ in enumerate(attempts)]

    rank.__annotations__["attempts"] = annotation
    assert scores(rank, "a", "b") == [0.0, 1.0]


def test_a_function_of_the_group_gives_results():
    def native(group) -> list[RewardResult]:
        return [RewardResult(0.5, reasons=(group.task.id,)) for _ in group.rollouts]

    def annotated(attempts: Group):
        return native(attempts)

    for reward in native, annotated:
        assert as_reward(reward)(group("a", "b")) == [RewardResult(0.5, reasons=("t1",))] * 2


def test_an_annotation_comes_before_the_name():
    def one(traces: Trace):
        return len(traces.turns)

    assert scores(one, "a", "b") == [1.0, 1.0]


def test_methods_objects_and_partials_are_rewards():
    class Longer:
        def __call__(self, trace, query):
            return len(query)

        def score(self, trace, difficulty):
            return difficulty

    def power(trace, gold_answer, exponent=1):
        return float(gold_answer) ** exponent

    assert scores(Longer(), "a") == [14.0]
    assert scores(Longer().score, "a") == [3.0]
    assert scores(functools.partial(power, exponent=2), "a") == [144.0]
    assert scores(functools.partial(power, gold_answer="3"), "a") == [3.0]


def test_only_accepted_fields_are_passed():
    seen = []

    def everything(trace, **fields):
        seen.append(fields)
        return 0

    def some(trace, *, difficulty, absent=None):
        seen.append((difficulty, absent))
        return 0

    as_reward(everything)(group("a"))
    as_reward(some)(group("a"))
    own = {"task_id": "t1", "query": TASK.query, "gold_answer": "12", "difficulty": 3}
    assert seen == [own, (3, None)]


def test_a_field_named_like_the_first_parameter_does_not_collide():
    task = Task("t1", "q", metadata={"trace": "a field"})
    [result] = as_reward(lambda trace, **fields: len(trace.turns))(group("a", task=task))
    assert result.score == 1.0


def test_coroutines_of_one_group_run_together():
    waiting = asyncio.Barrier(3)

    async def judge(trace):
        async with asyncio.timeout(5):
            await waiting.wait()
        return trace.final_answer == "a"

    assert scores(judge, "a", "b", "a") == [1.0, 0.0, 1.0]


def test_an_async_reward_works_below_a_running_loop():
    async def judge(traces):
        await asyncio.sleep(0)
        return [1 for _ in traces]

    async def notebook():
        return scores(judge, "a", "b")

    assert asyncio.run(notebook()) == [1.0, 1.0]


def test_a_reward_made_once_stays_as_it_is():
    reward = as_reward(reward_exact_match)
    assert as_reward(reward) is reward


def test_a_group_without_attempts_has_no_results():
    assert as_reward(lambda traces: 1 / 0)(group()) == []


# ---- refused before a run


@pytest.mark.parametrize("thing", [3, "exact match", None, int, [len]])
def test_what_cannot_be_called_is_refused(thing):
    with pytest.raises(ConfigurationError, match=r"a reward cannot be .*give a function"):
        as_reward(thing)


def test_a_callable_that_takes_no_trace_is_refused():
    with pytest.raises(ConfigurationError, match="no parameter"):
        as_reward(lambda: 1.0)
    with pytest.raises(ConfigurationError, match="no parameter"):
        as_reward(lambda **fields: 1.0)
    with pytest.raises(ConfigurationError, match="by position only"):
        as_reward(lambda trace, gold_answer, /: 1.0)


def test_a_required_field_that_a_task_lacks_is_named_before_the_run():
    def reward(trace, gold_answer, difficulty):
        return 1.0

    check_reward(reward, [TASK])
    with pytest.raises(ConfigurationError, match=r"'difficulty'.* task 't2'"):
        check_reward(reward, [TASK, Task("t2", "q")])


def test_optional_and_bound_parameters_need_no_field():
    check_reward(lambda trace, bonus=0: 1.0, [TASK])
    check_reward(functools.partial(lambda trace, bonus: 1.0, bonus=1), [TASK])


# ---- failures


def test_a_reward_that_raises_is_a_typed_failure_of_that_attempt_only():
    def reward(trace):
        return 1 / len(trace.final_answer)

    good, bad = as_reward(reward)(group("a", ""))
    assert good == RewardResult(1.0)
    assert bad.score is None
    assert bad.failure.kind == "reward"
    assert bad.failure.exception == "ZeroDivisionError"
    assert "reward(trace)" not in bad.failure.message
    assert "'t1'" in bad.failure.message
    assert "reward" in bad.failure.message
    assert "1 / len(trace.final_answer)" in bad.failure.traceback


async def _async_failure(trace):
    raise OSError("no network")


@pytest.mark.parametrize(
    "reward",
    [
        lambda trace: float("nan"),
        lambda trace: float("inf"),
        lambda trace: -1e200,
        lambda trace: None,
        lambda trace: "1.0",
        lambda trace: [1.0],
        lambda trace: RewardResult(None),
        lambda trace: RewardResult(float("nan")),
        lambda trace: RewardResult(1.0, parts={"style": float("nan")}),
        lambda trace: RewardResult(1.0, turn_scores=(1.0, 2.0)),
        lambda traces: [1.0, 2.0],
        lambda traces: [],
        lambda traces: 1.0,
        lambda traces: "1",
        lambda traces: {"a": 1.0},
        lambda traces: 1 / 0,
        lambda group: (1 / 0 for _ in group.rollouts),
        lambda trace: exit(),
        _async_failure,
    ],
)
def test_what_is_no_finite_score_is_a_failure_and_never_a_zero(reward):
    assert "'t1'" in the_failure(reward).message


def test_a_judges_own_failure_is_kept():
    own = Failure("reward", "the judge's server is gone")
    assert the_failure(lambda trace: RewardResult(0.5, failure=own)) == own


def test_an_interrupt_passes_through():
    def reward(trace):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        as_reward(reward)(group("a"))


def test_a_result_keeps_its_parts_turn_scores_and_reasons():
    result = RewardResult(1, parts={"style": 1}, turn_scores=(True,), reasons=("fine",))
    [kept] = as_reward(lambda trace: result)(group("a"))
    assert kept == RewardResult(1.0, {"style": 1.0}, (1.0,), ("fine",))
    assert type(kept.parts["style"]) is float


def test_a_reward_may_be_called_from_many_threads():
    reward, results = as_reward(reward_exact_match), []
    threads = [
        threading.Thread(target=lambda: results.extend(reward(group("12", "13")))) for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [result.score for result in results] == [1.0, 0.0] * 8


# ---- answers


@pytest.mark.parametrize(
    ("answer", "gold"),
    [
        (12, "12"),
        ("12.00", 12),
        (12.0, "12"),
        (" $1,234.50 ", 1234.5),
        ("-$5", "\u22125"),
        ("$-5", -5),
        ("50 %", 50),
        ("5€", "€ 5"),
        (0.1 + 0.2, 0.3),
        (0.1 + 0.2 - 0.3, 0),
        ("1e3", 1000),
        ("12.", 12),
        ("'12'", "12"),
        ("  New   York. ", "new york"),
        ('"Paris."', "paris"),
        ("TRUE", True),
        (False, "false"),
        ([1, "two"], ["1.0", "Two"]),
        ("[1, 2]", (1, 2)),
        ('{"price": 3.0}', {"price": "3"}),
        ("12", ["eleven", 12]),
        (12, {11, 12}),
        ([1, None], [1, None]),
        ("9" * 5000, "9" * 5000),
    ],
)
def test_answers_that_match(answer, gold):
    assert answers_match(answer, gold)


@pytest.mark.parametrize(
    ("answer", "gold"),
    [
        ("12 apples", 12),
        ("13", 12),
        (1_000_000, 1_000_001),
        ("50%", 0.5),
        ("$5", "5%"),
        ("1,2", 12),
        ("twelve", 12),
        (True, 1),
        ("1", True),
        ("", "12"),
        (None, "none"),
        ("inf", 1e308),
        ([1, 2], [2, 1]),
        ([1], [1, 2]),
        ({"a": 1}, {"a": 1, "b": 2}),
        ("[1, 2", [1, 2]),
        ("[" * 5000, [1]),
        ("12", []),
        ([12], 12),
        pytest.param(10**5000, 12, id="huge"),
    ],
)
def test_answers_that_do_not_match(answer, gold):
    assert not answers_match(answer, gold)


NUMBERS = st.integers() | st.floats(allow_nan=False, allow_infinity=False)


@given(NUMBERS, NUMBERS)
def test_matching_numbers_is_symmetric(a, b):
    assert answers_match(a, b) == answers_match(b, a)


@given(NUMBERS, NUMBERS)
def test_a_number_and_its_text_mean_the_same(a, b):
    assert answers_match(str(a), a)
    assert answers_match(str(a), str(b)) == answers_match(a, b)


@given(st.integers(-(10**12), 10**12), st.integers(-(10**12), 10**12))
def test_whole_numbers_match_only_when_equal(a, b):
    assert answers_match(f"{a:,}", b) == (a == b)


@given(st.text() | st.lists(st.text() | NUMBERS | st.booleans() | st.none()))
def test_every_answer_matches_itself(answer):
    assert answers_match(answer, answer)


# ---- built-in rewards


def test_only_the_policys_own_final_answer_counts():
    call = ToolCall("1", "add", {"a": 5, "b": 7})
    turn = Turn(messages=(), text="add(5, 7)", calls=(call,), results=(ToolResult("1", 12),))
    assert not is_correct(Trace(turns=(turn,), final_answer="13"), "12")
    assert not is_correct(Trace(turns=(turn,)), "12")
    assert is_correct(Trace(turns=(turn,), final_answer=12), "12")
    failed = Trace(turns=(turn,), final_answer=12, error=Failure("agent", "crashed"))
    assert reward_exact_match(failed, "12") == 0.0


def test_exact_match_without_a_gold_answer_is_a_failure():
    [result] = as_reward(reward_exact_match)(group("12", task=Task("t1", "q")))
    assert "gold_answer" in result.failure.message
    with pytest.raises(ValueError, match="gold_answer"):
        reward_exact_match(Trace(final_answer="12"), None)


def acting(*calls, error=None):
    """A turn with calls given as (name, error or None)."""
    made = tuple(ToolCall(str(i), name) for i, (name, _) in enumerate(calls))
    results = tuple(ToolResult(str(i), error=error) for i, (_, error) in enumerate(calls))
    return Turn(messages=(), text="", calls=made, results=results, error=error)


def test_tool_success_is_the_share_of_acts_that_worked():
    raised = Failure("execution", "NameError")
    assert reward_tool_execution_success(Trace()) == 0.0
    assert reward_tool_execution_success(Trace((acting(("final_answer", None)),))) == 0.0
    assert reward_tool_execution_success(Trace((acting(("add", None)),))) == 1.0
    assert reward_tool_execution_success(Trace((acting(("add", None), ("add", "no")),))) == 0.5
    unparsed = acting(error=Failure("format", "no code"))
    assert reward_tool_execution_success(Trace((unparsed, acting(("add", None))))) == 0.5
    # The call that failed and the code that it ended are one failed act.
    once = acting(("add", None), ("add", "no"), error=raised)
    assert reward_tool_execution_success(Trace((once,))) == 0.5


def test_a_call_that_never_returned_failed():
    turn = Turn(messages=(), text="", calls=(ToolCall("1", "sleep"),))
    assert reward_tool_execution_success(Trace((turn,))) == 0.0


def test_fewer_turns_are_better_and_no_answer_is_worth_nothing():
    def efficiency(n, **options):
        turns = tuple(Turn(messages=(), text="") for _ in range(n))
        return reward_step_efficiency(Trace(turns, final_answer="x"), **options)

    assert [efficiency(n) for n in (1, 2, 4)] == [1.0, 0.5, 0.25]
    assert [efficiency(n, max_turns=4) for n in (1, 2, 4, 5)] == [1.0, 0.75, 0.25, 0.25]
    assert reward_step_efficiency(Trace((Turn(messages=(), text=""),))) == 0.0
    failed = Trace(final_answer="x", error=Failure("agent", "crashed"))
    assert reward_step_efficiency(failed) == 0.0
    with pytest.raises(ValueError, match="max_turns"):
        efficiency(1, max_turns=0)


def test_the_built_in_rewards_are_found_by_name():
    from toolbrain_core.plugins import PluginManager

    rewards = PluginManager.with_plugins().registries["rewards"]
    assert rewards.get("exact-match") is reward_exact_match
    assert rewards.get("step_efficiency") is reward_step_efficiency
