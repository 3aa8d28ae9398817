"""The demo runs from end to end, and its report has what it promises."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from attrs import evolve

from toolbrain_core import Group, RewardResult, Rollout, Task, ToolCall, Trace, Turn
from toolbrain_core.runs import RunDirectory
from toolbrain_core.traces import read_rollouts

sys.path.insert(0, str(Path(__file__).parents[2] / "docs" / "examples"))

from demo import fresh_directory
from shop.stages import Settings, fast, make_data, reward
from shop.tasks import held_out_tasks
from shuffled_rewards import ShuffledReward

DEMO = Path(__file__).parents[2] / "docs" / "examples" / "demo.py"
STAGES = ["before", "warm_start", "after", "sft_alone"]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The run directory and what was printed."""
    run_dir = tmp_path_factory.mktemp("demo") / "runs" / "demo"
    command = [sys.executable, str(DEMO), "--fast", "--run-dir", str(run_dir)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-4000:]
    return run_dir, done.stdout


def report_of(run_dir: Path) -> dict[str, Any]:
    data: dict[str, Any] = json.loads((run_dir / "report.json").read_text(encoding="utf-8"))
    return data


def test_the_report_has_every_stage_with_its_interval_and_both_kinds_of_tasks(
    finished: tuple[Path, str],
) -> None:
    stages = report_of(finished[0])["stages"]
    assert list(stages) == STAGES
    for stage in stages.values():
        low, high = stage["ci95"]
        assert 0 <= low <= stage["accuracy"] <= high <= 1
        assert 0 <= stage["valid_format"] <= 1
        assert stage["n"] == stage["known"]["n"] + stage["novel"]["n"]
        assert min(stage["known"]["n"], stage["novel"]["n"]) > 0


def test_gains_are_differences_of_the_accuracies(finished: tuple[Path, str]) -> None:
    report = report_of(finished[0])
    accuracy = {name: stage["accuracy"] for name, stage in report["stages"].items()}
    for gain, old in (("gain", "before"), ("grpo_gain", "warm_start")):
        low, high = report[gain]["ci95"]
        assert low <= report[gain]["mean"] <= high
        assert report[gain]["mean"] == pytest.approx(accuracy["after"] - accuracy[old])


def test_every_stage_trained_and_sft_alone_took_no_longer(finished: tuple[Path, str]) -> None:
    training = report_of(finished[0])["training"]
    settings = fast(Settings())
    assert training["warm_start"]["updates"] == settings.warm_start_updates
    assert training["sft_alone"]["updates"] > 0
    together = training["warm_start"]["seconds"] + training["grpo"]["seconds"]
    # The pace of a run is only known from the one before it.
    assert 0 < training["sft_alone"]["seconds"] <= 2 * together


def test_the_run_directory_holds_plot_adapter_attempts_and_the_runs_of_each_training(
    finished: tuple[Path, str],
) -> None:
    run_dir, _ = finished
    assert (run_dir / "learning_curve.png").read_bytes().startswith(b"\x89PNG")
    assert (run_dir / "adapter" / "adapter_config.json").is_file()
    attempts = read_rollouts(run_dir / "rollouts.jsonl")
    assert len(attempts) == len(STAGES) * report_of(run_dir)["stages"]["before"]["n"]
    for name in ("warm_start", "grpo", "sft_alone"):
        assert json.loads((run_dir / name / "config.json").read_text())["policy"]
    assert "| before |" in (run_dir / "report.md").read_text(encoding="utf-8")


def test_the_table_and_the_sentences_are_printed(finished: tuple[Path, str]) -> None:
    run_dir, printed = finished
    for words in ("before", "warm start", "after", "SFT alone", "valid format", "Gold answer:"):
        assert words in printed
    assert str(run_dir / "learning_curve.png") in printed
    report = report_of(run_dir)
    claims = printed.count("Accuracy rose by")
    gains = [report[k] for k in ("gain", "grpo_gain", "gain_over_sft_alone")]
    assert claims == sum(gain["significant"] and gain["mean"] > 0 for gain in gains)


def test_an_earlier_demo_is_removed_and_anything_else_is_kept(tmp_path: Path) -> None:
    earlier, other = tmp_path / "demo", tmp_path / "mine"
    RunDirectory(fresh_directory(earlier).path).write_json("config.json", {"demo": True})
    (earlier / "old.txt").write_text("old")
    assert list(fresh_directory(earlier).path.iterdir()) == []
    other.mkdir()
    (other / "thesis.txt").write_text("five years of work")
    with pytest.raises(SystemExit, match="mine holds something else"):
        fresh_directory(other)
    RunDirectory(other).write_json("config.json", {"algorithm": "grpo"})
    with pytest.raises(SystemExit, match="give another --run-dir"):
        fresh_directory(other)
    assert (other / "thesis.txt").read_text() == "five years of work"


CODE = "price('mug') * 2 + shipping('Oslo')"


def trace(answer: Any, *made: tuple[str, str]) -> Trace:
    calls = tuple(ToolCall(str(i), n, {"item": a}, "code") for i, (n, a) in enumerate(made))
    return Trace(turns=(Turn((), "text", calls=calls),), final_answer=answer)


@pytest.mark.parametrize(
    ("attempt", "score"),
    [
        (trace(12.0, ("price", "mug"), ("shipping", "Oslo")), 1.4),
        (trace(13.0, ("price", "mug"), ("shipping", "Oslo")), 0.4),
        (trace(13.0, ("price", "mug")), 0.2),
        (trace(13.0, ("price", "mug"), ("price", "mug")), 0.0),
        (trace(12.0), 1.0),
        (Trace(), 0.0),
    ],
)
def test_the_reward_pays_for_the_answer_and_less_for_the_calls_that_lead_to_it(
    attempt: Trace, score: float
) -> None:
    assert reward(attempt, gold_answer=12, code=CODE).score == pytest.approx(score)


def test_shuffled_rewards_are_the_true_ones_dealt_out_anew() -> None:
    task = Task("t", "What do 2 mugs cost in Oslo?", 13.0, {"code": CODE})
    answers = [13.0, 13.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0]
    shuffled, permutations = ShuffledReward(seed=0), set()
    for first in range(0, 80, 8):
        group = Group(
            task,
            tuple(Rollout(task, trace(a), attempt=first + i) for i, a in enumerate(answers)),
        )
        scores = [result.score for result in shuffled(group)]
        assert sorted(scores) == pytest.approx([0.0] * 6 + [1.0] * 2)
        assert all(isinstance(result, RewardResult) for result in shuffled(group))
        assert scores == [result.score for result in ShuffledReward(seed=0)(group)]
        permutations.add(tuple(scores))
    assert len(permutations) > 3


def test_held_out_tasks_are_all_used_unless_it_is_the_fast_demo() -> None:
    assert Settings().held_out_stride == 1
    assert len(held_out_tasks()) >= 150
    assert evolve(fast(Settings()), seed=1).held_out_stride > 1


def test_demonstrations_are_of_one_call_and_no_grpo_task_is_seen_twice() -> None:
    from shop.agent import make_agent

    settings = evolve(Settings(), demonstrations=4, grpo_steps=5)
    data = make_data(settings, make_agent())
    assert {d.task.metadata["calls"] for d in data.demonstrations} == {1}
    assert len({task.id for task in data.grpo}) == 5 * settings.tasks_per_step
