"""Runs that were killed or interrupted, and what goes on from them."""

from __future__ import annotations

import importlib.util
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from toolbrain_core import Brain
from toolbrain_core.errors import RunDirectoryError
from toolbrain_core.hookspecs import hookimpl
from toolbrain_core.report import read_metrics
from toolbrain_core.traces import read_rollouts

PROGRAM = Path(__file__).with_name("interrupted_run.py")


@pytest.fixture(scope="session")
def program() -> Any:
    spec = importlib.util.spec_from_file_location("interrupted_run", PROGRAM)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def adapter(brain: Any) -> Any:
    named = brain.policy.model.named_parameters()
    return torch.cat([p.detach().flatten() for n, p in named if ".lora_" in n])


def of_step(rollouts_file: Path, step: int) -> list[Any]:
    lines = [json.loads(line) for line in rollouts_file.read_text().splitlines()]
    ids = [
        [t["completion_ids"] for t in li["trace"]["turns"]] for li in lines if li["step"] == step
    ]
    return ids[-4:]  # a step that a resumed run does again is written again


def check_same(resumed: Any, whole: Any, run: Path, whole_run: Path, steps: int) -> None:
    """Same tokens, same learning rates, same weights to rounding; and the journals can be read."""
    for step in range(1, steps + 1):
        assert of_step(run / "rollouts.jsonl", step) == of_step(whole_run / "rollouts.jsonl", step)
    rows, whole_rows = read_metrics(run), read_metrics(whole_run)
    assert [row["step"] for row in rows] == list(range(1, steps + 1))
    for row, other in zip(rows, whole_rows, strict=True):
        for name in ("learning_rate", "updates", "reward_mean", "trained_tokens"):
            assert row["metrics"][name] == other["metrics"][name], (row["step"], name)
    assert all(r.reward.score is not None for r in read_rollouts(run / "rollouts.jsonl"))
    apart = (adapter(resumed) - adapter(whole)).norm() / adapter(whole).norm()
    assert apart < 1e-3, f"the adapters are {float(apart):.1e} apart"


@pytest.fixture(scope="session")
def whole(program: Any, model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A run that nothing interrupted."""
    brain = program.make_brain(model_dir, tmp_path_factory.mktemp("whole"))
    return brain, brain.train(program.TASKS, name="run")


def test_a_killed_run_goes_on_from_its_last_checkpoint_to_the_same_end(
    program, model_dir, whole, tmp_path
) -> None:
    killed = subprocess.run(
        [sys.executable, str(PROGRAM), str(model_dir), str(tmp_path), "What is 3 + 4?"],
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    run = tmp_path / "run"
    assert [row["step"] for row in read_metrics(run)] == [1, 2, 3]
    with (run / "metrics.jsonl").open("a") as journal:
        journal.write('{"schema": 1, "st')  # what a killed process may leave behind
    torn = run / "checkpoints" / "checkpoint-4"
    torn.mkdir()  # a checkpoint that was begun and has no marker

    brain = program.make_brain(model_dir, tmp_path)
    result = brain.train(program.TASKS, name="run", resume=True)
    assert (result.steps, result.updates) == (6, 6)
    check_same(brain, whole[0], run, whole[1].run_dir, 6)


class StopAfter:
    """Asks the run to stop, as Ctrl-C does, once a step is done."""

    def __init__(self, step: int):
        self.step = step

    @hookimpl
    def toolbrain_step_finished(self, run: Any, step: int, metrics: Any) -> None:
        if step == self.step:
            run.stop.set()


@pytest.mark.parametrize("same_brain", [True, False])
def test_an_interrupted_run_saves_and_goes_on_to_the_same_end(
    program, model_dir, whole, tmp_path, same_brain
) -> None:
    brain = program.make_brain(model_dir, tmp_path)
    with brain.plugins.observing(StopAfter(3)), pytest.raises(KeyboardInterrupt):
        brain.train(program.TASKS, name="run")
    run = tmp_path / "run"
    assert (run / "checkpoints" / "checkpoint-3" / "toolbrain.json").is_file()
    assert (run / "report.json").is_file()
    if not same_brain:
        brain = program.make_brain(model_dir, tmp_path)
    result = brain.train(program.TASKS, name="run", resume=True)
    assert (result.steps, result.updates) == (6, 6)
    check_same(brain, whole[0], run, whole[1].run_dir, 6)


def test_resuming_a_finished_run_changes_nothing_and_is_no_failure(
    program, model_dir, whole
) -> None:
    before, result = whole
    root = result.run_dir.parent
    brain = program.make_brain(model_dir, root)
    again = brain.train(program.TASKS, name="run", resume=True)
    assert (again.steps, again.updates) == (6, 6)
    assert again.no_signal is None
    assert not [w for w in again.warnings if "nothing was learned" in w]
    assert torch.equal(adapter(brain), adapter(before))


def test_a_resumed_run_keeps_the_reference_that_it_began_with(make_brain, tasks, tmp_path) -> None:
    """In another Brain, whose adapter knows nothing of what was learned before the run."""
    options = {"beta": 0.5, "shuffle": False, "checkpoint_every": 1, "optimizer": "sgd"}
    adapters, kl = {}, {}
    for name, stop in (("whole", None), ("stopped", 2)):
        brain = make_brain(learning_rate=2e-3, concurrency=1)
        brain.train(tasks(1), name=f"before-{name}")
        if stop:
            with brain.plugins.observing(StopAfter(stop)), pytest.raises(KeyboardInterrupt):
                brain.train(tasks(3), name=name, **options)
            brain = make_brain(learning_rate=2e-3, concurrency=1)
        result = brain.train(tasks(3), name=name, resume=bool(stop), **options)
        adapters[name] = adapter(brain)
        kl[name] = [row["metrics"]["kl"] for row in read_metrics(result.run_dir)]
        assert list(brain.policy.model.peft_config) == ["default"]
    assert kl["whole"][-1] > 0
    assert kl["stopped"] == pytest.approx(kl["whole"], rel=1e-2)
    assert (adapters["stopped"] - adapters["whole"]).norm() < 1e-4 * adapters["whole"].norm()


def test_a_run_resumed_in_the_same_brain_keeps_the_base_as_its_reference(make_brain, tasks) -> None:
    options = {"beta": 0.5, "shuffle": False, "optimizer": "sgd", "learning_rate": 3e-2}
    kl = {}
    for name, stop in (("whole", None), ("stopped", 2)):
        brain = make_brain(concurrency=1)
        if stop:
            with brain.plugins.observing(StopAfter(stop)), pytest.raises(KeyboardInterrupt):
                brain.train(tasks(3), name=name, **options)
        result = brain.train(tasks(3), name=name, resume=bool(stop), **options)
        kl[name] = [row["metrics"]["kl"] for row in read_metrics(result.run_dir)]
    # To a policy that was taken anew when the run was resumed, the last would be 0.
    assert kl["whole"][-1] > 1e-3
    assert kl["stopped"] == pytest.approx(kl["whole"], rel=1e-2)


def test_full_fine_tuning_is_resumed_against_the_weights_that_it_began_with_or_refused(
    make_brain, tasks
) -> None:
    options = {"beta": 0.5, "shuffle": False, "optimizer": "sgd", "checkpoint_every": 1}
    kl, brain = {}, None
    for name, stop in (("whole", None), ("stopped", 2)):
        brain = make_brain(lora=None, learning_rate=3e-2, concurrency=1)
        if stop:
            with brain.plugins.observing(StopAfter(stop)), pytest.raises(KeyboardInterrupt):
                brain.train(tasks(3), name=name, **options)
            with pytest.raises(RunDirectoryError, match="Resume with a new Brain") as refused:
                brain.train(tasks(3), name=name, resume=True, **options)
            assert f"{name} with this Brain" in str(refused.value)
            brain = make_brain(lora=None, learning_rate=3e-2, concurrency=1)
        result = brain.train(tasks(3), name=name, resume=bool(stop), **options)
        kl[name] = [row["metrics"]["kl"] for row in read_metrics(result.run_dir)]
    assert kl["whole"][-1] > 1e-3
    assert kl["stopped"] == pytest.approx(kl["whole"], rel=1e-2)
    # Without a reference there is nothing to compare with, and the Brain at hand goes on.
    with brain.plugins.observing(StopAfter(2)), pytest.raises(KeyboardInterrupt):
        brain.train(tasks(3), name="free", shuffle=False)
    assert brain.train(tasks(3), name="free", shuffle=False, resume=True).steps == 3


def test_a_second_ctrl_c_in_the_middle_of_a_step_saves_nothing_of_that_step(
    program, model_dir, whole, tmp_path
) -> None:
    brain, steps = program.make_brain(model_dir, tmp_path), itertools.count(1)

    def press_twice(*_: Any) -> None:
        if next(steps) == 4:  # the weights have changed, and the step is not counted yet
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)

    hook = register_optimizer_step_post_hook(press_twice)
    try:
        with pytest.raises(KeyboardInterrupt):
            brain.train(program.TASKS, name="run")
    finally:
        hook.remove()
    run = tmp_path / "run"
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["checkpoint-2"]
    assert (run / "report.json").is_file()
    result = brain.train(program.TASKS, name="run", resume=True)
    assert (result.steps, result.updates) == (6, 6)
    check_same(brain, whole[0], run, whole[1].run_dir, 6)


@pytest.fixture(scope="session")
def napper_dir(program: Any, model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model, taught to call the tool `nap`."""
    work = tmp_path_factory.mktemp("napper")
    brain = Brain(
        program.make_agent(model_dir),
        algorithm="sft",
        dtype="fp32",
        run_dir=work / "runs",
        progress=False,
    )
    lesson = [{"query": "What is 0 + 1?", "completion": "<code>\nnap()\n</code>"}]
    brain.train(lesson, num_iterations=40, learning_rate=1e-2)
    [group] = brain.rollout([{"query": "What is 0 + 1?"}])
    assert [call.name for call in group.rollouts[0].trace.calls] == ["nap"]
    brain.merge(work / "model")
    return work / "model"


def wait_for(condition: Callable[[], bool], process: Any, seconds: float = 90) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline, "it took too long"
        time.sleep(0.1)


def test_ctrl_c_with_a_tool_asleep_exits_with_130_saves_and_can_be_resumed(
    program, napper_dir, tmp_path
) -> None:
    (tmp_path / "tasks.jsonl").write_text(
        "".join(json.dumps({"query": "What is 0 + 1?", "id": str(i)}) + "\n" for i in range(3))
    )
    options = {**program.OPTIONS, "learning_rate": 1e-6, "checkpoint_every": 0, "probe": False}
    flags = [word for k, v in options.items() for word in ("-o", f"{k}={json.dumps(v)}")]
    command = [sys.executable, "-m", "toolbrain_core.cli", "train", f"{PROGRAM}:make_agent"]
    command += ["--tasks", "tasks.jsonl", "--reward", f"{PROGRAM}:index_reward"]
    command += ["--run-name", "run", *flags]
    process = subprocess.Popen(
        command,
        cwd=tmp_path,
        env={**os.environ, "MODEL_DIR": str(napper_dir)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    run = tmp_path / "runs" / "run"
    try:
        wait_for(lambda: bool((run / "metrics.jsonl").exists()), process)
        (tmp_path / "asleep").touch()
        wait_for((tmp_path / "napping").exists, process)
        started = time.monotonic()
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=30)
    finally:
        process.kill()
    assert process.returncode == 130, errors
    assert time.monotonic() - started < 10
    assert "Traceback" not in errors
    assert "Interrupted." in errors

    steps = len((run / "metrics.jsonl").read_text().splitlines())
    assert steps >= 1
    read_rollouts(run / "rollouts.jsonl")
    assert (run / "checkpoints" / f"checkpoint-{steps}" / "toolbrain.json").is_file()
    assert (run / "report.json").is_file()

    (tmp_path / "asleep").unlink()
    resumed = subprocess.run(
        [*command, "--resume"],
        cwd=tmp_path,
        env={**os.environ, "MODEL_DIR": str(napper_dir)},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert resumed.returncode == 0, resumed.stderr
    assert "grpo: 3 updates in 3 steps" in resumed.stdout
