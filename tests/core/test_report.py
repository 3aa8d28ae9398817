"""The report of a run, from journals that a real `RunDirectory` wrote."""

import json
from pathlib import Path

import pytest

from toolbrain_core.errors import DataError, RunDirectoryError
from toolbrain_core.evaluation import compare, evaluate_groups
from toolbrain_core.report import metric, read_metrics, summarise, write_report
from toolbrain_core.runs import RunDirectory
from toolbrain_core.traces import Failure, Group, RewardResult, Rollout, Task, Trace, Turn

CONFIG = {"algorithm": "grpo", "policy": {"model": "tiny-model"}}


def attempt(text, score, answer="12", error=None, number=0):
    trace = Trace(
        turns=(Turn(messages=(), text=text),),
        final_answer=None if error else answer,
        error=error,
    )
    failure = None if score is not None else Failure("reward", "it raised")
    task = Task("sum", "What is 5 + 7?", "12")
    return Rollout(task, trace, RewardResult(score, failure=failure), number)


@pytest.fixture
def run_dir(tmp_path):
    directory = RunDirectory.create(tmp_path, "first", CONFIG)
    directory.append_metrics(
        1, "grpo", {"reward_mean": 0.25, "loss": 0.1, "groups": 2, "groups_with_signal": 2}
    )
    directory.append_metrics(
        2, "grpo", {"reward_mean": 0.0, "groups": 2, "groups_with_signal": 0, "loss": None}
    )
    directory.append_metrics(
        3, "grpo", {"reward_mean": 0.75, "loss": 0.2, "groups": 2, "groups_with_signal": 1}
    )
    late = Failure("time_limit", "abandoned after 5 s")
    rollouts = (
        attempt("it is 13", 0.0, "13"),
        attempt("```python\nfinal_answer(12)\n```", 1.0, number=1),
        attempt("hm", 0.5, error=late, number=2),
        attempt("12", None, number=3),
    )
    directory.append_rollouts([Group(rollouts[0].task, rollouts)], step=1, iteration=0)
    return directory.path


def test_a_summary_counts_steps_updates_signal_and_failures(run_dir):
    summary = summarise(run_dir)
    assert (summary["run"], summary["algorithm"], summary["model"]) == (
        "first",
        "grpo",
        "tiny-model",
    )
    assert (summary["steps"], summary["updates"]) == (3, 2)
    assert summary["reward_mean"] == {"first": 0.25, "last": 0.75}
    assert summary["groups"] == {"total": 6, "with_signal": 3}
    assert summary["attempts"] == 4
    assert summary["failures"] == {"time_limit": 1}
    assert summary["reward_failures"] == 1


def test_the_best_and_the_worst_attempt_are_shown(run_dir):
    summary = summarise(run_dir)
    assert summary["best"]["score"] == 1.0
    assert summary["best"]["turns"] == ["```python\nfinal_answer(12)\n```"]
    assert summary["worst"]["final_answer"] == "13"
    text = write_report(run_dir).read_text()
    assert "````text\n```python\nfinal_answer(12)\n```\n````" in text  # the fence holds
    assert text.index("The best attempt") < text.index("The worst attempt")
    assert "What is 5 + 7?" in text
    assert json.loads((run_dir / "report.json").read_text()) == summary


def test_a_worst_attempt_is_not_shown_where_all_are_equal(tmp_path):
    directory = RunDirectory.create(tmp_path, "equal", CONFIG)
    rollouts = (attempt("12", 1.0), attempt("also 12", 1.0, number=1))
    directory.append_rollouts([Group(rollouts[0].task, rollouts)], step=1, iteration=0)
    summary = summarise(directory.path)
    assert summary["best"]["turns"] == ["also 12"]
    assert summary["worst"] is None
    assert "worst" not in write_report(directory.path).read_text()


def test_the_last_of_several_rows_for_a_step_counts(run_dir):
    RunDirectory(run_dir).append_metrics(2, "grpo", {"reward_mean": 0.5, "loss": 0.3})
    rows = read_metrics(run_dir)
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert metric(rows[1], "reward_mean") == 0.5
    assert summarise(run_dir)["updates"] == 3


def test_torn_last_lines_are_left_out(run_dir):
    before = summarise(run_dir)
    for name in "metrics.jsonl", "rollouts.jsonl":
        path = run_dir / name
        lines = path.read_bytes().splitlines(keepends=True)
        path.write_bytes(b"".join(lines) + lines[0][: len(lines[0]) // 2])
    assert summarise(run_dir) == before


def test_a_metric_that_is_no_number_counts_as_missing(tmp_path):
    directory = RunDirectory.create(tmp_path, "nan", CONFIG)
    directory.append_metrics(1, "grpo", {"loss": float("nan"), "reward_mean": 0.5, "ok": True})
    [row] = read_metrics(directory.path)
    assert metric(row, "loss") is None
    assert metric(row, "ok") is None
    assert metric(row, "absent") is None
    assert summarise(directory.path)["updates"] == 0


def test_evaluations_are_tabled_and_survive_a_rewrite(run_dir):
    wrong, right = attempt("13", 0.0, "13"), attempt("12", 1.0)
    before = evaluate_groups([Group(wrong.task, (wrong,))])
    after = evaluate_groups([Group(right.task, (right,))])
    stages = {"before": before.as_dict(), "after": after.as_dict()}
    write_report(run_dir, {"stages": stages, "gain": compare(before, after).as_dict()})
    text = write_report(run_dir).read_text()
    report = json.loads((run_dir / "report.json").read_text())
    assert report["stages"]["after"]["accuracy"] == 1.0
    assert report["gain"]["mean"] == 1.0
    assert "| after | 100.0 % |" in text
    assert "| gain | +100.0 |" in text


def test_a_run_that_has_only_begun_has_a_report(tmp_path):
    directory = RunDirectory.create(tmp_path, "new", CONFIG)
    text = write_report(directory.path).read_text()
    assert "0 in 0 steps" in text
    assert summarise(directory.path)["best"] is None


def test_what_is_no_run_is_refused(tmp_path):
    with pytest.raises(RunDirectoryError, match="holds no run"):
        write_report(tmp_path)
    with pytest.raises(RunDirectoryError, match="holds no run"):
        summarise(Path("nowhere"))
    assert list(tmp_path.iterdir()) == []


def test_a_row_without_metrics_is_an_error_that_names_the_file(run_dir):
    with (run_dir / "metrics.jsonl").open("a") as file:
        file.write('{"schema": 1, "step": 4}\n')
    with pytest.raises(DataError, match=r"metrics\.jsonl"):
        read_metrics(run_dir)
