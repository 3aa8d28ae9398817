"""Progress on stderr: a bar on a terminal, plain lines as the work goes on elsewhere."""

from __future__ import annotations

import contextlib
import itertools
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
    _step_started: float = 0.0
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
        took = f"{time.monotonic() - self._step_started:.1f} s"
        words = [run.algorithm or run.name, f"step {_of(step, run.total_steps)}", note, took]
        _print(self.console, *words, *_times(self._started, step, run.total_steps))

    def _note(self, metrics: dict[str, Any]) -> str:
        words = [f"{self._rollouts} rollouts"] if self._rollouts else []
        reward = sum(self._scores) / len(self._scores) if self._scores else metrics.get("reward")
        for name, value in (("reward", reward), ("loss", metrics.get("loss"))):
            if isinstance(value, int | float) and math.isfinite(value):
                words.append(f"{name} {value:.3f}")
        return "  ".join(words)

    def _next_step(self) -> None:
        self._step_started = time.monotonic()
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
def watched(
    words: str, total: int, draw: bool = True, console: Console | None = None
) -> Iterator[Callable[[], None]]:
    """Progress through `total` things; call what it gives for each one done.

    A bar where stderr is a terminal, elsewhere a line for each tenth of them.
    """
    console = console or Console(stderr=True)
    if not draw:
        yield lambda: None
    elif console.is_terminal:
        bar = _counting_bar(console)
        task = bar.add_task(words, total=total)
        with _whatever_stderr_does():
            bar.start()
        try:
            yield lambda: bar.advance(task)
        finally:
            with _whatever_stderr_does():
                bar.stop()
    else:
        yield _tenths(console, words, total)


def tell(words: str) -> None:
    """One line on stderr: what begins now takes long, and happens once."""
    _print(Console(stderr=True), words)


def _counting_bar(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        TextColumn("{task.completed}/{task.total}"),
        TimeElapsedColumn(),
        console=console,
        refresh_per_second=2,
        transient=True,
    )


def _tenths(console: Console, words: str, total: int) -> Callable[[], None]:
    started, count = time.monotonic(), itertools.count(1)

    def advance() -> None:
        done = next(count)
        if 10 * done // total > 10 * (done - 1) // total:
            _print(console, words, _of(done, total), *_times(started, done, total))

    return advance


def _print(console: Console, *words: str) -> None:
    with _whatever_stderr_does():
        line = "  ".join(filter(None, words))
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def _times(started: float, done: int, total: int | None) -> list[str]:
    """How long it took so far, and how long the rest will take."""
    passed = time.monotonic() - started
    words = [f"{_clock(passed)} passed"]
    if total and 0 < done <= total:
        words.append(f"{_clock(passed / done * (total - done))} left")
    return words


def _of(step: int, total: int | None) -> str:
    return f"{step}/{total}" if total else str(step)


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}:{rest:02d}"


def _whatever_stderr_does() -> contextlib.AbstractContextManager[None]:
    """A terminal that went away (OSError) or a closed stderr (ValueError) never stops training."""
    return contextlib.suppress(OSError, ValueError)


__all__ = ["ProgressObserver"]
