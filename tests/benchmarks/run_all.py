"""Run every benchmark, and write the page of their results.

    make bench
    python tests/benchmarks/run_all.py [--peer PYTHON] [--vllm PYTHON] [--resume] [--page-only]

Each benchmark's JSON line goes to docs/benchmarks.jsonl as soon as it is there; in the end
docs/benchmarks.md is written from all of them. A benchmark that fails ends the run with its status,
and the page stays as it was; `--resume` goes on with what is missing (`make bench BENCH=--resume`).
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

from page import page_of

HERE = Path(__file__).parent
DOCS = HERE.parents[1] / "docs"
LINES, PAGE, PLOT = DOCS / "benchmarks.jsonl", DOCS / "benchmarks.md", DOCS / "benchmarks.png"


def main() -> None:
    options = parse()
    if not options.page_only:
        if not (options.resume and LINES.exists()):
            LINES.write_text(json.dumps(machine()) + "\n", encoding="utf-8")
        there = {line.get("command") for line in read()}
        for command in commands(options):
            if shlex.join(command) not in there:
                line = run(command)
                with LINES.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(line) + "\n")
    machine_line, *results = read()
    PAGE.write_text(page_of(machine_line, results, PLOT.name), encoding="utf-8")


def read() -> list[dict[str, Any]]:
    """The lines: the machine's, then one for each benchmark."""
    return [json.loads(line) for line in LINES.read_text(encoding="utf-8").splitlines()]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--peer", metavar="PYTHON", help="the Python that has toolbrain 0.1.4")
    parser.add_argument("--vllm", metavar="PYTHON", help="the Python that has vLLM")
    parser.add_argument("--resume", action="store_true", help="only what is not measured yet")
    parser.add_argument("--page-only", action="store_true", help="write the page again")
    return parser.parse_args()


def commands(options: argparse.Namespace) -> Iterator[list[str]]:
    """Script and arguments of each."""
    vllm = ["--vllm", options.vllm] if options.vllm else []
    yield ["rollouts.py", "--prompt", "1800", *vllm]
    yield ["rollouts.py", "--prompt", "1800", "--dtype", "bf16", *vllm]
    yield ["rollouts.py", "--prompt", "300"]
    yield ["rollouts.py", "--prompt", "1800", "--turns", "3"]
    for lora in ([], ["--full"]):
        for checkpointing in ([], ["--checkpointing"]):
            yield ["update.py", "--errors", *lora, *checkpointing]
    yield ["scaling.py", "--plot", os.path.relpath(PLOT)]
    if options.peer:
        yield ["peer_toolbrain.py", "--peer", options.peer]


def run(command: list[str]) -> dict[str, Any]:
    """One benchmark's line, with the `command` that gives it."""
    print(shlex.join(command), file=sys.stderr, flush=True)
    done = subprocess.run(
        [sys.executable, str(HERE / command[0]), *command[1:]], stdout=subprocess.PIPE, text=True
    )
    if done.returncode:
        raise SystemExit(done.returncode)
    print(done.stdout, end="", flush=True)
    return {**json.loads(done.stdout), "command": shlex.join(command)}


def machine() -> dict[str, Any]:
    """What the figures were measured on."""
    facts = dict(
        line.split(":", 1)
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        if ":" in line
    )
    model = next((facts[key] for key in facts if key.strip() == "model name"), platform.machine())
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9
    return {
        "cpu": model.strip(),
        "cores": os.cpu_count(),
        "memory_gb": round(memory, 1),
        "python": platform.python_version(),
        **{name: version(name) for name in ("torch", "transformers", "trl", "peft")},
        "date": time.strftime("%Y-%m-%d"),
    }


if __name__ == "__main__":
    main()
