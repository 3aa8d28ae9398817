"""Attempts share nothing that they write to, and leave the agent as it was."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

from smolagents import CodeAgent, Tool, ToolCallingAgent
from toolbrain_smolagents import SmolagentsAdapter

from toolbrain_core.traces import Task


class Counter(Tool):
    name, description, output_type = "count", "Counts its calls.", "integer"
    inputs = {}  # noqa: RUF012

    def __init__(self):
        super().__init__()
        self.calls = 0
        self.set_up = 0

    def setup(self):
        self.set_up += 1
        self.is_initialized = True

    def forward(self) -> int:
        self.calls += 1
        return self.calls


class ForkedCounter(Counter):
    def fork(self):
        return type(self)()


def test_the_agent_is_left_as_it_was(model, price, run, block):
    seen = []
    agent = CodeAgent(tools=[price], model=model, step_callbacks=[seen.append])
    agent.state["basket"] = ["mug"]
    before = dict(vars(agent))
    tools, callbacks = (
        dict(agent.tools),
        {k: list(v) for k, v in agent.step_callbacks._callbacks.items()},
    )
    executor = dict(agent.python_executor.state)
    trace = run(agent, [block("basket.append('lamp')\nx = 1"), block("final_answer(len(basket))")])
    assert trace.final_answer == 2
    assert vars(agent) == before
    assert agent.tools == tools
    assert agent.step_callbacks._callbacks == callbacks
    assert agent.python_executor.state == executor
    assert agent.state == {"basket": ["mug"]}
    assert agent.memory.steps == []
    assert agent.monitor.step_durations == []
    assert type(agent.tools["price"]) is type(price)
    assert len(seen) == 2


def test_state_that_cannot_be_copied_is_shared(code_agent, run, block):
    code_agent.state["lock"] = threading.Lock()
    assert run(code_agent, [block("final_answer(1)")]).final_answer == 1


def test_attempts_do_not_see_each_others_variables(code_agent, run, block):
    assert run(code_agent, [block("x = 1\nfinal_answer(x)")]).final_answer == 1
    trace = run(code_agent, [block("print(x)"), block("final_answer(0)")])
    assert trace.turns[0].error.kind == "execution"


def test_tools_are_shared_unless_they_fork(model, run, block):
    shared, forked = Counter(), ForkedCounter()
    for counter, answers in ((shared, [1, 2]), (forked, [1, 1])):
        agent = CodeAgent(tools=[counter], model=model)
        assert [run(agent, [block("final_answer(count())")]).final_answer for _ in "ab"] == answers
    assert (shared.calls, shared.set_up) == (2, 1)
    assert (forked.calls, forked.set_up) == (0, 0)


def test_eight_attempts_meet_at_a_barrier(model, session_of, block):
    barrier = threading.Barrier(8, timeout=20)

    class Meet(Counter):
        name, description = "meet", "Waits for the others."

        def forward(self) -> int:
            return 1 + (barrier.wait() >= 0)

    agent = CodeAgent(tools=[Meet()], model=model)
    adapter = SmolagentsAdapter()

    def attempt(i):
        session = session_of([block("final_answer(meet())")])
        return adapter.run(agent, Task(str(i), "Meet."), session)

    with ThreadPoolExecutor(8) as pool:
        traces = list(pool.map(attempt, range(8)))
    assert [t.final_answer for t in traces] == [2] * 8
    assert all([c.name for c in t.calls] == ["meet", "final_answer"] for t in traces)


def test_methods_bound_to_the_agent_are_the_copys(model, price, run, block):
    class Watching(CodeAgent):
        def __init__(self, **kwargs):
            super().__init__(step_callbacks=[self.watch], **kwargs)
            self.watched = ()

        def watch(self, step):
            self.watched = (*self.watched, step.step_number)

    agent = Watching(tools=[price], model=model)
    run(agent, [block("final_answer(1)")])
    assert agent.watched == ()


def test_an_agent_that_ran_before_starts_fresh(code_agent, run, block):
    code_agent.run("Something else.")
    assert len(code_agent.memory.steps) > 1
    trace = run(code_agent, [block("final_answer(7)")])
    assert [m["role"] for m in trace.turns[0].messages] == ["system", "user"]


def test_json_agents_keep_their_own_state(model, price, run, as_json):
    agent = ToolCallingAgent(tools=[price], model=model)
    agent.state["thing"] = "mug"
    trace = run(agent, [as_json("price", item="thing"), as_json("final_answer", answer=7)])
    assert trace.results[0].output == 7
    assert dict(trace.calls[0].arguments) == {"item": "thing"}  # as the policy wrote it
