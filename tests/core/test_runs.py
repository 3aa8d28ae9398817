"""The run directory: whole lines, atomic files, resume; and what an algorithm gets."""

import json
import math
import os
import signal
import subprocess
import sys
import textwrap
import threading

import pytest

from toolbrain_core.errors import ConfigurationError, RunDirectoryError
from toolbrain_core.rollouts import Rollouts
from toolbrain_core.runs import Run, RunDirectory, interruptible
from toolbrain_core.testing.scripted import FunctionAdapter, FunctionAgent, ScriptedPolicy
from toolbrain_core.traces import (
    Group,
    Rollout,
    Task,
    Trace,
    Turn,
    read_json_lines,
    read_rollouts,
)

CONFIG = {"algorithm": "grpo", "options": {"learning_rate": 1e-4, "lora": {"r": 16}}, "seed": 0}


def group(answer="4", query="2 + 2?"):
    task = Task("a", query)
    turn = Turn(({"role": "user", "content": query},), "4", (1, 2), (3,), (-0.5,))
    return Group(task, (Rollout(task, Trace((turn,), answer)),))


def test_a_new_directory_holds_the_config_and_room_for_checkpoints(tmp_path):
    directory = RunDirectory.create(tmp_path, "demo", CONFIG)
    assert directory.path == tmp_path / "demo"
    assert directory.config() == CONFIG
    assert sorted(p.name for p in directory.path.iterdir()) == ["checkpoints", "config.json"]


def begun(root, config=CONFIG):
    """A run that has earned something."""
    directory = RunDirectory.create(root, "demo", config)
    directory.append_rollouts([group()], step=1, iteration=0)
    return directory


def test_a_second_run_of_the_same_name_says_what_to_do(tmp_path):
    begun(tmp_path)
    with pytest.raises(RunDirectoryError, match=r"resume=True.*another name"):
        RunDirectory.create(tmp_path, "demo", CONFIG)


@pytest.mark.parametrize("name", ["", "..", "a/b", "/tmp/x"])
def test_a_name_that_is_not_one_folders_is_refused(tmp_path, name):
    with pytest.raises(RunDirectoryError, match="name of one folder"):
        RunDirectory.create(tmp_path, name, CONFIG)


def test_a_run_that_failed_before_its_first_attempt_leaves_its_name_free(tmp_path):
    RunDirectory.create(tmp_path, "demo", CONFIG).write_json("report.json", {})
    mended = {**CONFIG, "seed": 1}
    assert RunDirectory.create(tmp_path, "demo", mended).config() == mended


def test_a_name_that_was_claimed_is_not_given_again(tmp_path):
    assert [RunDirectory.claim(tmp_path / "runs", "grpo-12") for _ in range(3)] == [
        "grpo-12",
        "grpo-12-2",
        "grpo-12-3",
    ]
    (tmp_path / "file").write_text("")
    with pytest.raises(RunDirectoryError, match="cannot write"):
        RunDirectory.claim(tmp_path / "file", "grpo-12")


def test_one_run_at_a_time_writes_into_a_directory(tmp_path):
    program = (
        "import sys; from toolbrain_core.runs import RunDirectory\n"
        "with RunDirectory.opened(sys.argv[1], 'demo', {}, resume=True): pass"
    )

    def another():
        command = [sys.executable, "-c", program, str(tmp_path)]
        return subprocess.run(command, capture_output=True, text=True)

    with RunDirectory.opened(tmp_path, "demo", {}):
        refused = another()
    assert refused.returncode == 1
    assert "another run is going on in" in refused.stderr
    allowed = another()
    assert allowed.returncode == 0, allowed.stderr


def test_resume_with_nothing_there_starts_from_the_beginning_and_says_so(tmp_path, caplog):
    directory = RunDirectory.create(tmp_path, "demo", CONFIG, resume=True)
    assert directory.config() == CONFIG
    assert "nothing to resume" in caplog.text
    assert directory.latest_checkpoint() is None


def test_resume_with_other_options_names_what_differs(tmp_path):
    begun(tmp_path)
    other = {"algorithm": "sft", "options": {"learning_rate": 1e-4, "lora": {"r": 8}}, "seed": 0}
    with pytest.raises(RunDirectoryError) as error:
        RunDirectory.create(tmp_path, "demo", other, resume=True)
    assert "algorithm (was 'grpo', now 'sft')" in str(error.value)
    assert "options.lora.r (was 16, now 8)" in str(error.value)
    assert "learning_rate" not in str(error.value)


def test_resume_on_other_data_or_with_another_adapter_names_what_differs(tmp_path):
    config = {**CONFIG, "data": "sha256 1", "policy": {"lora": {"r": 16}, "device": "cpu"}}
    begun(tmp_path, config)
    other = {**CONFIG, "data": "sha256 2", "policy": {"lora": {"r": 8}, "device": "cuda"}}
    with pytest.raises(RunDirectoryError) as error:
        RunDirectory.create(tmp_path, "demo", other, resume=True)
    assert "data (was 'sha256 1', now 'sha256 2')" in str(error.value)
    assert "policy.lora.r (was 16, now 8)" in str(error.value)
    assert "device" not in str(error.value)


def test_resume_in_another_precision_is_refused_and_on_another_device_is_not(tmp_path):
    policy = {"dtype": "bfloat16", "compute_dtype": "bf16", "device": "cuda:0"}
    begun(tmp_path, {**CONFIG, "policy": policy})
    elsewhere = {**CONFIG, "policy": {**policy, "device": "cpu"}}
    RunDirectory.create(tmp_path, "demo", elsewhere, resume=True)
    other = {**CONFIG, "policy": {**policy, "dtype": "float32", "compute_dtype": "fp32"}}
    with pytest.raises(RunDirectoryError) as error:
        RunDirectory.create(tmp_path, "demo", other, resume=True)
    assert "policy.compute_dtype (was 'bf16', now 'fp32')" in str(error.value)
    assert "device" not in str(error.value)


def test_resume_keeps_the_config_where_only_versions_differ(tmp_path):
    begun(tmp_path, {**CONFIG, "versions": {"torch": "1"}})
    again = RunDirectory.create(
        tmp_path, "demo", {**CONFIG, "versions": {"torch": "2"}}, resume=True
    )
    assert again.config()["versions"] == {"torch": "1"}


def test_rollouts_read_back_as_they_were_journaled(tmp_path):
    directory = RunDirectory.create(tmp_path, "demo", CONFIG)
    groups = [group("4"), group("line\u2028separator \udc80 surrogate", "naïve\nquery")]
    directory.append_rollouts(groups, step=3, iteration=1)
    path = directory.path / "rollouts.jsonl"
    assert read_rollouts(path) == [rollout for g in groups for rollout in g.rollouts]
    assert [(d["step"], d["iteration"]) for d in read_json_lines(path)] == [(3, 1)] * 2


def test_rollouts_with_what_json_cannot_hold_are_still_valid_json(tmp_path):
    directory = RunDirectory.create(tmp_path, "demo", CONFIG)
    task = Task("a", "q", gold_answer={1.5, math.nan}, metadata={"when": object()})
    directory.append_rollouts([Group(task, (Rollout(task, Trace()),))], 0, 0)
    line = (directory.path / "rollouts.jsonl").read_text()
    strict = json.loads(line, parse_constant=pytest.fail)
    assert sorted(strict["task"]["gold_answer"], key=str) == [1.5, "nan"]


def test_metrics_are_valid_json_whatever_is_measured(tmp_path):
    directory = RunDirectory.create(tmp_path, "demo", CONFIG)
    directory.append_metrics(1, "grpo", {"loss": math.nan, "norm": math.inf, "reward": 0.5})
    line = (directory.path / "metrics.jsonl").read_text()
    assert json.loads(line, parse_constant=pytest.fail) == {
        "schema": 1,
        "step": 1,
        "algorithm": "grpo",
        "metrics": {"loss": "nan", "norm": "inf", "reward": 0.5},
    }


def test_a_torn_last_line_is_cut_off_on_resume(tmp_path):
    directory = RunDirectory.create(tmp_path, "demo", CONFIG)
    directory.append_metrics(1, "grpo", {"loss": 1.0})
    with (directory.path / "metrics.jsonl").open("ab") as file:
        file.write('{"schema": 1, "step": 2, "note": "é'.encode()[:-1])  # inside a character
    assert len(list(read_json_lines(directory.path / "metrics.jsonl"))) == 1
    again = RunDirectory.create(tmp_path, "demo", CONFIG, resume=True)
    again.append_metrics(2, "grpo", {"loss": 0.5})
    lines = list(read_json_lines(directory.path / "metrics.jsonl"))
    assert [line["step"] for line in lines] == [1, 2]


@pytest.mark.parametrize("broken", [b"garbage\n", b"\0\0\0\n", b'{"schema": 1,\n', b"\0\0"])
def test_a_broken_last_line_is_cut_off_on_resume(tmp_path, broken):
    directory = begun(tmp_path)
    directory.append_metrics(1, "grpo", {"loss": 1.0})
    for name in ("rollouts.jsonl", "metrics.jsonl"):
        with (directory.path / name).open("ab") as file:
            file.write(broken)
    RunDirectory.create(tmp_path, "demo", CONFIG, resume=True)
    for name in ("rollouts.jsonl", "metrics.jsonl"):
        assert len(list(read_json_lines(directory.path / name))) == 1


def test_writing_a_file_replaces_it_and_leaves_nothing_else(tmp_path):
    directory = RunDirectory.create(tmp_path, "demo", CONFIG)
    directory.write_json("report.json", {"n": 1})
    directory.write_json("report.json", {"n": 2})
    directory.write_text("report.md", "# Report\n")
    assert json.loads((directory.path / "report.json").read_text()) == {"n": 2}
    names = {p.name for p in directory.path.iterdir()}
    assert names == {"checkpoints", "config.json", "report.json", "report.md"}


def test_only_complete_checkpoints_count(tmp_path):
    directory = RunDirectory.create(tmp_path, "demo", CONFIG)
    for step in (2, 10, 12, 14):
        (directory.checkpoints / f"checkpoint-{step}").mkdir()
    directory.complete_checkpoint(directory.checkpoints / "checkpoint-10", 10, {"seed": 4})
    directory.complete_checkpoint(directory.checkpoints / "checkpoint-2", 2)
    (directory.checkpoints / "checkpoint-12" / "toolbrain.json").write_text('{"base": "x"}')
    assert directory.latest_checkpoint() == (directory.checkpoints / "checkpoint-10", 10)
    marker = json.loads((directory.checkpoints / "checkpoint-10" / "toolbrain.json").read_text())
    assert marker["seed"] == 4


def test_the_newest_complete_checkpoints_stay_and_what_is_not_complete_counts_for_nothing(tmp_path):
    directory = RunDirectory.create(tmp_path, "demo", CONFIG)
    for step in (2, 4, 10, 12):
        (directory.checkpoints / f"checkpoint-{step}").mkdir()
        if step != 12:
            directory.complete_checkpoint(directory.checkpoints / f"checkpoint-{step}", step)
    directory.keep_newest_checkpoints(2)
    assert {p.name for p in directory.checkpoints.iterdir()} == {"checkpoint-4", "checkpoint-10"}


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(RunDirectoryError, match=r"cannot write .*file/demo: Not a directory"):
        RunDirectory.create(tmp_path / "file", "demo", CONFIG)


FULL_DISK = """
    import resource, sys
    from pathlib import Path
    from toolbrain_core.errors import RunDirectoryError
    from toolbrain_core.runs import RunDirectory

    directory = RunDirectory.create(sys.argv[1], "demo", {})
    resource.setrlimit(resource.RLIMIT_FSIZE, (300, 300))
    for step in range(100):
        try:
            directory.append_metrics(step, "grpo", {"loss": 0.5})
        except RunDirectoryError as error:
            print(step, error)
            break
    try:
        directory.write_text("config.json", "x" * 1000)
    except RunDirectoryError as error:
        print(error)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="no file size limits")
def test_a_full_disk_is_one_clear_error_and_costs_nothing_already_written(tmp_path):
    code = textwrap.dedent(FULL_DISK)
    done = subprocess.run(
        [sys.executable, "-c", code, tmp_path], capture_output=True, text=True, check=True
    )
    first, second = done.stdout.splitlines()
    written = int(first.split()[0])
    path = tmp_path / "demo" / "metrics.jsonl"
    assert f"cannot write {path}: File too large" in first
    assert "resume=True" in first
    assert "config.json" in second
    assert path.read_bytes().endswith(b"\n")
    assert [line["step"] for line in read_json_lines(path)] == list(range(written))
    assert written > 0
    assert json.loads((tmp_path / "demo" / "config.json").read_text()) == {}
    assert not list((tmp_path / "demo").glob("*.tmp")) + list((tmp_path / "demo").glob(".*.tmp"))


class Listener:
    """Keeps what it hears."""

    def __init__(self):
        self.heard = []

    def notify(self, hook, /, **arguments):
        self.heard.append((hook, arguments))


def make_run(tmp_path, **options):
    policy = ScriptedPolicy(lambda request, key, turn: "4")
    runner = Rollouts(
        adapter=FunctionAdapter(),
        agent=FunctionAgent(lambda ask, task: ask(task.query)),
        policy=policy,
    )
    directory = RunDirectory.create(tmp_path, "demo", CONFIG)
    fields = {"plugins": Listener(), "rollouts": runner, "algorithm": "grpo", **options}
    return Run(name="demo", directory=directory, policy=policy, **fields)


def test_a_run_journals_and_announces_groups_and_steps(tmp_path):
    run = make_run(tmp_path)
    groups = run.rollout([Task("a", "q"), Task("b", "r")], 2, step=5, iteration=1)
    run.record(5, {"loss": 0.25})
    journaled = read_rollouts(run.directory.path / "rollouts.jsonl")
    assert len(journaled) == 4
    assert {r.task.id for r in journaled} == {"a", "b"}
    assert [hook for hook, _ in run.plugins.heard] == [
        "toolbrain_group_finished",
        "toolbrain_group_finished",
        "toolbrain_step_finished",
    ]
    assert {a["group"].task.id for _, a in run.plugins.heard[:2]} == {g.task.id for g in groups}
    assert run.plugins.heard[2][1] == {"run": run, "step": 5, "metrics": {"loss": 0.25}}
    [line] = read_json_lines(run.directory.path / "metrics.jsonl")
    assert (line["step"], line["algorithm"], line["metrics"]) == (5, "grpo", {"loss": 0.25})


def test_only_rank_zero_writes_and_announces(tmp_path):
    run = make_run(tmp_path, rank=1, world=2)
    assert len(run.rollout([Task("a", "q")], 2, step=0, iteration=0)) == 1
    run.record(0, {"loss": 1.0})
    assert not run.plugins.heard
    assert not list(run.directory.path.glob("*.jsonl"))


def test_a_stopped_run_keeps_the_groups_that_finished(tmp_path):
    run = make_run(tmp_path)

    def agent(ask, task):
        if task.id == "b":
            threading.Event().wait(60)
        return ask(task.query)

    run.rollouts.agent = FunctionAgent(agent)
    run.plugins.notify = lambda hook, /, **arguments: run.stop.set()
    with pytest.raises(KeyboardInterrupt):
        run.rollout([Task("a", "q"), Task("b", "r")], 2, step=0, iteration=0)
    journaled = read_rollouts(run.directory.path / "rollouts.jsonl")
    assert [r.task.id for r in journaled] == ["a", "a"]


def test_warnings_are_logged_once_and_kept(tmp_path, caplog):
    run = make_run(tmp_path)
    run.warn("all rewards are equal")
    run.warn("all rewards are equal")
    assert run.warnings == ["all rewards are equal"]
    assert caplog.text.count("all rewards are equal") == 1


def test_a_run_without_an_agent_cannot_roll_out(tmp_path):
    with pytest.raises(ConfigurationError, match="no agent"):
        make_run(tmp_path, rollouts=None).rollout([Task("a", "q")], 1, step=0, iteration=0)


def test_a_saved_checkpoint_is_found_again(tmp_path):
    run = make_run(tmp_path)
    path = run.directory.checkpoints / "checkpoint-3"
    path.mkdir()
    run.checkpoint_saved(path, 3)
    assert run.directory.latest_checkpoint() == (path, 3)


def test_the_first_ctrl_c_asks_to_stop_and_the_second_interrupts():
    before = signal.getsignal(signal.SIGINT)
    stop = threading.Event()
    with pytest.raises(KeyboardInterrupt), interruptible(stop):  # noqa: PT012
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.wait(5)
        os.kill(os.getpid(), signal.SIGINT)
        threading.Event().wait(5)
    assert signal.getsignal(signal.SIGINT) is before


def test_interruptible_does_nothing_in_another_thread():
    before, entered = signal.getsignal(signal.SIGINT), []

    def body():
        with interruptible(threading.Event()):
            entered.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    assert entered == [before]
