"""A small agent that has everything to make tasks from: chains, enums, examples in docstrings."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from smolagents import CodeAgent, LogLevel, Tool, TransformersModel, tool

from toolbrain_core import Brain, PluginManager

CITIES = {"ann": "Oslo", "ben": "Rome"}


@tool
def list_users() -> list:
    """Lists all users."""
    return sorted(CITIES)


@tool
def find_city(user: str) -> str:
    """Returns the city of a user.

    Args:
        user: The user's name.
    """
    return CITIES[user]


@tool
def shipping(city: str, express: bool = False) -> float:
    """Cost of shipping a parcel to a city.

    Args:
        city: Name of the city, for example Oslo or Rome.
        express: Whether it has to be there tomorrow.
    """
    return {"Oslo": 14.0, "Rome": 9.5}[city] * (2 if express else 1)


@tool
def convert(amount: float, currency: str) -> float:
    """Converts an amount of euros.

    Args:
        amount: How many euros.
        currency: To what.
    """
    return round(amount * {"USD": 1.1, "GBP": 0.9}[currency], 2)


convert.inputs["currency"]["enum"] = ["USD", "GBP"]


class Broken(Tool):
    """A tool without arguments; `what` happens when it is called."""

    inputs: dict[str, Any] = {}  # noqa: RUF012
    output_type = "any"

    def __init__(self, name: str, what: Callable[[], Any]) -> None:
        self.name, self.what = name, what
        self.description = f"The {name.replace('_', ' ')} of the day."
        super().__init__()

    def forward(self) -> Any:
        return self.what()


def fails() -> None:
    raise RuntimeError("no service")


def sleeps() -> str:
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    time.sleep(60)
    return "awake"


def crashes() -> None:
    os._exit(3)


BROKEN = {
    "raising": fails,
    "sleeping": sleeps,
    "huge": lambda: "x" * 10_000_000,
    "varying": lambda: random.SystemRandom().random(),
    "silent": lambda: None,
    "undefined": lambda: float("nan"),
    "opaque": lambda: object(),
    "quitting": lambda: sys.exit(2),
    "crashing": crashes,
}


@pytest.fixture
def make_tools_agent(model_dir: Path) -> Callable[..., Any]:
    """An agent of a class, by default a CodeAgent, with the tools above and more."""

    def make(more: Any = (), kind: type = CodeAgent, tools: Any = None, **options: Any) -> Any:
        model = TransformersModel(model_id=str(model_dir), device_map="cpu", max_new_tokens=16)
        own = [list_users, find_city, shipping, convert] if tools is None else tools
        settings = {"max_steps": 4, "verbosity_level": LogLevel.OFF, **options}
        return kind(tools=[*own, *more], model=model, **settings)

    return make


@pytest.fixture
def make_brain(make_tools_agent: Callable[..., Any], tmp_path: Path) -> Callable[..., Brain]:
    from toolbrain_grpo import plugin as grpo
    from toolbrain_sft import plugin as sft
    from toolbrain_smolagents import plugin as smolagents
    from toolbrain_taskgen import plugin as taskgen
    from toolbrain_transformers import plugin as transformers

    plugins = PluginManager.with_plugins(grpo, sft, smolagents, transformers, taskgen)

    def make(*more: Any, agent: dict[str, Any] | None = None, **options: Any) -> Brain:
        settings = {"progress": False, "run_dir": tmp_path / "runs", "plugins": plugins}
        return Brain(make_tools_agent(more, **(agent or {})), **{**settings, **options})

    return make
