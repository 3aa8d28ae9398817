"""Progress: plain lines where stderr is no terminal, a bar on one, and never an error."""

import io
import re

import pytest
from rich.console import Console

from toolbrain_core.plugins import PluginManager
from toolbrain_core.progress import ProgressObserver, watched
from toolbrain_core.rollouts import Rollouts
from toolbrain_core.runs import Run, RunDirectory
from toolbrain_core.testing.scripted import FunctionAdapter, FunctionAgent, ScriptedPolicy
from toolbrain_core.traces import RewardResult, Task


def train_two_steps(tmp_path, console):
    plugins = PluginManager.with_plugins(ProgressObserver(console))
    policy = ScriptedPolicy(["4"])
    runner = Rollouts(
        adapter=FunctionAdapter(),
        agent=FunctionAgent(lambda ask, task: ask(task.query)),
        policy=policy,
        reward=lambda group: [RewardResult(n / 2) for n in range(len(group.rollouts))],
    )
    directory = RunDirectory.create(tmp_path, "demo", {})
    run = Run(
        name="demo",
        algorithm="grpo",
        directory=directory,
        policy=policy,
        rollouts=runner,
        plugins=plugins,
    )
    plugins.notify("toolbrain_run_started", run=run)
    run.total_steps = 2
    for step in (1, 2):
        run.rollout([Task("a", "q")], 2, step=step, iteration=0)
        run.record(step, {"loss": 0.125 * step})
    plugins.notify("toolbrain_run_finished", run=run, result=None)


def test_without_a_terminal_each_step_is_one_plain_line(tmp_path):
    file = io.StringIO()
    train_two_steps(tmp_path, Console(file=file, width=40))
    first, second = file.getvalue().splitlines()
    expected = (
        r"grpo  step 1/2  2 rollouts  reward 0\.250  loss 0\.125  \d\.\d s  0:00 passed  0:00 left"
    )
    assert re.fullmatch(expected, first)
    assert second.startswith("grpo  step 2/2  2 rollouts  reward 0.250  loss 0.250")
    assert "\x1b" not in file.getvalue()


def test_a_terminal_gets_a_bar_that_ends_with_the_last_step(tmp_path):
    file = io.StringIO()
    train_two_steps(tmp_path, Console(file=file, force_terminal=True, width=140))
    assert "step 2/2" in file.getvalue()
    assert "reward 0.250  loss 0.250" in file.getvalue()
    assert file.getvalue().rstrip().endswith("\x1b[?25h")  # the cursor is back


@pytest.mark.parametrize(
    ("total", "told"),
    [(150, list(range(15, 151, 15))), (4, [1, 2, 3, 4]), (12, [2, 3, 4, 5, 6, 8, 9, 10, 11, 12])],
)
def test_without_a_terminal_long_work_tells_of_each_tenth(total, told):
    file = io.StringIO()
    with watched("evaluating", total, console=Console(file=file, width=40)) as advance:
        for _ in range(total):
            advance()
    lines = file.getvalue().splitlines()
    assert [line.split("  ")[1] for line in lines] == [f"{done}/{total}" for done in told]
    assert lines[-1] == f"evaluating  {total}/{total}  0:00 passed  0:00 left"


def test_a_terminal_gets_a_bar_of_long_work_that_is_gone_afterwards():
    file = io.StringIO()
    console = Console(file=file, force_terminal=True, width=80)
    with watched("evaluating", 2, console=console) as advance:
        advance()
        advance()
    assert "2/2" in file.getvalue()
    assert file.getvalue().endswith("\x1b[2K")


def test_work_that_is_not_to_be_drawn_is_not():
    file = io.StringIO()
    with watched("evaluating", 1, draw=False, console=Console(file=file)) as advance:
        advance()
    assert file.getvalue() == ""


@pytest.mark.parametrize("terminal", [False, True])
def test_a_closed_stderr_never_stops_training(tmp_path, terminal, caplog):
    file = io.StringIO()
    file.close()
    train_two_steps(tmp_path, Console(file=file, force_terminal=terminal))
    assert (tmp_path / "demo" / "metrics.jsonl").read_text().count("\n") == 2
    with watched("evaluating", 1, console=Console(file=file, force_terminal=terminal)) as advance:
        advance()
    assert not caplog.records
