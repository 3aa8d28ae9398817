"""Attempts: isolated, many at once, late ones abandoned, failures kept as data."""

import asyncio
import contextvars
import itertools
import os
import signal
import sqlite3
import subprocess
import sys
import textwrap
import threading
import time

import pytest

from toolbrain_core.errors import ConfigurationError, ContextOverflow, SamplerFailure
from toolbrain_core.rollouts import Rollouts
from toolbrain_core.testing.scripted import (
    AgentMistake,
    FunctionAdapter,
    FunctionAgent,
    ScriptedPolicy,
)
from toolbrain_core.traces import RewardResult, Sampling, Task

TASKS = [Task("a", "first question"), Task("b", "second question")]


def rollouts(agent=None, policy=None, **options):
    policy = policy or ScriptedPolicy(lambda request, key, turn: f"reply {turn}")
    return Rollouts(adapter=FunctionAdapter(), agent=agent, policy=policy, **options)


def run(runner, tasks=TASKS, attempts=2, **options):
    return runner.run(tasks, attempts, run_name="test", iteration=0, seed=1, **options)


def traces(groups):
    return [rollout.trace for group in groups for rollout in group.rollouts]


def ask_once(ask, task):
    return ask(task.query)


def test_groups_come_in_task_order_with_attempts_numbered():
    def slow_first(ask, task):
        time.sleep(0.2 if task.id == "a" else 0)
        return ask(task.query)

    finished = []
    groups = run(rollouts(FunctionAgent(slow_first)), attempts=3, on_group=finished.append)
    assert [g.task.id for g in groups] == ["a", "b"]
    assert [[r.attempt for r in g.rollouts] for g in groups] == [[0, 1, 2], [0, 1, 2]]
    assert [g.task.id for g in finished] == ["b", "a"]
    assert all(trace.final_answer == "reply 0" for trace in traces(groups))


def test_turns_record_what_was_sampled_with_the_sampling_that_was_asked_for():
    sampling = Sampling(temperature=0.7, max_new_tokens=9)
    [trace, *_] = traces(run(rollouts(FunctionAgent(ask_once)), sampling=sampling))
    [turn] = trace.turns
    assert "".join(map(chr, turn.completion_ids)) == "reply 0"
    assert "".join(map(chr, turn.prompt_ids)) == "first question"
    assert turn.sampling == sampling
    assert trace.usage.completion_tokens == len("reply 0")


def test_first_attempt_and_repeated_tasks_give_every_attempt_a_key_of_its_own():
    keys = []
    policy = ScriptedPolicy(lambda request, key, turn: keys.append(key) or "x")
    runner = rollouts(FunctionAgent(ask_once), policy)
    run(runner, [TASKS[0], TASKS[0]], attempts=2)
    run(runner, [TASKS[0]], attempts=2, first_attempt=4)
    assert sorted(key.attempt for key in keys) == [0, 1, 2, 3, 4, 5]
    assert len({key.turn_seed(0) for key in keys}) == 6


def test_eight_attempts_whose_tools_meet_at_a_barrier_all_finish():
    barrier = threading.Barrier(8)

    def meet():
        return barrier.wait(timeout=20) >= 0

    def agent(ask, task):
        ask(task.query)
        return ask.call("meet")

    groups = run(rollouts(FunctionAgent(agent, [meet])), [TASKS[0]], attempts=8)
    assert [trace.final_answer for trace in traces(groups)] == [True] * 8


def test_concurrency_bounds_the_attempts_at_once():
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


class Counter:
    """A tool that keeps state."""

    def __init__(self):
        self.value = 0

    def __call__(self, step):
        self.value += step
        return self.value


class ForkingCounter(Counter):
    def fork(self):
        return ForkingCounter()


def count_three_times(ask, task):
    ask(task.query)
    return [ask.call(name, step=1) for name in ask.tools for _ in range(3)]


def test_make_agent_gives_each_attempt_a_counter_of_its_own():
    runner = rollouts(make_agent=lambda: FunctionAgent(count_three_times, [Counter()]))
    answers = [trace.final_answer for trace in traces(run(runner, attempts=4))]
    assert answers == [[1, 2, 3]] * 8


def test_tools_with_fork_are_fresh_in_each_attempt_and_others_are_shared():
    forked = traces(run(rollouts(FunctionAgent(count_three_times, [ForkingCounter()]))))
    assert [trace.final_answer for trace in forked] == [[1, 2, 3]] * 4
    shared = Counter()
    run(rollouts(FunctionAgent(count_three_times, [shared])))
    assert shared.value == 12


def test_sqlite_connections_made_per_attempt_by_make_agent_stay_in_their_thread():
    def make_agent():
        connection = sqlite3.connect(":memory:")  # refuses use from another thread
        connection.execute("create table notes (text)")

        def note(text):
            connection.execute("insert into notes values (?)", (text,))
            return connection.execute("select count(*) from notes").fetchone()[0]

        def agent(ask, task):
            ask(task.query)
            return [ask.call("note", text=task.id), ask.call("note", text="again")]

        return FunctionAgent(agent, [note])

    groups = run(rollouts(make_agent=make_agent), [TASKS[0]], attempts=8)
    assert [trace.final_answer for trace in traces(groups)] == [[1, 2]] * 8


def test_setup_and_teardown_share_the_attempts_context_with_its_tools():
    connection = contextvars.ContextVar("connection")
    closed = []

    def setup(task):
        connection.set(sqlite3.connect(":memory:"))
        connection.get().execute("create table notes (text)")

    def note():
        connection.get().execute("insert into notes values ('x')")
        return connection.get().execute("select count(*) from notes").fetchone()[0]

    def teardown(trace):
        connection.get().close()
        closed.append(trace)

    def agent(ask, task):
        ask(task.query)
        return ask.call("note")

    runner = rollouts(FunctionAgent(agent, [note]), setup=setup, teardown=teardown)
    done = traces(run(runner, [TASKS[0]], attempts=8))
    assert [trace.final_answer for trace in done] == [1] * 8
    assert sorted(map(id, closed)) == sorted(map(id, done))


def test_attempts_see_the_callers_context():
    who = contextvars.ContextVar("who")
    who.set("caller")
    groups = run(rollouts(FunctionAgent(lambda ask, task: who.get())))
    assert {trace.final_answer for trace in traces(groups)} == {"caller"}


def test_eight_async_attempts_with_async_tools_run_at_once():
    barrier = threading.Barrier(8)

    async def fetch(url):
        await asyncio.sleep(0.05)
        await asyncio.to_thread(barrier.wait, 20)
        return f"page {url}"

    async def agent(ask, task):
        await ask(task.query)
        return await ask.call("fetch", url=task.id)

    groups = run(rollouts(FunctionAgent(agent, [fetch])), [TASKS[0]], attempts=8)
    assert [trace.final_answer for trace in traces(groups)] == ["page a"] * 8
    assert [trace.calls[0].arguments for trace in traces(groups)] == [{"url": "a"}] * 8


def test_an_exception_of_the_adapter_is_an_infrastructure_failure_that_keeps_the_turns():
    def agent(ask, task):
        ask(task.query)
        raise ConnectionError("the database is gone")

    for trace in traces(run(rollouts(FunctionAgent(agent)))):
        assert trace.error.kind == "infrastructure"
        assert trace.error.exception == "ConnectionError"
        assert "the database is gone" in trace.error.traceback
        assert len(trace.turns) == 1
        assert trace.final_answer is None


def test_sys_exit_in_an_agent_ends_its_attempt_only():
    def agent(ask, task):
        if task.id == "a":
            sys.exit(3)
        return "fine"

    first, second = run(rollouts(FunctionAgent(agent)), attempts=1)
    assert first.rollouts[0].trace.error.exception == "SystemExit"
    assert second.rollouts[0].trace.final_answer == "fine"


def test_the_agents_own_mistakes_keep_their_kind():
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
def test_a_session_failure_survives_an_agent_that_swallows_it(raised, kind):
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


def test_a_setup_that_raises_is_an_infrastructure_failure_and_teardown_still_runs():
    torn_down = []

    def setup(task):
        if task.id == "a":
            raise OSError("no such database")

    runner = rollouts(FunctionAgent(ask_once), setup=setup, teardown=torn_down.append)
    first, second = traces(run(runner, attempts=1))
    assert first.error.kind == "infrastructure"
    assert second.final_answer == "reply 0"
    assert len(torn_down) == 2


def test_a_teardown_that_raises_is_logged_and_the_result_stays(caplog):
    def teardown(trace):
        raise OSError("cannot drop the table")

    [trace] = traces(run(rollouts(FunctionAgent(ask_once), teardown=teardown), [TASKS[0]], 1))
    assert trace.final_answer == "reply 0"
    assert trace.error is None
    assert "cannot drop the table" in caplog.text


def test_a_result_survives_a_teardown_that_hangs():
    runner = rollouts(
        FunctionAgent(ask_once), teardown=lambda trace: time.sleep(60), time_limit=0.3
    )
    [trace] = traces(run(runner, [TASKS[0]], 1))
    assert trace.final_answer == "reply 0"
    assert runner.abandoned == 1


def test_a_hanging_attempt_is_abandoned_and_frees_its_slot():
    def agent(ask, task):
        answer = ask(task.query)
        if task.id == "a":
            time.sleep(60)
        return answer

    runner = rollouts(FunctionAgent(agent), time_limit=0.5, concurrency=2)
    started = time.monotonic()
    hung, fine = run(runner)
    assert time.monotonic() - started < 5
    assert [r.trace.error.kind for r in hung.rollouts] == ["time_limit"] * 2
    assert [len(r.trace.turns) for r in hung.rollouts] == [1, 1]
    assert [r.trace.final_answer for r in fine.rollouts] == ["reply 0"] * 2
    assert runner.abandoned == 2


def test_an_abandoned_attempt_unwinds_at_its_next_turn_past_broad_excepts_and_is_torn_down():
    torn_down, turns = threading.Event(), itertools.count()

    def agent(ask, task):
        while True:
            try:
                ask("again")
                next(turns)
                time.sleep(0.01)
            except Exception:
                pass

    runner = rollouts(FunctionAgent(agent), teardown=lambda trace: torn_down.set(), time_limit=0.2)
    [trace] = traces(run(runner, [TASKS[0]], 1))
    assert trace.error.kind == "time_limit"
    assert torn_down.wait(5)
    assert len(trace.turns) <= next(turns)


def test_an_abandoned_async_attempt_is_cancelled():
    cancelled = threading.Event()

    async def agent(ask, task):
        try:
            await asyncio.sleep(60)
        finally:
            cancelled.set()

    [trace] = traces(run(rollouts(FunctionAgent(agent), time_limit=0.2), [TASKS[0]], 1))
    assert trace.error.kind == "time_limit"
    assert cancelled.wait(5)


def test_scoring_overlaps_the_rollouts_of_other_groups():
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


@pytest.mark.parametrize("broken", [lambda group: 1 / 0, lambda group: [RewardResult(1.0)]])
def test_a_reward_that_breaks_its_contract_is_a_typed_failure_of_each_attempt(broken):
    for group in run(rollouts(FunctionAgent(ask_once), reward=broken)):
        assert group.scores == (None, None)
        assert {r.reward.failure.kind for r in group.rollouts} == {"reward"}


def test_the_policy_serves_during_a_run_only():
    policy = ScriptedPolicy(lambda request, key, turn: str(policy.serving_now))
    groups = run(rollouts(FunctionAgent(ask_once), policy))
    assert {trace.final_answer for trace in traces(groups)} == {"1"}
    assert policy.serving_now == 0


def test_observe_replaces_what_the_policy_sees():
    def observe(trace, messages):
        return [{"role": "user", "content": f"state after {len(trace.turns)} turns"}]

    def agent(ask, task):
        ask(task.query)
        return ask("more")

    [trace] = traces(run(rollouts(FunctionAgent(agent), observe=observe), [TASKS[0]], 1))
    prompts = ["".join(map(chr, turn.prompt_ids)) for turn in trace.turns]
    assert prompts == ["state after 0 turns", "state after 1 turns"]


def test_stop_closes_open_sessions_and_interrupts():
    stop, unwound = threading.Event(), threading.Event()

    def agent(ask, task):
        stop.set()
        try:
            while True:
                ask("again")
                time.sleep(0.01)
        finally:
            unwound.set()

    started = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        run(rollouts(FunctionAgent(agent)), [TASKS[0]], 1, stop=stop)
    assert time.monotonic() - started < 2
    assert unwound.wait(5)


def test_an_error_of_on_group_closes_what_still_runs():
    unwound = threading.Event()

    def agent(ask, task):
        try:
            while task.id == "b":
                ask("again")
                time.sleep(0.01)
        finally:
            if task.id == "b":
                unwound.set()

    def on_group(group):
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        run(rollouts(FunctionAgent(agent)), attempts=1, on_group=on_group)
    assert unwound.wait(5)


@pytest.mark.parametrize(
    "wrong", [{"concurrency": 0}, {"time_limit": 0}, {"make_agent": Counter}, {"agent": None}]
)
def test_settings_that_cannot_be_used_are_refused(wrong):
    with pytest.raises(ConfigurationError):
        rollouts(**{"agent": FunctionAgent(ask_once), **wrong})


SLEEPER = """
    import asyncio, sys, threading, time
    from toolbrain_core.rollouts import Rollouts
    from toolbrain_core.runs import interruptible
    from toolbrain_core.testing.scripted import FunctionAdapter, FunctionAgent, ScriptedPolicy
    from toolbrain_core.traces import Task

    def nap():
        print("asleep", flush=True)
        time.sleep(600)

    def agent(ask, task):
        ask(task.query)
        ask.call("nap")

    async def async_nap():
        await asyncio.to_thread(nap)

    async def async_agent(ask, task):
        await ask(task.query)
        await ask.call("async_nap")

    rollouts = Rollouts(
        adapter=FunctionAdapter(), agent=FunctionAgent({agent}, [nap, async_nap]),
        policy=ScriptedPolicy(["x"]),
        time_limit={time_limit},
    )
    stop = threading.Event()
    with interruptible(stop):
        try:
            rollouts.run(
                [Task("a", "q")], 1, run_name="r", iteration=0, seed=0, stop={stop},
            )
        except KeyboardInterrupt:
            sys.exit(130)
    sys.exit(7)
"""


def sleeper(**names):
    code = textwrap.dedent(SLEEPER.format(**names))
    return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)


@pytest.mark.parametrize("agent", ["agent", "async_agent"])
@pytest.mark.parametrize(("stop", "presses"), [("stop", 1), ("None", 2)])
def test_ctrl_c_with_a_tool_asleep_ends_the_process_within_seconds(stop, presses, agent):
    process = sleeper(time_limit=None, stop=stop, agent=agent)
    try:
        assert process.stdout.readline() == "asleep\n"
        started = time.monotonic()
        for _ in range(presses):
            os.kill(process.pid, signal.SIGINT)
            time.sleep(0.3)
        assert process.wait(timeout=5) == 130
        assert time.monotonic() - started < 5
    finally:
        process.kill()


@pytest.mark.parametrize("agent", ["agent", "async_agent"])
def test_an_abandoned_attempt_does_not_keep_the_interpreter_from_exiting(agent):
    process = sleeper(time_limit=0.5, stop="None", agent=agent)
    try:
        assert process.wait(timeout=10) == 7
    finally:
        process.kill()
