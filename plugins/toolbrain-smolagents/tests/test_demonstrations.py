"""Demonstrations are what the agent itself would have written, seen and answered."""

from __future__ import annotations

import pytest
from smolagents import CodeAgent, ToolCallingAgent
from toolbrain_smolagents import SmolagentsAdapter, compact_prompts

from toolbrain_core.errors import DataError
from toolbrain_core.traces import Demonstration, Task, ToolCall, from_json, to_json

TASK = Task("t", "What do a mug and 5 more cost?", gold_answer=12)
CALLS = [
    ToolCall("p", "price", {"item": "mug"}),
    ToolCall("s", "add", {"a": {"$result": "p"}, "b": 5}),
]
TAGS = [
    ("<code>", "</code>"),
    "markdown",
    ("```(?:python|py)", r"\n```"),
]


@pytest.mark.parametrize("tags", TAGS)
def test_code_demonstrations_give_the_gold_answer_when_replayed(model, price, add, run, tags):
    agent = CodeAgent(tools=[price, add], model=model, max_steps=1, code_block_tags=tags)
    demonstration = SmolagentsAdapter().demonstrate(agent, TASK, CALLS)
    assert demonstration.metadata["final_answer"] == 12
    (turn,) = demonstration.metadata["turns"]
    assert run(agent, [turn["text"]]).final_answer == 12
    assert 'a = price(item="mug")\nb = add(a=a, b=5)\nfinal_answer(b)' in turn["text"]
    assert demonstration.messages[-1] == {"role": "assistant", "content": turn["text"]}


def test_json_demonstrations_give_the_gold_answer_when_replayed(model, price, add, run):
    agent = ToolCallingAgent(tools=[price, add], model=model, max_steps=3)
    demonstration = SmolagentsAdapter().demonstrate(agent, TASK, CALLS)
    turns = demonstration.metadata["turns"]
    trace = run(agent, [turn["text"] for turn in turns])
    assert trace.final_answer == 12
    assert [c.name for c in trace.calls] == ["price", "add", "final_answer"]
    assert dict(trace.calls[1].arguments) == {"a": 7, "b": 5}
    assert [len(t["messages"]) for t in turns] == [2, 4, 6]
    assert turns[0]["tools"] == list(demonstration.tools) != []


def test_what_the_policy_learns_to_answer_is_what_it_will_be_asked(code_agent, session_of):
    adapter = SmolagentsAdapter()
    demonstration = adapter.demonstrate(code_agent, TASK, CALLS)
    session = session_of([demonstration.metadata["turns"][0]["text"]])
    trace = adapter.run(code_agent, TASK, session)
    assert list(trace.turns[0].messages) == demonstration.metadata["turns"][0]["messages"]


def test_observe_shapes_the_demonstration_too(code_agent):
    short = [{"role": "user", "content": "short"}]
    demonstration = SmolagentsAdapter().demonstrate(
        code_agent, TASK, CALLS, observe=lambda trace, messages: short
    )
    assert list(demonstration.messages[:-1]) == short


def test_planning_agents_write_a_plan_first(model, price, add):
    agent = CodeAgent(tools=[price, add], model=model, planning_interval=3)
    turns = SmolagentsAdapter().demonstrate(agent, TASK, CALLS).metadata["turns"]
    assert turns[0]["text"].startswith("1. Call price.\n2. Call add.\n3.")
    assert turns[1]["text"].startswith("<code>")


def test_values_of_every_json_type_are_written(model, run):
    from smolagents import tool

    @tool
    def echo(value: dict) -> dict:
        """Gives back.

        Args:
            value: Anything.
        """
        return value

    value = {"a": [1, 2.5, None, True, 'it\'s "ü"\n'], "b": {}}
    for cls in (CodeAgent, ToolCallingAgent):
        agent = cls(tools=[echo], model=model)
        demonstration = SmolagentsAdapter().demonstrate(
            agent, TASK, [ToolCall("e", "echo", {"value": value})]
        )
        assert demonstration.metadata["final_answer"] == value


def test_demonstrations_go_to_json_and_back(json_agent):
    demonstration = SmolagentsAdapter().demonstrate(json_agent, TASK, CALLS)
    assert to_json(from_json(Demonstration, to_json(demonstration))) == to_json(demonstration)


def test_compact_json_agents_write_json_alone(model, price, add):
    prompts = compact_prompts("toolcalling")
    for agent, start in (
        (ToolCallingAgent(tools=[price, add], model=model), "Action:\n{"),
        (ToolCallingAgent(tools=[price, add], model=model, prompt_templates=prompts), '{"name"'),
    ):
        turns = SmolagentsAdapter().demonstrate(agent, TASK, CALLS).metadata["turns"]
        assert turns[0]["text"].startswith(start)


@pytest.mark.parametrize(
    ("calls", "reason"),
    [
        ([], "no calls"),
        ([ToolCall("1", "cost", {})], "no such tool"),
        ([ToolCall("1", "price", {"item": "sofa"})], "KeyError"),
        ([ToolCall("1", "price", {"item": {"$result": "0"}})], "no earlier call"),
        ([ToolCall("1", "price", {"item": "mug"})] * 2, "unique"),
        ([ToolCall("1", "final_answer", {"answer": 1}), ToolCall("2", "price", {})], "last"),
    ],
)
def test_calls_that_cannot_be_made_are_named(code_agent, calls, reason):
    with pytest.raises(DataError, match=reason):
        SmolagentsAdapter().demonstrate(code_agent, TASK, calls)


def test_too_few_steps_are_named(model, price, add):
    agent = ToolCallingAgent(tools=[price, add], model=model, max_steps=2)
    with pytest.raises(DataError, match="needs 3 steps"):
        SmolagentsAdapter().demonstrate(agent, TASK, CALLS)
