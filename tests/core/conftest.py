"""Rollouts of function agents on a scripted policy."""

from collections.abc import Callable
from typing import Any

import pytest

from toolbrain_core.rollouts import Rollouts
from toolbrain_core.testing.scripted import FunctionAdapter, ScriptedPolicy
from toolbrain_core.traces import Group, Task, Trace


@pytest.fixture
def rollouts() -> Callable[..., Rollouts]:
    """How attempts are run; the policy answers with the turn's number unless another is given."""

    def make(agent: Any = None, policy: Any = None, **options: Any) -> Rollouts:
        policy = policy or ScriptedPolicy(lambda request, key, turn: f"reply {turn}")
        return Rollouts(adapter=FunctionAdapter(), agent=agent, policy=policy, **options)

    return make


@pytest.fixture
def run() -> Callable[..., list[Group]]:
    """The groups of a run over the tasks whose ids are the letters of `ids`."""

    def run_all(
        runner: Rollouts, ids: str = "ab", attempts: int = 2, **options: Any
    ) -> list[Group]:
        tasks = [Task(letter, f"question {letter}") for letter in ids]
        return runner.run(tasks, attempts, run_name="test", iteration=0, seed=1, **options)

    return run_all


@pytest.fixture
def traces() -> Callable[[list[Group]], list[Trace]]:
    return lambda groups: [rollout.trace for group in groups for rollout in group.rollouts]


@pytest.fixture
def ask_once() -> Callable[..., Any]:
    """An agent's function that asks the task's query and answers with the reply."""
    return lambda ask, task: ask(task.query)
