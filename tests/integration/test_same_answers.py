"""What is evaluated is what the user gets: `brain.evaluate` and `brain.agent.run` agree."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from smolagents import ChatMessage, CodeAgent, LogLevel
from smolagents.models import MessageRole
from toolbrain_smolagents import compact_prompts

from toolbrain_core import Brain

sys.path.insert(0, str(Path(__file__).parents[2] / "docs" / "examples"))

from shop.agent import make_model
from shop.tasks import held_out_tasks
from shop.tools import TOOLS


class OutspokenAgent(CodeAgent):
    """Answers with what its model wrote, code or not, when its steps are used up.

    So an untrained model gives as many answers as it writes different texts, in one call each.
    """

    def provide_final_answer(self, task: str) -> ChatMessage:
        step: Any = self.memory.steps[-1]
        return ChatMessage(MessageRole.ASSISTANT, content=step.model_output)


@pytest.mark.slow
def test_fifty_greedy_tasks_are_answered_the_same_by_the_brain_and_by_the_agent(
    tmp_path: Path,
) -> None:
    """The embedded model in fp32, as it comes; the adapter is fresh, so it is still itself."""
    agent = OutspokenAgent(
        tools=list(TOOLS.values()),
        model=make_model(max_new_tokens=16),
        prompt_templates=compact_prompts(),
        max_steps=1,
        verbosity_level=LogLevel.OFF,
    )
    brain = Brain(agent, reward_func="exact-match", dtype="fp32", run_dir=tmp_path, progress=False)
    tasks = held_out_tasks()[:50]
    evaluated = [group.rollouts[0].trace.final_answer for group in brain.rollout(tasks)]
    used = [brain.agent.run(task.query) for task in tasks]
    assert [str(answer) for answer in evaluated] == [str(answer) for answer in used]
    assert len({str(answer) for answer in used}) > 10  # else it says little
