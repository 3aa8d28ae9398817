"""What went wrong, typed: in one step, and in a run that ended without an answer."""

from __future__ import annotations

import sys
import traceback
from types import TracebackType

from smolagents import ActionStep, AgentError
from smolagents.utils import (
    AgentExecutionError,
    AgentGenerationError,
    AgentMaxStepsError,
    AgentParsingError,
    AgentToolCallError,
    AgentToolExecutionError,
)

from toolbrain_core.errors import ContextOverflow
from toolbrain_core.traces import Failure, FailureKind

from .attempts import Attempt, Scribe


def note_step(scribe: Scribe, step: ActionStep) -> None:
    """Attach a step's error to the turn it came from."""
    if isinstance(step.error, AgentMaxStepsError):
        scribe.attempt.max_steps_reached |= scribe.is_top
    elif step.error is not None:
        scribe.fail_turn(step_failure(step.error))


def step_failure(error: AgentError) -> Failure:
    """A step's error as a failure of its turn."""
    return Failure(_step_kind(error), str(error.message), type(error).__name__)


def _step_kind(error: AgentError) -> FailureKind:
    if isinstance(error, AgentParsingError):
        return "format"
    if isinstance(error, AgentToolCallError | AgentToolExecutionError):
        return "tool"
    # The executor's message for a SyntaxError (local_python_executor.evaluate_python_code).
    if isinstance(error, AgentExecutionError) and error.message.startswith("Code parsing failed"):
        return "format"
    return "execution"


def run_failure(error: Exception | None, attempt: Attempt) -> Failure | None:
    """Why the run has no answer; None where nothing failed.

    A model call that failed comes first (smolagents may have swallowed it), then a user's
    callback. What else was raised is the agent's doing where it is an `AgentError`, or was raised
    in smolagents' own code while it handled what the policy wrote; else it is infrastructure.
    """
    if attempt.line_error is not None:
        overflow = isinstance(attempt.line_error, ContextOverflow)
        return _failure("context_overflow" if overflow else "infrastructure", attempt.line_error)
    if attempt.callback_error is not None:
        return _failure("infrastructure", attempt.callback_error)
    if error is None:
        return None
    return _failure("agent" if _is_agents_doing(error, attempt) else "infrastructure", error)


def _is_agents_doing(error: Exception, attempt: Attempt) -> bool:
    if isinstance(error, AgentGenerationError) or not attempt.transcript.turns:
        return False
    return isinstance(error, AgentError) or _raised_in(error.__traceback__) == "smolagents"


def _raised_in(trace: TracebackType | None) -> str:
    """The package of the innermost frame that is not the standard library's."""
    packages = [str(f.f_globals.get("__name__", "")) for f, _ in traceback.walk_tb(trace)]
    names = [name.partition(".")[0] for name in packages]
    return next((name for name in reversed(names) if name not in sys.stdlib_module_names), "")


def _failure(kind: FailureKind, error: Exception) -> Failure:
    lines = "".join(traceback.format_exception(error)) if kind == "infrastructure" else ""
    return Failure(kind, str(error), type(error).__name__, lines)
