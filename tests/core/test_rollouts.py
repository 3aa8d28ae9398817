"""Attempts become scored groups: in order, many at once, recorded to the token."""

import asyncio
import threading
import time

import pytest

from toolbrain_core.errors import ConfigurationError
from toolbrain_core.testing.scripted import FunctionAgent, ScriptedPolicy
from toolbrain_core.traces import RewardResult, Sampling


def test_groups_come_in_task_order_with_attempts_numbered(rollouts, run, traces):
    def slow_first(ask, task):
        time.sleep(0.2 if task.id == "a" else 0)
        return ask(task.query)

    finished = []
    groups = run(rollouts(FunctionAgent(slow_first)), attempts=3, on_group=finished.append)
    assert [g.task.id for g in groups] == ["a", "b"]
    assert [[r.attempt for r in g.rollouts] for g in groups] == [[0, 1, 2], [0, 1, 2]]
    assert [g.task.id for g in finished] == ["b", "a"]
    assert all(trace.final_answer == "reply 0" for trace in traces(groups))


def test_turns_record_what_was_sampled_with_the_sampling_that_was_asked_for(
    rollouts, run, traces, ask_once
):
    sampling = Sampling(temperature=0.7, max_new_tokens=9)
    [trace, *_] = traces(run(rollouts(FunctionAgent(ask_once)), sampling=sampling))
    [turn] = trace.turns
    assert "".join(map(chr, turn.completion_ids)) == "reply 0"
    assert "".join(map(chr, turn.prompt_ids)) == "question a"
    assert turn.sampling == sampling
    assert trace.usage.completion_tokens == len("reply 0")


def test_first_attempt_and_repeated_tasks_give_every_attempt_a_key_of_its_own(
    rollouts, run, ask_once
):
    keys = []
    policy = ScriptedPolicy(lambda request, key, turn: keys.append(key) or "x")
    runner = rollouts(FunctionAgent(ask_once), policy)
    run(runner, "aa", attempts=2)
    run(runner, "a", attempts=2, first_attempt=4)
    assert sorted(key.attempt for key in keys) == [0, 1, 2, 3, 4, 5]
    assert len({key.turn_seed(0) for key in keys}) == 6


def test_eight_attempts_whose_tools_meet_at_a_barrier_all_finish(rollouts, run, traces):
    barrier = threading.Barrier(8)

    def meet():
        return barrier.wait(timeout=20) >= 0

    def agent(ask, task):
        ask(task.query)
        return ask.call("meet")

    groups = run(rollouts(FunctionAgent(agent, [meet])), "a", attempts=8)
    assert [trace.final_answer for trace in traces(groups)] == [True] * 8


def test_concurrency_bounds_the_attempts_at_once(rollouts, run):
    active, most, lock = 0, 0, threading.Lock()

    def agent(ask, task):
        nonlocal active, most
        with lock:
            active += 1
            most = max(most, active)
        time.sleep(0.03)
        with lock:
            active -= 1

    run(rollouts(FunctionAgent(agent), concurrency=3), attempts=6)
    assert most == 3


def test_eight_async_attempts_with_async_tools_run_at_once(rollouts, run, traces):
    barrier = threading.Barrier(8)

    async def fetch(url):
        await asyncio.sleep(0.05)
        await asyncio.to_thread(barrier.wait, 20)
        return f"page {url}"

    async def agent(ask, task):
        await ask(task.query)
        return await ask.call("fetch", url=task.id)

    groups = run(rollouts(FunctionAgent(agent, [fetch])), "a", attempts=8)
    assert [trace.final_answer for trace in traces(groups)] == ["page a"] * 8
    assert [trace.calls[0].arguments for trace in traces(groups)] == [{"url": "a"}] * 8


def test_scoring_overlaps_the_rollouts_of_other_groups(rollouts, run):
    scored_a = threading.Event()

    def agent(ask, task):
        # b's attempt can only end once a was scored
        return scored_a.wait(20) if task.id == "b" else True

    def reward(group):
        if group.task.id == "a":
            scored_a.set()
        return [RewardResult(float(r.trace.final_answer)) for r in group.rollouts]

    groups = run(rollouts(FunctionAgent(agent), reward=reward))
    assert [g.scores for g in groups] == [(1.0, 1.0), (1.0, 1.0)]


def test_the_policy_serves_during_a_run_only(rollouts, run, traces, ask_once):
    policy = ScriptedPolicy(lambda request, key, turn: str(policy.serving_now))
    groups = run(rollouts(FunctionAgent(ask_once), policy))
    assert {trace.final_answer for trace in traces(groups)} == {"1"}
    assert policy.serving_now == 0


def test_observe_replaces_what_the_policy_sees(rollouts, run, traces):
    def observe(trace, messages):
        return [{"role": "user", "content": f"state after {len(trace.turns)} turns"}]

    def agent(ask, task):
        ask(task.query)
        return ask("more")

    [trace] = traces(run(rollouts(FunctionAgent(agent), observe=observe), "a", 1))
    prompts = ["".join(map(chr, turn.prompt_ids)) for turn in trace.turns]
    assert prompts == ["state after 0 turns", "state after 1 turns"]


@pytest.mark.parametrize(
    "wrong", [{"concurrency": 0}, {"time_limit": 0}, {"make_agent": object}, {"agent": None}]
)
def test_settings_that_cannot_be_used_are_refused(wrong, rollouts, ask_once):
    with pytest.raises(ConfigurationError):
        rollouts(**{"agent": FunctionAgent(ask_once), **wrong})
