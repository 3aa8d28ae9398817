"""The reward itself: a plain function of one trace."""

from __future__ import annotations

from toolbrain_core import Trace


def reward_hello(trace: Trace) -> float:
    """1.0 where the final answer says hello, else 0.0."""
    return float("hello" in str(trace.final_answer or "").lower())
