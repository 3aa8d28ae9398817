"""What goes wrong in an attempt, or after it, is kept as data."""

import sys

import pytest

from toolbrain_core.errors import ContextOverflow, SamplerFailure
from toolbrain_core.testing.scripted import AgentMistake, FunctionAgent, ScriptedPolicy
from toolbrain_core.traces import RewardResult


def test_an_exception_of_the_adapter_is_an_infrastructure_failure_that_keeps_the_turns(
    rollouts, run, traces
):
    def agent(ask, task):
        ask(task.query)
        raise ConnectionError("the database is gone")

    for trace in traces(run(rollouts(FunctionAgent(agent)))):
        assert trace.error.kind == "infrastructure"
        assert trace.error.exception == "ConnectionError"
        assert "the database is gone" in trace.error.traceback
        assert len(trace.turns) == 1
        assert trace.final_answer is None


def test_sys_exit_in_an_agent_ends_its_attempt_only(rollouts, run):
    def agent(ask, task):
        if task.id == "a":
            sys.exit(3)
        return "fine"

    first, second = run(rollouts(FunctionAgent(agent)), attempts=1)
    assert first.rollouts[0].trace.error.exception == "SystemExit"
    assert second.rollouts[0].trace.final_answer == "fine"


def test_the_agents_own_mistakes_keep_their_kind(rollouts, run, traces):
    def agent(ask, task):
        ask(task.query)
        if task.id == "a":
            ask.call("missing")
        raise AgentMistake("format", "no answer in the reply")

    first, second = traces(run(rollouts(FunctionAgent(agent)), attempts=1))
    assert first.error.kind == "tool"
    assert "missing" in first.results[0].error
    assert second.error.kind == "format"
    assert not second.well_formed


@pytest.mark.parametrize(
    ("raised", "kind"),
    [(ContextOverflow, "context_overflow"), (SamplerFailure, "infrastructure")],
)
def test_a_session_failure_survives_an_agent_that_swallows_it(raised, kind, rollouts, run, traces):
    def replies(request, key, turn):
        if turn == 1:
            raise raised("no room")
        return "fine"

    def agent(ask, task):
        ask(task.query)
        try:
            return ask("more")
        except Exception:
            return "all is well"

    for trace in traces(run(rollouts(FunctionAgent(agent), ScriptedPolicy(replies)))):
        assert (trace.error.kind, trace.error.message) == (kind, "no room")
        assert trace.final_answer is None
        assert len(trace.turns) == 1


def test_a_setup_that_raises_is_an_infrastructure_failure_and_teardown_still_runs(
    rollouts, run, traces, ask_once
):
    torn_down = []

    def setup(task):
        if task.id == "a":
            raise OSError("no such database")

    runner = rollouts(FunctionAgent(ask_once), setup=setup, teardown=torn_down.append)
    first, second = traces(run(runner, attempts=1))
    assert first.error.kind == "infrastructure"
    assert second.final_answer == "reply 0"
    assert len(torn_down) == 2


def test_a_teardown_that_raises_is_logged_and_the_result_stays(
    caplog, rollouts, run, traces, ask_once
):
    def teardown(trace):
        raise OSError("cannot drop the table")

    [trace] = traces(run(rollouts(FunctionAgent(ask_once), teardown=teardown), "a", 1))
    assert trace.final_answer == "reply 0"
    assert trace.error is None
    assert "cannot drop the table" in caplog.text


@pytest.mark.parametrize("broken", [lambda group: 1 / 0, lambda group: [RewardResult(1.0)]])
def test_a_reward_that_breaks_its_contract_is_a_typed_failure_of_each_attempt(
    broken, rollouts, run, ask_once
):
    for group in run(rollouts(FunctionAgent(ask_once), reward=broken)):
        assert group.scores == (None, None)
        assert {r.reward.failure.kind for r in group.rollouts} == {"reward"}
