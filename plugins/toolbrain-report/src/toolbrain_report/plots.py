"""The learning curve of a run, as a PNG."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from attrs import frozen
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from toolbrain_core.errors import DataError, RunDirectoryError
from toolbrain_core.report import metric, read_metrics, summarise

Mark = tuple[str, float]

# Colours of Okabe and Ito (2008), which people with colour-blindness can tell apart.
_BLUE, _GREEN, _RED = "#0072B2", "#009E73", "#D55E00"
_MARKS = ("#E69F00", "#CC79A7", "#56B4E9", "#000000")
_LINE_STYLES = ("--", "-.", ":", (0, (6, 2, 1, 2, 1, 2)))


@frozen
class Curve:
    """One metric over the steps that have it: `values[i]` at `steps[i]`."""

    steps: tuple[int, ...]
    values: tuple[float, ...]


def plot_learning_curve(
    run_dir: str | Path, out: str | Path | None = None, marks: Sequence[Mark] | None = None
) -> Path:
    """Draw `learning_curve.png` (or `out`) from a run's metrics, atomically; returns its path.

    One panel each, above one axis of steps, for what the run recorded: the mean reward, the share
    of groups with signal, the loss. `marks` are (label, value) lines across the panel of the
    reward; by default the accuracies of the stages that `report.json` holds, if any.
    Errors: DataError for a run without a metric to draw; RunDirectoryError for a directory that
    holds no run, or a file that cannot be written.
    """
    run_dir = Path(run_dir)
    summary, rows = summarise(run_dir), read_metrics(run_dir)
    marks = _stage_marks(run_dir) if marks is None else marks
    panels = _panels(rows, marks)
    if not panels:
        raise DataError(
            f"nothing to plot: {run_dir}/metrics.jsonl has no row with a reward_mean or a loss. "
            "Plot the run after its first step."
        )
    figure = Figure(figsize=(8, 1 + 2.6 * len(panels)), dpi=120, layout="constrained")
    axes = figure.subplots(len(panels), sharex=True, squeeze=False)[:, 0]
    for draw, panel in zip(panels, axes, strict=True):
        draw(panel)
    axes[-1].set_xlabel("training step")
    axes[-1].xaxis.set_major_locator(MaxNLocator(integer=True))
    words = (summary["run"], summary["algorithm"], Path(summary["model"]).name)
    figure.suptitle("Learning curve: " + ", ".join(filter(None, words)), fontsize=12)
    return _save(figure, Path(out) if out else run_dir / "learning_curve.png")


def _panels(rows: Sequence[dict[str, Any]], marks: Sequence[Mark]) -> list[Callable[[Axes], None]]:
    """What there is to draw, from top to bottom."""
    reward, loss, signal = _curve(rows, "reward_mean"), _curve(rows, "loss"), _signal(rows)
    spread = _curve([row for row in rows if metric(row, "reward_mean") is not None], "reward_std")
    panels: list[Callable[[Axes], None]] = []
    if reward.steps:
        panels.append(lambda axes: _draw_reward(axes, reward, spread, marks))
    if signal.steps:
        panels.append(lambda axes: _draw_signal(axes, signal))
    if loss.steps:
        panels.append(lambda axes: _draw_loss(axes, loss))
    return panels


def _curve(rows: Sequence[dict[str, Any]], name: str) -> Curve:
    points = [(row["step"], value) for row in rows if (value := metric(row, name)) is not None]
    return Curve(tuple(step for step, _ in points), tuple(value for _, value in points))


def _signal(rows: Sequence[dict[str, Any]]) -> Curve:
    """The share of each step's groups whose rewards differed."""
    points = [
        (row["step"], (metric(row, "groups_with_signal") or 0.0) / groups)
        for row in rows
        if (groups := metric(row, "groups"))
    ]
    return Curve(tuple(step for step, _ in points), tuple(share for _, share in points))


def _draw_reward(axes: Axes, reward: Curve, spread: Curve, marks: Sequence[Mark]) -> None:
    _draw(axes, reward, _BLUE, "mean reward of a step")
    if spread.steps == reward.steps and len(reward.steps) > 1:
        window = _window(len(reward.steps))
        middle, width = smoothed(reward.values, window), smoothed(spread.values, window)
        low = [m - w for m, w in zip(middle, width, strict=True)]
        high = [m + w for m, w in zip(middle, width, strict=True)]
        label = "± 1 standard deviation of rewards"
        axes.fill_between(reward.steps, low, high, color=_BLUE, alpha=0.12, lw=0, label=label)
    for i, (label, value) in enumerate(marks):
        style, colour = _LINE_STYLES[i % len(_LINE_STYLES)], _MARKS[i % len(_MARKS)]
        axes.axhline(value, linestyle=style, color=colour, linewidth=1.5, label=label)
    axes.set_ylabel("reward, accuracy" if marks else "reward")
    _legend(axes)


def _draw_signal(axes: Axes, signal: Curve) -> None:
    _draw(axes, signal, _GREEN, "share of groups whose rewards differ")
    axes.set_ylim(-0.05, 1.05)
    axes.yaxis.set_major_formatter(PercentFormatter(xmax=1))
    axes.set_ylabel("groups with signal")
    _legend(axes)


def _draw_loss(axes: Axes, loss: Curve) -> None:
    _draw(axes, loss, _RED, "loss of a step")
    axes.set_ylabel("loss")
    _legend(axes)


def _draw(axes: Axes, curve: Curve, colour: str, label: str) -> None:
    """Every step as a point, and a line through their moving mean."""
    window = _window(len(curve.steps))
    alpha = 0.45 if window > 1 else 1.0
    axes.plot(curve.steps, curve.values, "o", color=colour, ms=4, mew=0, alpha=alpha, label=label)
    line = f"moving mean of {window} steps" if window > 1 else None
    axes.plot(curve.steps, smoothed(curve.values, window), color=colour, linewidth=2, label=line)
    axes.grid(alpha=0.3, linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)


def _legend(axes: Axes) -> None:
    # Above the panel, where no data can be behind it.
    options: dict[str, Any] = {"ncols": 3, "frameon": False, "fontsize": 8.5}
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1.0), borderaxespad=0.2, **options)


def _window(n: int) -> int:
    """Steps in the moving mean of `n` points: an odd number, a fifth of them, at most 9."""
    return min(9, max(1, n // 5) // 2 * 2 + 1)


def smoothed(values: Sequence[float], window: int) -> list[float]:
    """The centred moving mean of `window` (odd) values; near the ends, of those there are."""
    reach = window // 2
    around = [values[max(0, i - reach) : i + reach + 1] for i in range(len(values))]
    return [sum(near) / len(near) for near in around]


def _stage_marks(run_dir: Path) -> list[Mark]:
    try:
        stages = json.loads((run_dir / "report.json").read_bytes()).get("stages") or {}
    except (OSError, ValueError, AttributeError):  # no report yet, or not one of ours
        return []
    return [
        (f"accuracy, {name.replace('_', ' ')}", stage["accuracy"])
        for name, stage in stages.items()
        if isinstance(stage.get("accuracy"), int | float)
    ]


def _save(figure: Figure, out: Path) -> Path:
    temporary = out.with_name(f".{out.name}.{os.getpid()}.tmp")
    try:
        figure.savefig(temporary, format="png")
        os.replace(temporary, out)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise RunDirectoryError(
            f"cannot write {out}: {error.strerror or error}. Make room, or give another file"
        ) from error
    return out


__all__ = ["plot_learning_curve", "smoothed"]
