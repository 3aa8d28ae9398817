"""Late attempts and interrupted runs: nobody waits for them, and nothing keeps running."""

import asyncio
import itertools
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time

import pytest

from toolbrain_core.testing.scripted import FunctionAgent


def test_a_result_survives_a_teardown_that_hangs(rollouts, run, traces, ask_once):
    runner = rollouts(
        FunctionAgent(ask_once), teardown=lambda trace: time.sleep(60), time_limit=0.3
    )
    [trace] = traces(run(runner, "a", 1))
    assert trace.final_answer == "reply 0"
    assert runner.abandoned == 1


def test_a_hanging_attempt_is_abandoned_and_frees_its_slot(rollouts, run):
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


def test_an_abandoned_attempt_unwinds_at_its_next_turn_past_broad_excepts_and_is_torn_down(
    rollouts, run, traces
):
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
    [trace] = traces(run(runner, "a", 1))
    assert trace.error.kind == "time_limit"
    assert torn_down.wait(5)
    assert len(trace.turns) <= next(turns)


def test_an_abandoned_async_attempt_is_cancelled(rollouts, run, traces):
    cancelled = threading.Event()

    async def agent(ask, task):
        try:
            await asyncio.sleep(60)
        finally:
            cancelled.set()

    [trace] = traces(run(rollouts(FunctionAgent(agent), time_limit=0.2), "a", 1))
    assert trace.error.kind == "time_limit"
    assert cancelled.wait(5)


def test_stop_closes_open_sessions_and_interrupts(rollouts, run):
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
        run(rollouts(FunctionAgent(agent)), "a", 1, stop=stop)
    assert time.monotonic() - started < 2
    assert unwound.wait(5)


def test_an_error_of_on_group_closes_what_still_runs(rollouts, run):
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
