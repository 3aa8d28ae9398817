"""The sides of a benchmark: a process for each, measured in turn.

A side sets itself up, says so, and measures once per request; in between it sleeps. So its peak of
memory is its own, and it takes no time from the others. Answers are JSON lines on standard output;
whatever the libraries print goes to standard error. Sides also run in environments of others, so
only Python's own library is imported here. Linux only: the peaks are read from /proc.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

#: One measurement: its number from 0 on, to `seconds` and whatever else is worth saying.
Measure = Callable[[int], Mapping[str, Any]]


def parser(doc: str, repeats: int = 3) -> argparse.ArgumentParser:
    """The options that all benchmarks have. `--side` and `--directory` are for the children."""
    made = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--repeats", type=int, default=repeats, help="measurements of each side")
    made.add_argument("--side", help=argparse.SUPPRESS)
    made.add_argument("--directory", type=Path, help=argparse.SUPPRESS)
    return made


def run(
    options: argparse.Namespace,
    sides: Mapping[str, Callable[[argparse.Namespace], Measure]],
    compare: Callable[[argparse.Namespace], Mapping[str, Any]],
) -> None:
    """What a benchmark does: print its line, or be the side that `--side` names."""
    if options.side:
        serve(partial(sides[options.side], options))
    else:
        print(json.dumps(compare(options)))


class Side:
    """One side's process: this script again, with `--side name`, by `python`. `directory` is where
    sides leave what others need."""

    def __init__(
        self,
        name: str,
        directory: str | Path,
        python: str = sys.executable,
        environment: Mapping[str, str] | None = None,
    ):
        self.name = name
        command = [python, *sys.argv, "--side", name, "--directory", str(directory)]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **(environment or {})},
        )

    def ready(self) -> None:
        """Wait until the side is set up."""
        self._answer()

    def measure(self, repeat: int) -> dict[str, Any]:
        """One measurement, with the side's `peak_mb` so far."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{repeat}\n")
        self._process.stdin.flush()
        return self._answer()

    def close(self) -> None:
        """End the process, whatever it does."""
        self._process.kill()
        self._process.communicate()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            status = self._process.wait()
            raise SystemExit(f"the side {self.name!r} ended with status {status}; see above")
        answer: dict[str, Any] = json.loads(line)
        return answer


@contextmanager
def running(*sides: Side) -> Iterator[None]:
    """The sides, set up, until the block ends."""
    try:
        for side in sides:
            side.ready()
        yield
    finally:
        for side in sides:
            side.close()


def measured_in_turn(sides: Sequence[Side], repeats: int) -> dict[str, dict[str, Any]]:
    """A B C A B C …: for each side its `seconds`, their median `median_s`, its `peak_mb`, and what
    else it said last."""
    answers: dict[str, list[dict[str, Any]]] = {side.name: [] for side in sides}
    for repeat in range(repeats):
        for side in sides:
            answer = side.measure(repeat)
            print(f"{side.name} {repeat + 1}/{repeats}: {answer}", file=sys.stderr, flush=True)
            answers[side.name].append(answer)
    return {name: _summary(given) for name, given in answers.items()}


def _summary(answers: Sequence[dict[str, Any]]) -> dict[str, Any]:
    seconds = [answer["seconds"] for answer in answers]
    rounded = [round(s, 3) for s in seconds]
    return {**answers[-1], "median_s": round(median(seconds), 3), "seconds": rounded}


def ours_against(
    others: Sequence[str], sides: Mapping[str, Mapping[str, Any]], ours: str = "ours"
) -> dict[str, Any]:
    """The fields that every comparison has, against the fastest of the others."""
    best = min(others, key=lambda name: float(sides[name]["median_s"]))
    return {
        "ours_s": sides[ours]["median_s"],
        "other_s": sides[best]["median_s"],
        "ratio": round(sides[best]["median_s"] / sides[ours]["median_s"], 3),
        "peak_mb": sides[ours]["peak_mb"],
        "other": best,
        "other_peak_mb": sides[best]["peak_mb"],
    }


def serve(set_up: Callable[[], Measure]) -> None:
    """What a side does: set up, then measure once per line, until its input ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the libraries print is no answer
    measure = set_up()
    print("{}", file=answers, flush=True)
    for line in sys.stdin:
        answer = dict(measure(int(line)))
        print(json.dumps({**answer, "peak_mb": peak_mb()}), file=answers, flush=True)


def peak_mb() -> float:
    """Megabytes that this process had resident at its peak, since it began or `forget_peak`."""
    found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text(encoding="ascii"))
    assert found is not None
    return round(int(found[1]) * 1024 / 1e6, 1)


def forget_peak() -> None:
    """Let `peak_mb` begin anew."""
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
