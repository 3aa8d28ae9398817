"""What is evaluated is what the user gets: `brain.evaluate` and `brain.agent.run` agree."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from toolbrain_core import Brain

sys.path.insert(0, str(Path(__file__).parents[2] / "docs" / "examples"))

from shop.agent import make_agent, make_model
from shop.tasks import held_out_tasks


@pytest.mark.slow
def test_fifty_greedy_tasks_are_answered_the_same_by_the_brain_and_by_the_agent(tmp_path):
    """The embedded model in fp32, as it comes; the adapter is fresh, so it is still itself."""
    agent = make_agent(make_model(max_new_tokens=16))
    brain = Brain(agent, reward_func="exact-match", dtype="fp32", run_dir=tmp_path, progress=False)
    tasks = held_out_tasks()[:50]
    evaluated = [g.rollouts[0].trace.final_answer for g in brain.rollout(tasks)]
    used = [brain.agent.run(task.query) for task in tasks]
    assert [str(answer) for answer in evaluated] == [str(answer) for answer in used]
    assert len({str(answer) for answer in used}) > 10  # else it says little
