"""The learning curve, from journals that a real `RunDirectory` wrote."""

import random

import pytest
from click.testing import CliRunner
from matplotlib.image import imread
from toolbrain_report import plugin
from toolbrain_report.commands import report
from toolbrain_report.plots import plot_learning_curve, smoothed

from toolbrain_core.errors import DataError, RunDirectoryError
from toolbrain_core.plugins import PluginManager
from toolbrain_core.report import write_report
from toolbrain_core.runs import RunDirectory

PNG = b"\x89PNG\r\n"


def directory(tmp_path, algorithm="grpo"):
    config = {"algorithm": algorithm, "policy": {"model": "tiny-model"}}
    return RunDirectory.create(tmp_path, f"a-{algorithm}-run", config)


@pytest.fixture
def grpo_run(tmp_path):
    run, rng = directory(tmp_path), random.Random(0)
    for step in range(1, 41):
        metrics = {
            "reward_mean": min(1.0, 0.1 + step / 50 + rng.gauss(0, 0.08)),
            "reward_std": 0.2,
            "groups": 4,
            "groups_with_signal": rng.randint(1, 4),
            "loss": rng.gauss(0, 0.05),
        }
        run.append_metrics(step, "grpo", metrics)
    return run


def height(path):
    return imread(path).shape[0]


def test_a_run_is_drawn_into_its_directory(grpo_run):
    path = plot_learning_curve(grpo_run.path)
    assert path == grpo_run.path / "learning_curve.png"
    assert path.read_bytes().startswith(PNG)
    left = {entry.name for entry in grpo_run.path.iterdir()}
    assert left == {"config.json", "metrics.jsonl", "checkpoints", "learning_curve.png"}


def test_only_what_was_recorded_gets_a_panel(tmp_path, grpo_run):
    sft = directory(tmp_path, "sft")
    for step in range(1, 4):
        sft.append_metrics(step, "sft", {"loss": 1 / step, "rows": 8, "tokens": 300})
    assert height(plot_learning_curve(sft.path)) < height(plot_learning_curve(grpo_run.path))


def test_one_step_and_missing_numbers_can_be_drawn(tmp_path):
    run = directory(tmp_path)
    run.append_metrics(1, "grpo", {"reward_mean": 0.5, "loss": float("nan"), "groups": 0})
    assert plot_learning_curve(run.path).read_bytes().startswith(PNG)


def test_marks_change_the_picture_and_come_from_the_reports_stages(grpo_run, tmp_path):
    plain = plot_learning_curve(grpo_run.path, tmp_path / "plain.png").read_bytes()
    marks = [("accuracy, before", 0.2), ("accuracy, warm start", 0.9)]
    marked = plot_learning_curve(grpo_run.path, tmp_path / "marked.png", marks).read_bytes()
    assert marked != plain
    stages = {"before": {"accuracy": 0.2}, "warm_start": {"accuracy": 0.9}, "x": {"accuracy": None}}
    write_report(grpo_run.path, {"stages": stages})
    assert plot_learning_curve(grpo_run.path).read_bytes() == marked


def test_a_run_without_metrics_is_an_error_that_says_so(tmp_path):
    run = directory(tmp_path)
    with pytest.raises(DataError, match=r"nothing to plot.*metrics\.jsonl"):
        plot_learning_curve(run.path)
    with pytest.raises(RunDirectoryError, match="holds no run"):
        plot_learning_curve(tmp_path / "elsewhere")


def test_a_file_that_cannot_be_written_is_an_error_that_names_it(grpo_run):
    with pytest.raises(RunDirectoryError, match=r"nowhere/curve\.png"):
        plot_learning_curve(grpo_run.path, grpo_run.path / "nowhere" / "curve.png")


def test_the_moving_mean_is_centred_and_takes_what_there_is_at_the_ends():
    assert smoothed([0, 3, 6, 0, 0], 3) == [1.5, 3, 3, 2, 0]
    assert smoothed([1.0, 5.0], 1) == [1.0, 5.0]
    assert smoothed([], 3) == []


def test_the_hook_draws_finished_runs_and_skips_those_without_metrics(tmp_path, grpo_run, caplog):
    from toolbrain_core.runs import Run

    manager = PluginManager.with_plugins(plugin)
    for finished in grpo_run, directory(tmp_path, "sft"):
        run = Run(name="r", directory=finished, policy=None, data=(), algorithm="x", seed=0)
        manager.notify("toolbrain_run_finished", run=run, result=None)
        drawn = (finished.path / "learning_curve.png").exists()
        assert drawn == (finished is grpo_run)
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


def test_the_command_writes_the_report_and_the_plot(grpo_run, tmp_path):
    result = CliRunner().invoke(report, [str(grpo_run.path)])
    assert result.exit_code == 0, result.output
    assert (grpo_run.path / "report.md").exists()
    assert (grpo_run.path / "learning_curve.png").exists()
    empty = CliRunner().invoke(report, [str(directory(tmp_path, "sft").path)])
    assert empty.exit_code == 0
    assert "no metrics yet" in empty.output
