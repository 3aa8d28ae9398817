"""The benchmarks run, at sizes that say nothing about speed, and their lines have every field."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from page import page_of

HERE = Path(__file__).parent
TINY = ("--prompt", "40", "--group", "2", "--new", "4", "--repeats", "1")
MACHINE = dict.fromkeys(
    ("date", "cores", "cpu", "memory_gb", "python", "torch", "transformers", "trl", "peft"), "?"
)
FIELDS = {"name", "ours_s", "other_s", "ratio", "peak_mb", "prompt", "group", "new", "dtype"}

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="peaks are read from /proc")


def line_of(script: str, *arguments: str) -> dict[str, Any]:
    """The one line that a benchmark prints."""
    command = [sys.executable, str(HERE / script), *TINY, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-4000:]
    line: dict[str, Any] = json.loads(done.stdout)
    assert line.keys() >= FIELDS
    assert min(line["ours_s"], line["other_s"]) > 0
    assert line["ratio"] == pytest.approx(line["other_s"] / line["ours_s"], rel=0.01)
    assert min(side["peak_mb"] for side in line["sides"].values()) > 100
    return line


def test_rollouts_measures_us_and_two_others_over_several_turns() -> None:
    line = line_of("rollouts.py", "--turns", "2")
    assert set(line["sides"]) == {"ours", "generate", "continuous_batching"}
    best = min(line["sides"][name]["median_s"] for name in ("generate", "continuous_batching"))
    assert line["other_s"] == best
    page = page_of(MACHINE, [{**line, "command": "rollouts.py"}], "plot.png")
    assert f"| {line['ours_s']} |" in page
    assert "Not measured: update, scaling, peer_toolbrain." in page


def test_update_computes_the_same_gradients_on_both_sides_and_in_float64() -> None:
    line = line_of("update.py", "--errors")
    assert 0 < line["max_relative_difference"] < 1e-3
    for what in ("logprobs", "loss", "gradient"):
        assert all(0 <= error < 1e-3 for error in line["errors"][what].values())
    assert line["errors"]["tensors"] == 2 * 7 * 30  # A and B, seven linear layers, 30 blocks
