"""Progress on stderr: a bar on a terminal, one plain line per step elsewhere."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator
from typing import Any

from attrs import define, field
from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from .hookspecs import hookimpl
from .runs import Run, TrainResult
from .traces import Group


@define(eq=False)
class ProgressObserver:
    """Draws a run's progress: step, rollouts, mean reward, loss, time passed and time left.

    Register it with a `PluginManager`. What cannot be drawn (a closed stderr) is left out.
    """

    console: Console = field(factory=lambda: Console(stderr=True))
    _bar: Progress | None = None
    _task: TaskID | None = None
    _started: float = 0.0
    _rollouts: int = 0
    _scores: list[float] = field(factory=list)

    @hookimpl
    def toolbrain_run_started(self, run: Run) -> None:
        self._stop()
        self._started = time.monotonic()
        self._next_step()
        if self.console.is_terminal:
            self._bar = _bar(self.console)
            self._task = self._bar.add_task(run.algorithm or run.name, total=None, step=0, note="")
            with _whatever_stderr_does():
                self._bar.start()

    @hookimpl
    def toolbrain_group_finished(self, run: Run, group: Group) -> None:
        self._rollouts += len(group.rollouts)
        self._scores += [score for score in group.scores if score is not None]
        self._update(run, note=self._note({}))

    @hookimpl
    def toolbrain_step_finished(self, run: Run, step: int, metrics: dict[str, Any]) -> None:
        note = self._note(metrics)
        self._update(run, completed=step, step=_of(step, run.total_steps), note=note)
        if self._bar is None:
            self._line(run, step, note)
        self._next_step()

    @hookimpl
    def toolbrain_run_finished(self, run: Run, result: TrainResult | None) -> None:
        self._stop()

    def _update(self, run: Run, **fields: Any) -> None:
        if self._bar is not None and self._task is not None:
            with _whatever_stderr_does():
                self._bar.update(self._task, total=run.total_steps, **fields)

    def _line(self, run: Run, step: int, note: str) -> None:
        passed = time.monotonic() - self._started
        words = [run.algorithm or run.name, f"step {_of(step, run.total_steps)}", note]
        words.append(f"{_clock(passed)} passed")
        if run.total_steps and 0 < step <= run.total_steps:
            words.append(f"{_clock(passed / step * (run.total_steps - step))} left")
        with _whatever_stderr_does():
            line = "  ".join(filter(None, words))
            self.console.print(line, markup=False, highlight=False, soft_wrap=True)

    def _note(self, metrics: dict[str, Any]) -> str:
        words = [f"{self._rollouts} rollouts"] if self._rollouts else []
        reward = sum(self._scores) / len(self._scores) if self._scores else metrics.get("reward")
        for name, value in (("reward", reward), ("loss", metrics.get("loss"))):
            if isinstance(value, int | float) and math.isfinite(value):
                words.append(f"{name} {value:.3f}")
        return "  ".join(words)

    def _next_step(self) -> None:
        self._rollouts, self._scores = 0, []

    def _stop(self) -> None:
        if self._bar is not None:
            with _whatever_stderr_does():
                self._bar.stop()
            self._bar = None


def _bar(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        TextColumn("step {task.fields[step]}"),
        TextColumn("{task.fields[note]}"),
        TimeElapsedColumn(),
        TextColumn("passed,"),
        TimeRemainingColumn(),
        TextColumn("left"),
        console=console,
        refresh_per_second=2,  # the cores are the sampler's
    )


@contextlib.contextmanager
def watched(words: str, total: int, draw: bool = True) -> Iterator[Callable[[], None]]:
    """A bar of `total` things on a terminal's stderr; call what it gives for each one done."""
    console = Console(stderr=True)
    if not draw or not console.is_terminal:
        yield lambda: None
        return
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        TextColumn("{task.completed}/{task.total}"),
        TimeElapsedColumn(),
        console=console,
        refresh_per_second=2,
        transient=True,
    )
    with bar:
        task = bar.add_task(words, total=total)
        yield lambda: bar.advance(task)


def _of(step: int, total: int | None) -> str:
    return f"{step}/{total}" if total else str(step)


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}:{rest:02d}"


def _whatever_stderr_does() -> contextlib.AbstractContextManager[None]:
    """A terminal that went away (OSError) or a closed stderr (ValueError) never stops training."""
    return contextlib.suppress(OSError, ValueError)


__all__ = ["ProgressObserver"]
