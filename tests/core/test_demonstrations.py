from __future__ import annotations

import pytest

from toolbrain_core.demonstrations import as_demonstrations, first_request
from toolbrain_core.errors import DataError
from toolbrain_core.testing.scripted import FunctionAdapter, FunctionAgent
from toolbrain_core.traces import Demonstration, Rollout, Task, Trace

ADAPTER = FunctionAdapter()
TALK = [
    {"role": "user", "content": "2 + 2?"},
    {"role": "assistant", "content": "4"},
]


def swallowing(ask, task):
    """An agent that asks twice and catches what its model raises."""
    for _ in range(2):
        try:
            ask(f"Please: {task.query}")
        except Exception:
            continue
    return "?"


async def asking(ask, task):
    return await ask(f"Please: {task.query}")


AGENT = FunctionAgent(swallowing)


def made(*items, agent=AGENT, observe=None):
    return as_demonstrations(items, ADAPTER, agent, observe)


def test_a_conversation_is_kept_as_it_is():
    [demonstration] = made({"query": "2 + 2?", "messages": TALK, "id": "sum", "level": 1})
    assert demonstration == Demonstration(
        Task("sum", "2 + 2?", metadata={"level": 1}), messages=tuple(TALK)
    )


@pytest.mark.parametrize("agent", [AGENT, FunctionAgent(asking)])
def test_a_completion_answers_the_agents_own_first_request(agent):
    [demonstration] = made({"query": "2 + 2?", "completion": "4", "gold_answer": 4}, agent=agent)
    prompt = {"role": "user", "content": "Please: 2 + 2?"}
    assert demonstration.messages == (prompt, {"role": "assistant", "content": "4"})
    assert demonstration.metadata["turns"] == [{"messages": [prompt], "text": "4"}]
    assert demonstration.task == Task("0", "2 + 2?", gold_answer=4)


def test_a_completion_is_of_what_the_policy_would_see():
    def observe(trace, messages):
        return [{"role": "system", "content": "short"}, *messages]

    [demonstration] = made({"query": "2 + 2?", "completion": "4"}, observe=observe)
    assert [m["role"] for m in demonstration.messages] == ["system", "user", "assistant"]


def test_demonstrations_and_rollouts_pass_and_may_be_mixed_with_dicts():
    ready = Demonstration(Task("a", "?"), tuple(TALK))
    rollout = Rollout(Task("b", "?"), Trace())
    first, second, third = made(ready, rollout, {"query": "2 + 2?", "messages": TALK})
    assert first is ready
    assert second is rollout
    assert third.task.id == "2"


def test_rows_of_a_table_have_none_where_they_have_nothing():
    rows = [
        {"id": None, "query": "2 + 2?", "messages": None, "completion": "4"},
        {"id": None, "query": "2 + 2?", "messages": TALK, "completion": None},
    ]
    shown, told = as_demonstrations(rows, ADAPTER, AGENT)
    assert [shown.messages[-1]["content"], told.messages] == ["4", tuple(TALK)]


def test_any_iterable_will_do():
    generator = ({"query": f"{n}?", "messages": TALK} for n in range(3))
    made_of = as_demonstrations(generator, ADAPTER, AGENT)
    assert [d.task.id for d in made_of] == ["0", "1", "2"]


@pytest.mark.parametrize(
    ("data", "says"),
    [
        ([], "no demonstrations"),
        (iter(()), "no demonstrations"),
        ({"query": "?", "completion": "!"}, "must be a list, not one dict"),
        ("query", "must be a list, not one str"),
        ([{"query": "?", "completion": "!"}, {"query": "?"}], "demonstration 1 needs 'query' and"),
        ([3], "demonstration 0 needs"),
        (None, "must be a list, not one NoneType"),
        ([{"query": "?", "messages": None, "completion": None}], "demonstration 0 needs"),
        ([{"query": "?", "completion": 4}], "demonstration 0: 'completion' must be the text"),
        ([{"query": "?", "completion": " "}], "demonstration 0: 'completion' must be the text"),
        ([{"query": "?", "messages": "hi"}], "demonstration 0: 'messages' must be a list"),
        ([{"query": "?", "messages": ["hi"]}], "a message is a dict with 'role'"),
        ([{"query": "?", "messages": [{"content": "hi"}]}], "a message is a dict with 'role'"),
        ([{"completion": "4"}], "no 'query'"),
        ([{"query": " ", "messages": TALK}], "no 'query'"),
    ],
)
def test_what_cannot_be_read_is_named(data, says):
    with pytest.raises(DataError, match=says):
        as_demonstrations(data, ADAPTER, AGENT)


def test_an_agent_that_asks_nothing_cannot_be_shown_a_completion():
    silent = FunctionAgent(lambda ask, task: "4")
    with pytest.raises(DataError, match=r"'sum'.*without asking its model"):
        made({"id": "sum", "query": "2 + 2?", "completion": "4"}, agent=silent)


def test_the_first_request_is_the_first_of_several():
    def twice(ask, task):
        return ask("one") + ask("two")

    request = first_request(ADAPTER, FunctionAgent(twice), Task("t", "?"))
    assert [m["content"] for m in request.messages] == ["one"]
