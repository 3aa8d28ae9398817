"""The run directory, and the run that an algorithm gets.

    runs/<name>/
      config.json       what was asked for, written first
      rollouts.jsonl    one line per attempt, exact tokens
      metrics.jsonl     one line per step
      report.json report.md
      checkpoints/checkpoint-N/toolbrain.json    written last: marks the checkpoint complete

Journals grow by whole lines, every other file is replaced at once: a directory can be read while
its run goes on, and resumed after it was killed.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import os
import shutil
import signal
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

from attrs import define, field, frozen

from .errors import ConfigurationError, RunDirectoryError
from .roles import Policy
from .rollouts import Rollouts
from .saving import MARKER, replace_file
from .traces import SCHEMA_VERSION, Group, Sampling, Task, json_line, jsonable

logger = logging.getLogger(__name__)

#: Parts of config.json in which a resumed run must equal the one it resumes.
_MUST_MATCH = ("algorithm", "options", "seed", "data")
#: The same of `policy`: what its checkpoints can be loaded into, and what they were trained in.
_POLICY_MUST_MATCH = ("class", "lora", "trainable_parameters", "dtype", "compute_dtype")


@frozen
class TrainResult:
    """What a training run came to.

    `updates` counts changes of the weights, `steps` also those skipped for want of signal.
    `no_signal` says why nothing was learned where `updates` is 0. `warnings` were logged as they
    came (`Run.warn`). `seconds` are wall-clock.
    """

    algorithm: str
    updates: int
    steps: int
    metrics: dict[str, Any]
    warnings: tuple[str, ...]
    run_dir: Path
    seconds: float
    no_signal: str | None = None


@frozen
class RunDirectory:
    """One run's directory. Every method raises RunDirectoryError where it cannot be written."""

    path: Path

    @classmethod
    def claim(cls, root: str | Path, word: str) -> str:
        """A name that begins with `word` and nobody has, its folder made: two processes that ask
        at once get two names."""
        with _writing(Path(root)):
            Path(root).mkdir(parents=True, exist_ok=True)
            for name in itertools.chain([word], (f"{word}-{n}" for n in itertools.count(2))):
                with contextlib.suppress(FileExistsError):
                    (Path(root) / name).mkdir()
                    return name
        raise AssertionError("there is always another name")

    @classmethod
    @contextlib.contextmanager
    def opened(
        cls, root: str | Path, name: str, config: Mapping[str, Any], resume: bool = False
    ) -> Iterator[RunDirectory]:
        """`create`, and held until the block ends: one run at a time writes into a directory.

        Errors: as `create`; RunDirectoryError where another run is going on in it.
        """
        path = cls._path(root, name)
        with _writing(path):
            path.mkdir(parents=True, exist_ok=True)
        with _held(path):
            yield cls.create(root, name, config, resume)

    @classmethod
    def create(
        cls, root: str | Path, name: str, config: Mapping[str, Any], resume: bool = False
    ) -> RunDirectory:
        """Make `root/name` with its `config.json`, or open it again to resume.

        With `resume` and nothing to resume, the run starts from the beginning, and a warning says
        so. The config of a resumed run is kept; broken last lines of its journals are cut off. A
        run that failed before its first attempt left nothing, so its name is free.
        Errors: RunDirectoryError for a run that exists without `resume`, one whose `algorithm`,
        `options`, `seed`, `data` or policy (adapter, precision) differ from `config`'s (names
        them), a name that is not one folder's.
        """
        directory = cls(cls._path(root, name))
        with _writing(directory.path):
            directory.checkpoints.mkdir(parents=True, exist_ok=True)
        if not directory._has_begun():
            if resume:
                logger.warning(
                    "nothing to resume in %s: starting from the beginning", directory.path
                )
            directory.write_json("config.json", config)
        elif resume:
            directory._check_same(config)
            directory._mend("rollouts.jsonl")
            directory._mend("metrics.jsonl")
        else:
            raise RunDirectoryError(
                f"{directory.path} holds a run already: give resume=True to go on with it, "
                "or another name"
            )
        return directory

    @staticmethod
    def _path(root: str | Path, name: str) -> Path:
        if not isinstance(name, str) or name in {"", ".", ".."} or Path(name).name != name:
            raise RunDirectoryError(f"a run's name must be the name of one folder, not {name!r}")
        return Path(root) / name

    def _has_begun(self) -> bool:
        """Whether anything was earned here."""
        journals = (self.path / name for name in ("rollouts.jsonl", "metrics.jsonl"))
        return any(file.exists() and file.stat().st_size for file in journals) or any(
            self.checkpoints.glob("checkpoint-*")
        )

    @property
    def checkpoints(self) -> Path:
        """Where checkpoints go, one folder `checkpoint-N` each."""
        return self.path / "checkpoints"

    def config(self) -> dict[str, Any]:
        """What `config.json` holds. Errors: RunDirectoryError where it cannot be read."""
        path = self.path / "config.json"
        try:
            data: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise RunDirectoryError(f"cannot read {path}: {error}; give another name") from error
        return data

    def append_rollouts(self, groups: Iterable[Group], step: int, iteration: int) -> None:
        """Journal the attempts of `groups`: one line each, all in one write."""
        rollouts = [rollout for group in groups for rollout in group.rollouts]
        self._append(
            "rollouts.jsonl", [json_line(r, step=step, iteration=iteration) for r in rollouts]
        )

    def append_metrics(self, step: int, algorithm: str, metrics: Mapping[str, Any]) -> None:
        """Journal one step's metrics. NaN and infinities become their text ("nan", "inf")."""
        line = {"schema": SCHEMA_VERSION, "step": step, "algorithm": algorithm}
        self._append("metrics.jsonl", [json.dumps({**line, "metrics": jsonable(metrics)})])

    def write_json(self, name: str, data: Any) -> None:
        """Replace a file by `data` as JSON, atomically."""
        self.write_text(name, _pretty(data))

    def write_text(self, name: str, text: str) -> None:
        """Replace a file by `text`, atomically: a reader sees the old one or the new one."""
        _replace(self.path / name, text)

    def complete_checkpoint(
        self, path: str | Path, step: int, extra: Mapping[str, Any] | None = None
    ) -> None:
        """Mark a checkpoint complete, once everything else in it is written."""
        marker = {**(extra or {}), "schema": SCHEMA_VERSION, "step": step, "complete": True}
        _replace(Path(path) / MARKER, _pretty(marker))

    def latest_checkpoint(self) -> tuple[Path, int] | None:
        """The complete checkpoint of the highest step, and that step."""
        found = self._complete_checkpoints()
        if not found:
            return None
        step, path = found[-1]
        return path, step

    def keep_newest_checkpoints(self, keep: int) -> None:
        """Remove all but the `keep` complete checkpoints of the highest steps. Call it once the
        newest is marked complete, so that there is one to resume from at every moment."""
        kept = {path for _, path in self._complete_checkpoints()[-keep:]}
        for path in set(self.checkpoints.glob("checkpoint-*")) - kept:
            shutil.rmtree(path, ignore_errors=True)

    def _complete_checkpoints(self) -> list[tuple[int, Path]]:
        """By their steps."""
        return sorted(
            (step, path)
            for path in self.checkpoints.glob("checkpoint-*")
            if (step := _completed_step(path)) is not None
        )

    def _check_same(self, config: Mapping[str, Any]) -> None:
        old, new = _compared(self.config()), _compared(config)
        differing = sorted(k for k in old.keys() | new.keys() if old.get(k) != new.get(k))
        if differing:
            changes = ", ".join(f"{k} (was {old.get(k)!r}, now {new.get(k)!r})" for k in differing)
            raise RunDirectoryError(
                f"cannot resume {self.path}: its run had others: {changes}. "
                "Give the old ones again, or another name to start a new run"
            )

    def _mend(self, name: str) -> None:
        """Cut off a broken last line: what a killed process, or a machine, left half written."""
        path = self.path / name
        if not path.exists():
            return
        with _writing(path), path.open("r+b") as file:
            data = file.read()
            whole = data.rfind(b"\n") + 1
            begin = data.rfind(b"\n", 0, max(0, whole - 1)) + 1
            if not _is_json(data[begin:whole]):
                whole = begin
            if whole < len(data):
                logger.warning("%s: cutting off a torn last line", path)
                file.truncate(whole)

    def _append(self, name: str, lines: Sequence[str]) -> None:
        path = self.path / name
        # A lone surrogate (a tool's badly decoded bytes) becomes its JSON escape, and reads back.
        data = "".join(line + "\n" for line in lines).encode("utf-8", "backslashreplace")
        with _writing(path):
            file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
            try:
                _write_whole(file, data)
            finally:
                os.close(file)


def _write_whole(file: int, data: bytes) -> None:
    """All of `data` at the end of the file or, where an OSError is raised, nothing of it."""
    start, written = os.fstat(file).st_size, 0
    try:
        while written < len(data):
            written += os.write(file, data[written:])
    except OSError:
        os.ftruncate(file, start)
        raise


def _replace(path: Path, text: str) -> None:
    with _writing(path):
        replace_file(path, text)


@contextlib.contextmanager
def _held(path: Path) -> Iterator[None]:
    """Inside, no other process (or thread) holds the directory. The lock ends with its process."""
    from filelock import FileLock, Timeout

    lock = FileLock(path / ".lock", blocking=False)
    with _writing(path):
        try:
            lock.acquire()
        except Timeout:  # an OSError too
            raise RunDirectoryError(
                f"another run is going on in {path}: wait for its end, or give another name"
            ) from None
    try:
        yield
    finally:
        lock.release()


@contextlib.contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise RunDirectoryError(
            f"cannot write {path}: {error.strerror or error}. What was written before is kept: "
            "make room (or the folder writable), then train again with resume=True, or choose "
            "another run directory"
        ) from error


def _pretty(data: Any) -> str:
    return json.dumps(jsonable(data, depth=64), indent=2, ensure_ascii=False) + "\n"


def _completed_step(path: Path) -> int | None:
    try:
        marker = json.loads((path / MARKER).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    complete = isinstance(marker, dict) and marker.get("complete") is True
    return marker.get("step") if complete else None


def _is_json(line: bytes) -> bool:
    try:
        json.loads(line or b"{}")
    except ValueError:
        return False
    return True


def _compared(config: Mapping[str, Any]) -> dict[str, Any]:
    """What a resumed run must have in common with the one it resumes, by dotted keys."""
    parts = {key: jsonable(config.get(key)) for key in _MUST_MATCH}
    policy = config.get("policy")
    if isinstance(policy, Mapping):
        parts["policy"] = {key: jsonable(policy.get(key)) for key in _POLICY_MUST_MATCH}
    return _flat(parts)


def _flat(data: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested mappings as one, with dotted keys."""
    flat: dict[str, Any] = {}
    for key, value in data.items():
        if isinstance(value, Mapping):
            flat.update(_flat(value, f"{prefix}{key}."))
        else:
            flat[f"{prefix}{key}"] = value
    return flat


class Observers(Protocol):
    """Who hears of a run: calls a hook of every plugin, and isolates those that raise."""

    def notify(self, hook_name: str, **arguments: Any) -> None: ...


@define(eq=False, kw_only=True)
class Run:
    """One training run, as an algorithm gets it.

    `data` is what the algorithm consumes (tasks, demonstrations, preferences). `resume_from` is
    the checkpoint to go on from. The algorithm sets `total_steps` when it knows it, and looks at
    `stop` between steps: set, it saves and raises KeyboardInterrupt. Only rank 0 writes and
    notifies.
    """

    name: str
    directory: RunDirectory
    policy: Policy
    data: tuple[Any, ...] = ()
    algorithm: str = ""
    seed: int = 0
    rank: int = 0
    world: int = 1
    resume_from: Path | None = None
    plugins: Observers | None = None
    rollouts: Rollouts | None = None
    stop: threading.Event = field(factory=threading.Event)
    warnings: list[str] = field(factory=list)
    total_steps: int | None = None

    def rollout(
        self,
        tasks: Sequence[Task],
        attempts: int,
        *,
        step: int,
        iteration: int,
        sampling: Sampling | None = None,
        first_attempt: int = 0,
    ) -> list[Group]:
        """`Rollouts.run` for this run; each group is journaled and announced as it finishes.

        Errors: as `Rollouts.run`; ConfigurationError for a run without an agent.
        """
        if self.rollouts is None:
            raise ConfigurationError(
                f"run {self.name!r} has no agent to roll out: {self.algorithm or 'its algorithm'} "
                "needs Run(rollouts=…)"
            )

        def finished(group: Group) -> None:
            if self.rank == 0:
                self.directory.append_rollouts([group], step, iteration)
            self._notify("toolbrain_group_finished", group=group)

        return self.rollouts.run(
            tasks,
            attempts,
            run_name=self.name,
            iteration=iteration,
            seed=self.seed,
            sampling=sampling,
            first_attempt=first_attempt,
            on_group=finished,
            stop=self.stop,
        )

    def record(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Journal and announce one step's metrics."""
        if self.rank == 0:
            self.directory.append_metrics(step, self.algorithm, metrics)
        self._notify("toolbrain_step_finished", step=step, metrics=dict(metrics))

    def warn(self, message: str) -> None:
        """Log a warning once, and keep it for `TrainResult.warnings`."""
        if message not in self.warnings:
            self.warnings.append(message)
            logger.warning("%s", message)

    def checkpoint_saved(
        self, path: str | Path, step: int, extra: Mapping[str, Any] | None = None
    ) -> None:
        """Mark a checkpoint complete: call it when everything in it is written."""
        if self.rank == 0:
            self.directory.complete_checkpoint(path, step, extra)

    def _notify(self, hook: str, **arguments: Any) -> None:
        if self.rank == 0 and self.plugins is not None:
            self.plugins.notify(hook, run=self, **arguments)


@contextlib.contextmanager
def interruptible(stop: threading.Event) -> Iterator[threading.Event]:
    """Inside, the first Ctrl-C sets `stop` and a second one raises KeyboardInterrupt.

    Does nothing outside the main thread, where Python allows no signal handlers.
    """
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return

    def on_interrupt(_number: int, _frame: FrameType | None) -> None:
        if stop.is_set():
            raise KeyboardInterrupt
        stop.set()
        logger.warning("interrupted: finishing; press Ctrl-C again to stop at once")

    previous = signal.signal(signal.SIGINT, on_interrupt)
    try:
        yield stop
    finally:
        # None: a handler that was not set from Python, and cannot be set again from here.
        signal.signal(signal.SIGINT, signal.SIG_DFL if previous is None else previous)


__all__ = ["Run", "RunDirectory", "TrainResult", "interruptible"]
