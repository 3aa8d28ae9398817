"""The probe: tools that keep state are found before training, and named."""

import itertools
import threading
import time

import pytest

from toolbrain_core.probe import conflicting_results, probe_statefulness
from toolbrain_core.rollouts import Rollouts
from toolbrain_core.testing.scripted import FunctionAdapter, FunctionAgent, ScriptedPolicy
from toolbrain_core.traces import Group, Task

TASKS = [Task(str(n), f"question {n}") for n in range(5)]


def calls_next(ask, task):
    ask(task.query)
    ask.call("double", n=4)
    return ask.call("next_number")


def double(n):
    return 2 * n


def counter():
    numbers = itertools.count(1)

    def next_number():
        return next(numbers)

    return next_number


def rollouts(**options):
    policy = ScriptedPolicy(lambda request, key, turn: "x")
    return Rollouts(adapter=FunctionAdapter(), policy=policy, **options)


def test_a_tool_that_keeps_state_is_named_with_both_results_and_the_remedy():
    stateful = rollouts(agent=FunctionAgent(calls_next, [double, counter()]))
    found = probe_statefulness(stateful, TASKS, seed=1)
    assert "'next_number'" in found
    assert "next_number()" in found
    assert "1 and 2" in found
    assert "'double'" not in found
    for remedy in ("make_agent", "fork()", "setup="):
        assert remedy in found


def test_nothing_is_found_where_each_attempt_has_its_own_tools():
    fresh = rollouts(make_agent=lambda: FunctionAgent(calls_next, [double, counter()]))
    assert probe_statefulness(fresh, TASKS, seed=1) is None


def test_a_tool_that_starts_to_fail_counts_as_a_difference():
    used = threading.Event()

    def once():
        if used.is_set():
            raise RuntimeError("already used")
        used.set()
        return "done"

    def agent(ask, task):
        ask(task.query)
        return ask.call("once")

    found = probe_statefulness(rollouts(agent=FunctionAgent(agent, [once])), TASKS, seed=1)
    assert '"done" and the error' in found
    assert "already used" in found


def test_other_calls_after_a_different_reply_are_not_compared():
    replies = itertools.count()
    policy = ScriptedPolicy(lambda request, key, turn: str(next(replies)))

    def agent(ask, task):
        return ask.call("double", n=int(ask(task.query)))

    runner = Rollouts(
        adapter=FunctionAdapter(), policy=policy, agent=FunctionAgent(agent, [double])
    )
    assert probe_statefulness(runner, TASKS, seed=1) is None


def test_the_probe_ends_when_it_is_asked_to_stop_whatever_its_tools_do():
    stop, asleep = threading.Event(), threading.Event()

    def sleeper(ask, task):
        asleep.set()
        stop.set()
        time.sleep(3600)

    rollouts = Rollouts(
        adapter=FunctionAdapter(), agent=FunctionAgent(sleeper), policy=ScriptedPolicy(["x"])
    )
    with pytest.raises(KeyboardInterrupt):
        probe_statefulness(rollouts, [Task("a", "?")], stop=stop)
    assert asleep.is_set()


def test_at_most_three_tasks_are_tried_each_twice_greedily_and_unscored():
    seen = []

    def agent(ask, task):
        ask(task.query)
        seen.append((task.id, ask.session.key.attempt, ask.session.sampling.temperature))

    runner = rollouts(agent=FunctionAgent(agent), reward=lambda group: pytest.fail("scored"))
    assert probe_statefulness(runner, TASKS, seed=1) is None
    assert seen == [(str(n), 0, 0.0) for n in (0, 0, 1, 1, 2, 2)]
    assert runner.reward is not None


def run_group(tool, attempts=4):
    def agent(ask, task):
        number = ask.session.key.attempt // 2  # two attempts each make the same first call
        ask(task.query)
        return ask.call(tool.__name__, n=number)

    runner = rollouts(agent=FunctionAgent(agent, [tool]))
    [group] = runner.run(TASKS[:1], attempts, run_name="r", iteration=0, seed=0)
    return group


def test_first_calls_that_are_alike_but_answered_differently_are_reported_once_each():
    numbers = itertools.count(1)

    def draw(n):
        return next(numbers)

    found = conflicting_results(run_group(draw, attempts=6))
    assert len(found) == 3
    assert all("draw(n=" in message for message in found)


def test_a_group_whose_answers_depend_on_the_arguments_only_has_no_conflicts():
    assert conflicting_results(run_group(double)) == []
    assert conflicting_results(Group(TASKS[0], ())) == []
