"""Compact prompts: short, complete, and usable by both kinds of agent."""

from __future__ import annotations

import pytest
from smolagents import CodeAgent, ToolCallingAgent, tool
from toolbrain_smolagents import compact_prompts


@tool
def stock(item: str) -> int:
    """How many of an item are in stock.

    Args:
        item: Name of the item.
    """
    return len(item)


@tool
def shipping(city: str, weight: float) -> float:
    """Price of sending a parcel of some kilograms to a city.

    Args:
        city: Name of the city.
        weight: Kilograms.
    """
    return weight


@pytest.mark.parametrize(("cls", "kind"), [(CodeAgent, "code"), (ToolCallingAgent, "toolcalling")])
def test_four_tools_take_at_most_200_tokens(cls, kind, model, tokenizer, price, add):
    tools = [price, add, stock, shipping]
    agent = cls(tools=tools, model=model, prompt_templates=compact_prompts(kind))
    tokens = len(tokenizer(agent.system_prompt)["input_ids"])
    assert tokens <= 200
    assert tokens < len(tokenizer(cls(tools=tools, model=model).system_prompt)["input_ids"]) / 3
    assert "shipping(city: string, weight: number) -> number: Price of" in agent.system_prompt


def test_every_template_renders(model, price, run, block, as_json):
    clerk = ToolCallingAgent(
        tools=[price],
        model=model,
        name="clerk",
        description="Knows prices.",
        prompt_templates=compact_prompts("toolcalling"),
        instructions="Be polite.",
        planning_interval=1,
        max_steps=2,
    )
    agent = CodeAgent(
        tools=[],
        model=model,
        managed_agents=[clerk],
        prompt_templates=compact_prompts(),
        planning_interval=1,
        max_steps=1,
    )
    words = iter(
        [
            "1. Ask the clerk.",
            block('print(clerk("Price of a mug?"))'),
            "1. Look it up.",
            as_json("price", item="mug"),
            "2. Say it.",
            as_json("final_answer", answer="7"),
            "7",
        ]
    )
    trace = run(agent, lambda request, key, turn: next(words))
    assert trace.final_answer == "7"
    assert [t.agent_name for t in trace.turns] == ["", "", "clerk", "clerk", "clerk", "clerk", ""]
    prompts = [turn.messages[0]["content"] for turn in trace.turns]
    assert "clerk(task: string) -> string: Knows prices." in prompts[1]
    assert "Be polite." in prompts[3]
    assert "Steps left: " in trace.turns[4].messages[-1]["content"]
    assert "clerk answers:\n7" in trace.turns[6].messages[-1]["content"]


def test_an_unknown_agent_class_is_an_error():
    with pytest.raises(ValueError, match="toolcalling"):
        compact_prompts("json")
