"""`toolbrain train` and `toolbrain evaluate`, with a scripted policy and a small algorithm."""

import json
import os
import subprocess
import sys

import pytest

ALGORITHM = """
import attrs
from toolbrain_core.hookspecs import hookimpl
from toolbrain_core.runs import TrainResult

@attrs.frozen
class Counting:
    \"\"\"Counts an update for each task whose attempts were not all scored the same.\"\"\"

    attempts: int = 2
    note: str = ""
    warns: bool = False
    name = "counting"
    consumes = frozenset({"tasks"})

    def train(self, run):
        groups = run.rollout(run.data, self.attempts, step=0, iteration=0)
        updates = sum(len(set(group.scores)) > 1 for group in groups)
        run.record(0, {"groups": len(groups), "seed": run.seed})
        reason = None if updates else "all attempts at each task were scored the same"
        if self.note:
            run.warn(self.note)
        if reason and self.warns:
            run.warn(f"nothing was learned: {reason}")
        return TrainResult(
            "counting", updates, 1, {}, tuple(run.warnings), run.directory.path, 0.0, reason
        )

@hookimpl
def toolbrain_register_algorithms(registry):
    registry.add("counting", "tb_counting:Counting")
"""

AGENT = """
from toolbrain_core.testing.scripted import FunctionAgent, ScriptedPolicy

policy = ScriptedPolicy(lambda request, key, turn: str(key.attempt))

def make_agent():
    return FunctionAgent(lambda ask, task: ask(task.query), model=policy)

agent = make_agent()

def always_one(trace):
    return 1.0
"""


@pytest.fixture
def folder(tmp_path):
    """A folder with an agent and tasks, beside an installed adapter, policy and algorithm."""
    site = tmp_path / "site"
    info = site / "tb_counting-1.0.dist-info"
    info.mkdir(parents=True)
    (site / "tb_counting.py").write_text(ALGORITHM)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: tb-counting\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[toolbrain]\ncounting = tb_counting\nscripted = toolbrain_core.testing.scripted\n"
    )
    (tmp_path / "my_agent.py").write_text(AGENT)
    tasks = [{"query": "one?", "gold_answer": 1}, {"query": "zero?", "gold_answer": 0}]
    (tmp_path / "tasks.jsonl").write_text("".join(json.dumps(task) + "\n" for task in tasks))
    return tmp_path


def toolbrain(folder, *arguments):
    return subprocess.run(
        [sys.executable, "-m", "toolbrain_core.cli", *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(folder / "site")},
        capture_output=True,
        text=True,
    )


TRAIN = ("--tasks", "tasks.jsonl", "--algorithm", "counting", "--run-name", "first")


@pytest.mark.parametrize("target", ["my_agent:agent", "my_agent.py:make_agent"])
def test_train_runs_the_agent_and_writes_its_run_and_the_result(folder, target):
    arguments = ("--reward", "exact-match", "-o", "attempts=3", "--seed", "5", "--save", "kept")
    done = toolbrain(folder, "train", target, *TRAIN, *arguments)
    assert done.returncode == 0, done.stderr
    assert "counting: 2 updates in 1 steps" in done.stdout
    run = folder / "runs" / "first"
    assert len((run / "rollouts.jsonl").read_text().splitlines()) == 6
    assert '"seed": 5' in (run / "metrics.jsonl").read_text()
    assert (folder / "kept").is_dir()


def test_a_run_without_any_signal_exits_with_3_says_why_and_saves_nothing(folder):
    arguments = ("--reward", "my_agent:always_one", "--save", "kept")
    done = toolbrain(folder, "train", "my_agent:agent", *TRAIN, *arguments)
    assert done.returncode == 3, done.stderr
    assert "Nothing was learned: all attempts at each task were scored the same" in done.stderr
    assert not (folder / "kept").exists()


def test_a_folder_that_cannot_be_saved_to_is_refused_before_the_run(folder):
    arguments = ("--reward", "exact-match", "--save", "site")
    done = toolbrain(folder, "train", "my_agent:agent", *TRAIN, *arguments)
    assert done.returncode == 1
    assert "site holds other files" in done.stderr
    assert not (folder / "runs").exists()


def test_what_a_run_warns_of_is_said_once(folder):
    arguments = ("--reward", "my_agent:always_one", "-o", "note=mind the gap", "-o", "warns=true")
    done = toolbrain(folder, "train", "my_agent:agent", *TRAIN, *arguments)
    assert done.returncode == 3, done.stderr
    assert done.stderr.count("mind the gap") == 1
    assert done.stderr.count("all attempts at each task were scored the same") == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--reward", "exact-mach"), "no reward named 'exact-mach' (did you mean 'exact-match'?)"),
        (("--algorithm", "contuing"), "no algorithm named 'contuing' (did you mean 'counting'?)"),
        (("-o", "atempts=3", "--reward", "exact-match"), "attempts"),
        (("--reward", "my_agent:policy"), "reward"),
    ],
)
def test_a_wrong_name_or_option_is_one_message(folder, arguments, message):
    done = toolbrain(folder, "train", "my_agent:agent", *TRAIN, *arguments)
    assert done.returncode == 1
    assert done.stderr.startswith("Error: ")
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_a_task_may_have_a_schema_of_its_own(folder):
    task = {"query": "zero?", "gold_answer": 0, "schema": "CREATE TABLE t (n INT)"}
    (folder / "sql.jsonl").write_text(json.dumps(task) + "\n")
    arguments = ("evaluate", "my_agent:agent", "--tasks", "sql.jsonl", "--json")
    done = toolbrain(folder, *arguments)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["accuracy"] == 1.0


def test_a_module_that_exits_is_an_error_and_no_success(folder):
    (folder / "script.py").write_text("raise SystemExit(0)")
    done = toolbrain(folder, "train", "script:agent", *TRAIN, "--reward", "exact-match")
    assert done.returncode == 1
    assert done.stderr.startswith("Error: 'script:agent': importing script raised SystemExit")


def test_evaluate_prints_json_for_programs_and_lines_for_people(folder):
    arguments = ("evaluate", "my_agent:agent", "--tasks", "tasks.jsonl", "--attempts", "2")
    done = toolbrain(folder, *arguments, "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["accuracy"] == 0.5
    assert "evaluating  2/2" in done.stderr
    assert "accuracy" in toolbrain(folder, *arguments).stdout


def test_a_folder_that_was_not_saved_by_a_brain_is_refused(folder):
    arguments = ("--tasks", "tasks.jsonl", "--adapter", "site")
    done = toolbrain(folder, "evaluate", "my_agent:agent", *arguments)
    assert done.returncode == 1
    assert "toolbrain.json" in done.stderr
