"""The report of a run: `report.json` and `report.md`, from what the run directory holds.

Reads `config.json`, `metrics.jsonl` and `rollouts.jsonl`, also while the run goes on (a torn last
line is left out), and imports nothing heavy.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from .errors import DataError, RunDirectoryError
from .runs import RunDirectory
from .traces import SCHEMA_VERSION, read_json_lines

MetricsRow = Mapping[str, Any]
#: The JSON form of a `Rollout`.
RolloutLine = Mapping[str, Any]


def write_report(run_dir: str | Path, extra: Mapping[str, Any] | None = None) -> Path:
    """Write `report.json` and `report.md` into `run_dir`, atomically; returns the latter's path.

    `extra` is JSON data that is added to the report, for example `stages` (a name for each
    `Evaluation.as_dict()`) and comparisons (`gain`: a `Comparison.as_dict()`), which the text shows
    as tables. What was added earlier is kept when the report is written again.
    Errors: RunDirectoryError for a directory that holds no run, or cannot be written; DataError for
    a journal that cannot be read.
    """
    run_dir = Path(run_dir)
    report = {**_written_before(run_dir), **summarise(run_dir), **(extra or {})}
    directory = RunDirectory(run_dir)
    directory.write_json("report.json", report)
    directory.write_text("report.md", render(report))
    return run_dir / "report.md"


def summarise(run_dir: str | Path) -> dict[str, Any]:
    """What a run did, as JSON data.

    `updates` counts the steps that have a loss, `steps` all of them. `reward_mean` has the first
    and the last step's. `groups` counts those rolled out and those `with_signal` (rewards that
    differ). `failures` are attempts that failed, by kind; `best` and `worst` the attempts with the
    highest and lowest score (the latest among equals; `worst` is None where all are equal).
    Errors: as `write_report`.
    """
    run_dir = Path(run_dir)
    if not any((run_dir / name).exists() for name in ("config.json", "metrics.jsonl")):
        raise RunDirectoryError(
            f"{run_dir} holds no run: neither config.json nor metrics.jsonl is there. Give the "
            "directory of one run, such as runs/<name>."
        )
    config = RunDirectory(run_dir).config() if (run_dir / "config.json").exists() else {}
    rows = read_metrics(run_dir)
    return {
        "schema": SCHEMA_VERSION,
        "run": run_dir.resolve().name,
        "algorithm": _algorithm(config, rows),
        "model": _model(config),
        **_learning(rows),
        **_attempts(_lines(run_dir / "rollouts.jsonl")),
    }


def read_metrics(run_dir: str | Path) -> list[dict[str, Any]]:
    """The rows of `metrics.jsonl` in the order of their steps; none where the file is missing.

    Each has `step`, `algorithm` and `metrics`. Where a resumed run wrote a step again, the last row
    counts. Errors: DataError naming file and line.
    """
    path = Path(run_dir) / "metrics.jsonl"
    rows: dict[tuple[str, int], dict[str, Any]] = {}
    for line in _lines(path):
        step, metrics = line.get("step"), line.get("metrics")
        if not isinstance(step, int) or not isinstance(metrics, dict):
            raise DataError(f"{path}: a row needs a whole 'step' and 'metrics', not {line!r:.80}")
        rows[str(line.get("algorithm", "")), step] = line
    return sorted(rows.values(), key=lambda row: int(row["step"]))


def metric(row: MetricsRow, name: str) -> float | None:
    """One metric of a row; None where it is missing or not a number."""
    value = row["metrics"].get(name)
    return None if isinstance(value, bool) or not isinstance(value, int | float) else float(value)


def _lines(path: Path) -> Iterable[dict[str, Any]]:
    return read_json_lines(path) if path.exists() else ()


def _written_before(run_dir: Path) -> dict[str, Any]:
    try:
        data = json.loads((run_dir / "report.json").read_bytes())
    except (OSError, ValueError):  # none yet, or somebody else's file: the report replaces it
        return {}
    return data if isinstance(data, dict) else {}


def _algorithm(config: Mapping[str, Any], rows: Sequence[MetricsRow]) -> str:
    """The names in the order in which they trained; before the first step, the configured one."""
    names = list(dict.fromkeys(str(row["algorithm"]) for row in rows if row.get("algorithm")))
    if names:
        return ", ".join(names)
    configured = config.get("algorithm", "")
    name = configured.get("name", "") if isinstance(configured, dict) else configured
    return str(name)


def _model(config: Mapping[str, Any]) -> str:
    """The model's name: in what `Policy.describe()` gave (`policy`), or in the config itself."""
    described = config.get("policy")
    name = described.get("model") if isinstance(described, dict) else config.get("model")
    return name if isinstance(name, str) else ""


def _learning(rows: Sequence[MetricsRow]) -> dict[str, Any]:
    rewards = [value for row in rows if (value := metric(row, "reward_mean")) is not None]
    totals = {
        name: sum(metric(row, name) or 0.0 for row in rows)
        for name in ("groups", "groups_with_signal", "tokens", "seconds")
    }
    return {
        "steps": len(rows),
        "updates": sum(metric(row, "loss") is not None for row in rows),
        "reward_mean": {"first": rewards[0], "last": rewards[-1]} if rewards else None,
        "groups": {
            "total": int(totals["groups"]),
            "with_signal": int(totals["groups_with_signal"]),
        },
        "tokens": int(totals["tokens"]),
        "seconds": round(totals["seconds"], 1),
    }


def _attempts(rollouts: Iterable[RolloutLine]) -> dict[str, Any]:
    total, failures, not_scored = 0, Counter[str](), 0
    best: RolloutLine | None = None
    worst: RolloutLine | None = None
    for rollout in rollouts:
        total += 1
        failures.update([error["kind"]] if (error := rollout["trace"].get("error")) else [])
        not_scored += bool((rollout.get("reward") or {}).get("failure"))
        if (score := _score(rollout)) is None:
            continue
        if best is None or score >= (_score(best) or 0.0):
            best = rollout
        if worst is None or score <= (_score(worst) or 0.0):
            worst = rollout
    if best and worst and _score(best) == _score(worst):
        worst = None
    return {
        "attempts": total,
        "failures": dict(failures.most_common()),
        "reward_failures": not_scored,
        "best": _shown(best),
        "worst": _shown(worst),
    }


def _score(rollout: RolloutLine) -> float | None:
    score = (rollout.get("reward") or {}).get("score")
    return None if score is None else float(score)


def _shown(rollout: RolloutLine | None) -> dict[str, Any] | None:
    """One attempt without its tokens: what a person wants to read."""
    if rollout is None:
        return None
    task, trace = rollout["task"], rollout["trace"]
    return {
        "task_id": task.get("id"),
        "step": rollout.get("step"),
        "query": task.get("query"),
        "gold_answer": task.get("gold_answer"),
        "turns": [turn.get("text", "") for turn in trace.get("turns", ())],
        "final_answer": trace.get("final_answer"),
        "error": trace.get("error"),
        "score": _score(rollout),
    }


def render(report: Mapping[str, Any]) -> str:
    """The report as Markdown, from the data of `report.json`."""
    parts = [
        f"# Run {report['run']}",
        _table(("", ""), _facts(report)),
        *_stages(report),
        *(_attempt_section(name, report[name]) for name in ("best", "worst") if report[name]),
    ]
    return "\n\n".join(parts) + "\n"


def _facts(report: Mapping[str, Any]) -> list[tuple[Any, ...]]:
    groups, reward = report["groups"], report["reward_mean"]
    facts: list[tuple[Any, ...]] = [
        ("algorithm", report["algorithm"] or "unknown"),
        ("model", report["model"] or "unknown"),
        ("updates", f"{report['updates']} in {report['steps']} steps"),
    ]
    if reward:
        facts.append(
            ("mean reward", f"{reward['first']:.3f} at first, {reward['last']:.3f} at last")
        )
    if groups["total"]:
        facts.append(("groups with signal", f"{groups['with_signal']} of {groups['total']}"))
    facts.append(("attempts", report["attempts"]))
    facts += [(f"failed: {kind}", count) for kind, count in report["failures"].items()]
    if report["reward_failures"]:
        facts.append(("not scored", report["reward_failures"]))
    return facts


_STAGE_COLUMNS = ("stage", "accuracy", "95 % interval", "valid format", "tasks")
_CHANGE_COLUMNS = ("change in accuracy", "points", "95 % interval", "tasks")


def _stages(report: Mapping[str, Any]) -> list[str]:
    """Tables of the evaluations and comparisons that were added to the report."""
    parts: list[str] = []
    if stages := report.get("stages"):
        rows = [_stage(*item) for item in stages.items()]
        parts += ["## Evaluation", _table(_STAGE_COLUMNS, rows)]
    changes = {k: v for k, v in report.items() if isinstance(v, dict) and {"mean", "ci95"} <= {*v}}
    if changes:
        rows = [_change(*item) for item in changes.items()]
        parts += ["## Changes", _table(_CHANGE_COLUMNS, rows)]
    return parts


def _stage(name: str, stage: Mapping[str, Any]) -> tuple[Any, ...]:
    accuracy, valid = _share(stage.get("accuracy")), _share(stage.get("valid_format"))
    interval = " to ".join(map(_share, stage.get("ci95") or ["unknown"]))
    return name.replace("_", " "), accuracy, interval, valid, stage.get("n", "")


def _change(name: str, change: Mapping[str, Any]) -> tuple[Any, ...]:
    values = (change["mean"], *change["ci95"])
    mean, low, high = (f"{100 * value:+.1f}" for value in values)
    return name.replace("_", " "), mean, f"{low} to {high}", change.get("n", "")


def _attempt_section(name: str, attempt: Mapping[str, Any]) -> str:
    parts = [
        f"## The {name} attempt",
        f"Task {attempt['task_id']}, score {attempt['score']:g}.",
        _fenced(str(attempt["query"])),
    ]
    for number, text in enumerate(attempt["turns"], 1):
        parts += [f"Turn {number}:", _fenced(text)]
    if attempt["error"]:
        parts += [f"It failed ({attempt['error']['kind']}):", _fenced(attempt["error"]["message"])]
    else:
        parts += ["Its answer:", _fenced(json.dumps(attempt["final_answer"], ensure_ascii=False))]
    if attempt["gold_answer"] is not None:
        gold = json.dumps(attempt["gold_answer"], ensure_ascii=False)
        parts += ["The gold answer:", _fenced(gold)]
    return "\n\n".join(parts)


def _table(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join("| " + " | ".join(_cell(cell) for cell in line) + " |" for line in lines)


def _cell(value: Any) -> str:
    return " ".join(str(value).split()).replace("|", "\\|")


def _fenced(text: str) -> str:
    """A code block whose fence is longer than any run of backticks inside."""
    longest = max((len(run) for run in re.findall("`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}text\n{text}\n{fence}"


def _share(value: Any) -> str:
    return f"{100 * value:.1f} %" if isinstance(value, int | float) else "unknown"


__all__ = ["metric", "read_metrics", "render", "summarise", "write_report"]
