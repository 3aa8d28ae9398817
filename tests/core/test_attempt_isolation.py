"""What attempts share, and what each of them has to itself."""

import contextvars
import sqlite3

from toolbrain_core.testing.scripted import FunctionAgent


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


def test_make_agent_gives_each_attempt_a_counter_of_its_own(rollouts, run, traces):
    runner = rollouts(make_agent=lambda: FunctionAgent(count_three_times, [Counter()]))
    answers = [trace.final_answer for trace in traces(run(runner, attempts=4))]
    assert answers == [[1, 2, 3]] * 8


def test_tools_with_fork_are_fresh_in_each_attempt_and_others_are_shared(rollouts, run, traces):
    forked = traces(run(rollouts(FunctionAgent(count_three_times, [ForkingCounter()]))))
    assert [trace.final_answer for trace in forked] == [[1, 2, 3]] * 4
    shared = Counter()
    run(rollouts(FunctionAgent(count_three_times, [shared])))
    assert shared.value == 12


def test_sqlite_connections_made_per_attempt_by_make_agent_stay_in_their_thread(
    rollouts, run, traces
):
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

    groups = run(rollouts(make_agent=make_agent), "a", attempts=8)
    assert [trace.final_answer for trace in traces(groups)] == [[1, 2]] * 8


def test_setup_and_teardown_share_the_attempts_context_with_its_tools(rollouts, run, traces):
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
    done = traces(run(runner, "a", attempts=8))
    assert [trace.final_answer for trace in done] == [1] * 8
    assert sorted(map(id, closed)) == sorted(map(id, done))


def test_attempts_see_the_callers_context(rollouts, run, traces):
    who = contextvars.ContextVar("who")
    who.set("caller")
    groups = run(rollouts(FunctionAgent(lambda ask, task: who.get())))
    assert {trace.final_answer for trace in traces(groups)} == {"caller"}
