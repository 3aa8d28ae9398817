"""A reward: a function of one trace and the task's fields that it asks for by name."""

from __future__ import annotations

from typing import Any

from toolbrain_core import Trace


def reward_template(trace: Trace, gold_answer: Any = None) -> float:
    """1.0 where the final answer reads like the gold answer, else 0.0."""
    return float(trace.final_answer is not None and str(trace.final_answer) == str(gold_answer))
