"""Plans are run for real, each in a process of its own: what hangs or crashes there ends there, and
what it changed in memory is gone with it."""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import signal
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any

from attrs import field, frozen

from toolbrain_core.errors import ConfigurationError
from toolbrain_core.traces import Demonstration, Task, ToolCall, jsonable

#: What Python writes for an object that has no text of its own.
_REPR = re.compile(r"<[^<>]+ at 0x[0-9a-f]+>")

Demonstrate = Callable[[Task, Sequence[ToolCall]], Demonstration]


@frozen
class Outcome:
    """What a plan came to: its `answer` and the `results` of its calls, or why it was rejected."""

    answer: Any = None
    results: tuple[Any, ...] = ()
    why: str = ""
    detail: str = ""


@frozen
class PlanRunner:
    """Runs plans with `demonstrate`, twice each, for at most `time_limit` seconds together.

    Processes are forked, so that tools need not be pickled. Errors: `ConfigurationError` where the
    system cannot fork.
    """

    demonstrate: Demonstrate
    time_limit: float = 10.0
    max_bytes: int = field(default=10_000)

    def run(self, task: Task, calls: Sequence[ToolCall]) -> Outcome:
        """Rejected: "raised", "time limit", "crashed", "too large", "no answer" (nothing, or no
        number), "no data" (an object) and "not deterministic" (the two runs differ)."""
        if "fork" not in multiprocessing.get_all_start_methods():
            raise ConfigurationError("plans are run in forked processes, which this system lacks")
        context = multiprocessing.get_context("fork")
        here, there = context.Pipe(duplex=False)
        process = context.Process(target=self._child, args=(there, task, calls))
        process.start()
        there.close()
        try:
            if not here.poll(self.time_limit):
                return Outcome(why="time limit", detail=f"longer than {self.time_limit:g} s")
            return Outcome(**json.loads(here.recv_bytes()))
        except EOFError:
            return Outcome(why="crashed", detail="its process ended without a word")
        finally:
            _end(process.pid)  # before it is joined: the number is its own until then
            process.join()
            here.close()

    def _child(self, connection: Connection, task: Task, calls: Sequence[ToolCall]) -> None:
        os.setsid()  # so that what a tool starts ends with it
        with open(os.devnull, "r+b", buffering=0) as nothing:
            for stream in (0, 1, 2):
                os.dup2(nothing.fileno(), stream)
        try:
            outcome = self._outcome(task, calls)
        except BaseException as error:  # a tool may raise anything: the plan is rejected for it
            outcome = {"why": "raised", "detail": f"{type(error).__name__}: {error}"[:500]}
        connection.send_bytes(json.dumps(outcome).encode())
        connection.close()
        os._exit(0)  # no clean-up of the parent's: it is the parent's

    def _outcome(self, task: Task, calls: Sequence[ToolCall]) -> dict[str, Any]:
        runs = [_seen(self.demonstrate(task, calls)) for _ in range(2)]
        sizes = [len(json.dumps(run)) for run in runs]
        if max(sizes) > self.max_bytes:
            return {"why": "too large", "detail": f"{max(sizes)} bytes of results"}
        if (why := _unusable(runs[0]["answer"])) is not None:
            return {"why": why, "detail": repr(runs[0]["answer"])[:200]}
        if runs[0] != runs[1]:
            return {"why": "not deterministic", "detail": f"{runs[0]} and then {runs[1]}"[:500]}
        return runs[0]


def _seen(demonstration: Demonstration) -> dict[str, Any]:
    facts = demonstration.metadata
    return {"answer": jsonable(facts["final_answer"]), "results": jsonable(facts["results"])}


def _unusable(answer: Any) -> str | None:
    """Why nobody could give this answer: a short reason, or None."""
    if answer in (None, "", [], {}) or str(answer).lower() in {"nan", "inf", "-inf"}:
        return "no answer"
    return "no data" if _REPR.search(json.dumps(answer)) else None


def _end(pid: int | None) -> None:
    if pid is None:
        return
    for kill in (os.killpg, os.kill):  # its group, if it got as far as to have one
        try:
            kill(pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            continue
