"""Real agents on a real TransformersModel (a tiny random Llama), answered by a script."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from smolagents import CodeAgent, ToolCallingAgent, TransformersModel, tool
from toolbrain_smolagents.adapter import SmolagentsAdapter

from toolbrain_core.roles import AttemptKey
from toolbrain_core.testing.scripted import Replies, ScriptedPolicy, ScriptedSession
from toolbrain_core.traces import Task, Trace


@tool
def price_tool(item: str) -> int:
    """Price of an item in the shop.

    Args:
        item: Name of the item.
    """
    return {"mug": 7, "lamp": 12}[item]


@tool
def add_tool(a: int, b: int) -> int:
    """Adds two numbers.

    Args:
        a: First number.
        b: Second number.
    """
    return a + b


price_tool.name, add_tool.name = "price", "add"


@pytest.fixture
def price() -> Any:
    return price_tool


@pytest.fixture
def add() -> Any:
    return add_tool


@pytest.fixture
def session_of() -> Callable[[Replies], ScriptedSession]:
    """A session that answers from a list of texts, or a function."""
    return lambda replies: ScriptedPolicy(replies).session(AttemptKey("test", 0, "t", 0))


@pytest.fixture
def run(session_of: Callable[[Replies], ScriptedSession]) -> Callable[..., Trace]:
    """One attempt with a scripted policy. `metadata` goes to the task."""

    def attempt(agent: Any, replies: Replies, **options: Any) -> Trace:
        task = Task("t", "How much is a mug?", metadata=options.pop("metadata", {}))
        return SmolagentsAdapter().run(agent, task, session_of(replies), **options)

    return attempt


@pytest.fixture
def block() -> Callable[[str], str]:
    """Code as a CodeAgent's model writes it."""
    return lambda code: f"<code>\n{code}\n</code>"


@pytest.fixture
def as_json() -> Callable[..., str]:
    """A call as a ToolCallingAgent's model writes it."""
    return lambda name, **arguments: json.dumps({"name": name, "arguments": arguments})


@pytest.fixture(scope="session")
def make_model(model_dir: Path) -> Callable[..., TransformersModel]:
    def make(cls: type[TransformersModel] = TransformersModel, **options: Any) -> Any:
        options = {"max_new_tokens": 8, "do_sample": False, **options}
        return cls(model_id=str(model_dir), device_map="cpu", **options)

    return make


@pytest.fixture(scope="session")
def model(make_model: Callable[..., TransformersModel]) -> TransformersModel:
    return make_model()


@pytest.fixture
def code_agent(model: TransformersModel) -> CodeAgent:
    return CodeAgent(tools=[price_tool, add_tool], model=model, max_steps=3)


@pytest.fixture
def json_agent(model: TransformersModel) -> ToolCallingAgent:
    return ToolCallingAgent(tools=[price_tool, add_tool], model=model, max_steps=3)
