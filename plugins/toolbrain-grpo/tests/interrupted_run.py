"""What the tests of interrupted runs train, as a program and as `toolbrain train` loads it.

usage: interrupted_run.py MODEL_DIR RUN_DIR KILL_QUERY

Trains, and kills itself in the rollouts of the task whose query contains KILL_QUERY.
"""

import os
import signal
import sys
import time
from pathlib import Path

from smolagents import CodeAgent, LogLevel, TransformersModel, tool
from toolbrain_smolagents import compact_prompts

from toolbrain_core import Brain

TASKS = [{"query": f"What is {a} + {a + 1}?"} for a in range(6)]
OPTIONS = {
    "attempts": 4,
    "tasks_per_step": 1,
    "learning_rate": 2e-3,
    "schedule": "linear",
    "checkpoint_every": 2,
    "shuffle": False,
}


@tool
def nap() -> str:
    """Sleeps for ever if the file `asleep` is there."""
    while Path("asleep").exists():
        Path("napping").touch()
        time.sleep(3600)
    return "awake"


def index_reward(traces: list) -> list[float]:
    return [float(i) for i in range(len(traces))]


def killing(query_of_death: str):
    def reward(traces: list, query: str) -> list[float]:
        if query_of_death in query:
            os.kill(os.getpid(), signal.SIGKILL)
        return index_reward(traces)

    return reward


def make_agent(model_dir=None) -> CodeAgent:
    model = TransformersModel(
        model_id=str(model_dir or os.environ["MODEL_DIR"]),
        device_map="cpu",
        max_new_tokens=16,
        do_sample=False,
    )
    return CodeAgent(
        model=model,
        tools=[nap],
        max_steps=1,
        prompt_templates=compact_prompts(),
        verbosity_level=LogLevel.OFF,
    )


def make_brain(model_dir, run_dir, reward=index_reward) -> Brain:
    return Brain(
        make_agent(model_dir),
        algorithm="grpo",
        dtype="fp32",
        reward_func=reward,
        run_dir=run_dir,
        probe=False,
        progress=False,
        concurrency=1,  # else rounding, and with it a token, may depend on who is in a batch
        **OPTIONS,
    )


if __name__ == "__main__":
    model_dir, run_dir, query = sys.argv[1:]
    make_brain(model_dir, run_dir, killing(query)).train(TASKS, name="run")
