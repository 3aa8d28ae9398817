"""Rewards: what users give, made into one shape, and the three that are built in.

A user's reward is any callable; `as_reward` makes a `Reward` of it: a function from a `Group` to
one `RewardResult` per attempt. A reward that raises, or that returns something that is not a finite
number, gives a typed failure: never a zero, and never an exception in the middle of a run.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import re
import threading
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Literal, SupportsFloat, get_origin

from attrs import evolve, frozen

from .answers import answers_match
from .errors import ConfigurationError
from .traces import Failure, Group, RewardResult, Task, Trace

#: The squares of scores beyond it are too large for a float.
_LARGEST = 1e150

Shape = Literal["trace", "traces", "group"]

_WHAT_TO_GIVE = (
    "give a function f(trace, **task_fields) -> float, f(traces, **task_fields) -> list[float], "
    "or f(group) -> list[RewardResult]"
)


def as_reward(func: Callable[..., Any]) -> CallableReward:
    """A `Reward` of any callable: function, lambda, bound method, partial, object, async or not.

    The first parameter tells what the callable takes:

    - `traces`, or annotated as a list, tuple or sequence: every trace of the group; it returns one
      score for each, in order;
    - `group`, or annotated as `Group`: the whole group; it returns one score for each attempt;
    - anything else: one trace; it returns one score.

    The annotation comes before the name. A score is a number (bools count as 1.0 and 0.0) or a
    `RewardResult`. Of the task's fields (`query`, `gold_answer`, `task_id`, the metadata's keys)
    those that the callable accepts are passed as keywords; `**kwargs` gets all of them, and what a
    `functools.partial` has bound stays bound. The coroutines of one group run concurrently.

    Errors: ConfigurationError for what cannot be called so.

    >>> reward = as_reward(lambda trace, gold_answer: float(trace.final_answer == gold_answer))
    """
    if isinstance(func, CallableReward):
        return func
    if not callable(func) or isinstance(func, type):
        hint = "; give an instance of the class" if isinstance(func, type) else ""
        raise ConfigurationError(f"a reward cannot be {func!r:.80}: {_WHAT_TO_GIVE}{hint}")
    first, *others = _parameters(func)
    bound = func.keywords if isinstance(func, partial) else {}
    return CallableReward(
        func=func,
        name=_name(func),
        shape=_shape(first),
        accepts=frozenset(p.name for p in others if p.kind in _BY_KEYWORD) - set(bound),
        requires=frozenset(p.name for p in others if _is_required(p)) - set(bound),
        withheld=frozenset({first.name, *bound}),
        takes_all=any(p.kind is p.VAR_KEYWORD for p in others),
    )


def check_reward(reward: Callable[..., Any], tasks: Iterable[Task]) -> None:
    """Refuse, before the first rollout, a reward that could not be called for one of `tasks`.

    Errors: ConfigurationError naming the required parameters that a task has no field for.
    """
    made = as_reward(reward)
    for task in tasks:
        missing = sorted(made.requires - set(task.fields()))
        if missing:
            raise ConfigurationError(
                f"reward {made.name!r} needs {', '.join(map(repr, missing))}, which task "
                f"{task.id!r} does not have (it has: {', '.join(sorted(task.fields()))}). Add the "
                "field to every task, or give the parameter a default."
            )


@frozen
class CallableReward:
    """A user's callable as a `Reward`; made by `as_reward`.

    `accepts` and `requires` are its keyword parameters, `takes_all` means that it has `**kwargs`,
    `withheld` are names that are bound already.
    """

    func: Callable[..., Any]
    name: str
    shape: Shape
    accepts: frozenset[str] = frozenset()
    requires: frozenset[str] = frozenset()
    withheld: frozenset[str] = frozenset()
    takes_all: bool = False

    def __call__(self, group: Group) -> list[RewardResult]:
        """One result per attempt, in the group's order. Raises nothing but KeyboardInterrupt."""
        traces = [rollout.trace for rollout in group.rollouts]
        if not traces:
            return []
        call = partial(self.func, **self._keywords(group.task))
        if self.shape == "trace":
            outcomes = _outcomes([partial(call, trace) for trace in traces])
        else:
            [whole] = _outcomes([partial(call, group if self.shape == "group" else traces)])
            outcomes = _one_each(whole, len(traces))
        return [
            _as_result(outcome, trace, f"reward {self.name!r} on task {group.task.id!r}")
            for outcome, trace in zip(outcomes, traces, strict=True)
        ]

    def _keywords(self, task: Task) -> dict[str, Any]:
        fields = {k: v for k, v in task.fields().items() if isinstance(k, str)}
        if self.takes_all:
            return {k: v for k, v in fields.items() if k not in self.withheld}
        return {k: v for k, v in fields.items() if k in self.accepts}


_BY_KEYWORD = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def _parameters(func: Callable[..., Any]) -> list[inspect.Parameter]:
    """The parameters, checked: one that takes the trace, the others reachable by keyword."""
    try:
        signature = _signature(func)
    except (ValueError, TypeError) as error:
        raise ConfigurationError(
            f"the parameters of reward {_name(func)!r} cannot be read ({error}): wrap it in a "
            f"function, and {_WHAT_TO_GIVE}"
        ) from None
    parameters = list(signature.parameters.values())
    if not parameters or parameters[0].kind in {
        inspect.Parameter.KEYWORD_ONLY,
        inspect.Parameter.VAR_KEYWORD,
    }:
        raise ConfigurationError(
            f"reward {_name(func)!r} has no parameter that could take a trace: {_WHAT_TO_GIVE}"
        )
    hidden = [
        p.name for p in parameters[1:] if p.kind is p.POSITIONAL_ONLY and p.default is p.empty
    ]
    if hidden:
        raise ConfigurationError(
            f"reward {_name(func)!r} takes {', '.join(hidden)} by position only; task fields are "
            f"passed as keywords: {_WHAT_TO_GIVE}"
        )
    return parameters


def _signature(func: Callable[..., Any]) -> inspect.Signature:
    """With annotations evaluated where they can be, else as they were written."""
    try:
        return inspect.signature(func, eval_str=True)
    except (ValueError, TypeError):
        raise
    except Exception:  # an annotation that names something imported for type checkers only
        return inspect.signature(func)


def _is_required(parameter: inspect.Parameter) -> bool:
    return parameter.kind in _BY_KEYWORD and parameter.default is parameter.empty


def _shape(first: inspect.Parameter) -> Shape:
    annotation = first.annotation
    text = annotation if isinstance(annotation, str) else ""
    kind = get_origin(annotation) or annotation
    if re.search(r"\bGroup['\"]?$", text) or (isinstance(kind, type) and issubclass(kind, Group)):
        return "group"
    batches = (list, tuple, Sequence, Iterable)
    if re.match(r"['\"]?(\w+\.)*([Ll]ist|[Tt]uple|Sequence|Iterable)\b", text) or kind in batches:
        return "traces"
    if kind is Trace or first.name not in {"traces", "group"}:
        return "trace"
    return "group" if first.name == "group" else "traces"


def _name(func: Any) -> str:
    while isinstance(func, partial):
        func = func.func
    return str(getattr(func, "__qualname__", type(func).__qualname__))


def _outcomes(calls: Sequence[Callable[[], Any]]) -> list[Any]:
    """What each call returned or, as a value, the exception it raised."""
    outcomes = [_attempt(call) for call in calls]
    if not any(inspect.isawaitable(outcome) for outcome in outcomes):
        return outcomes
    return _run_in_a_loop(outcomes)


def _attempt(call: Callable[[], Any]) -> Any:
    try:
        return call()
    # A reward may execute what the policy wrote, and that may well be `exit()`.
    except (Exception, SystemExit) as error:
        return error


def _run_in_a_loop(outcomes: Sequence[Any]) -> list[Any]:
    async def settle_all() -> list[Any]:
        return list(await asyncio.gather(*(_settle(outcome) for outcome in outcomes)))

    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(settle_all())
    # The caller's loop (a notebook's) is busy with this very call: use a thread of our own.
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.extend(asyncio.run(settle_all())), daemon=True)
    thread.start()
    thread.join()
    return results


async def _settle(outcome: Any) -> Any:
    if not inspect.isawaitable(outcome):
        return outcome
    try:
        return await outcome
    except (Exception, SystemExit, asyncio.CancelledError) as error:
        return error


def _one_each(returned: Any, n: int) -> list[Any]:
    """The scores that a whole-group reward returned, or `n` times what is wrong with it."""
    if isinstance(returned, BaseException):
        return [returned] * n
    try:
        if isinstance(returned, str | bytes | Mapping):
            raise TypeError(
                f"returned a {type(returned).__name__}; one score per attempt is needed"
            )
        scores = list(returned)
        if len(scores) != n:
            raise ValueError(f"returned {len(scores)} scores for {n} attempts")
    except Exception as error:
        return [error] * n
    return scores


def _as_result(outcome: Any, trace: Trace, where: str) -> RewardResult:
    """One attempt's outcome as a result whose numbers are finite, or as a failure."""
    if isinstance(outcome, BaseException):
        return _failed(f"{where}: {type(outcome).__name__}: {outcome}", outcome)
    try:
        if not isinstance(outcome, RewardResult):
            return RewardResult(_number(outcome))
        if outcome.failure is not None:
            return evolve(outcome, score=None)
        if len(outcome.turn_scores) not in {0, len(trace.turns)}:
            raise ValueError(
                f"{len(outcome.turn_scores)} turn_scores for {len(trace.turns)} turns; give one "
                "for each turn, or none"
            )
        return evolve(
            outcome,
            score=_number(outcome.score),
            parts={str(k): _number(v) for k, v in outcome.parts.items()},
            turn_scores=tuple(_number(v) for v in outcome.turn_scores),
        )
    except Exception as error:
        return _failed(f"{where}: {error}", error)


def _number(value: Any) -> float:
    if not isinstance(value, SupportsFloat):
        raise TypeError(f"returned {value!r:.80}; a finite number or a RewardResult is needed")
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"returned {number}; a finite number is needed")
    if abs(number) > _LARGEST:
        raise ValueError(f"returned {number}; a number within ±{_LARGEST:g} is needed")
    return number


def _failed(message: str, error: BaseException) -> RewardResult:
    text = "".join(traceback.format_exception(error))
    return RewardResult(None, failure=Failure("reward", message, type(error).__name__, text))


def is_correct(trace: Trace, gold: Any) -> bool:
    """Whether the policy's own final answer matches `gold`.

    Only `trace.final_answer` counts, whatever a tool returned; an attempt that failed, or that
    gave no answer, is not correct.
    """
    return _answered(trace) and answers_match(trace.final_answer, gold)


def _answered(trace: Trace) -> bool:
    return trace.error is None and trace.final_answer is not None


def reward_exact_match(trace: Trace, gold_answer: Any) -> float:
    """1.0 where the policy's final answer matches `gold_answer` (`answers_match`), else 0.0.

    Errors: ValueError for a task without a gold answer (a typed failure in a run, not a zero).
    """
    if gold_answer is None:
        raise ValueError(
            "the task has no gold_answer to compare with; add it, or use another reward"
        )
    return float(is_correct(trace, gold_answer))


def reward_tool_execution_success(trace: Trace) -> float:
    """The share of the policy's acts that worked: ok / (ok + failed), and 0.0 without any act.

    `ok` are tool calls that returned; giving the final answer is not one of them. `failed` are
    calls that did not return, and turns whose text could not be parsed or whose code raised,
    unless a failed call of that turn is counted already.
    """
    ok = failed = 0
    for turn in trace.turns:
        returned = {result.call_id for result in turn.results if result.error is None}
        calls = [call for call in turn.calls if call.name != "final_answer"]
        good = sum(call.id in returned for call in calls)
        bad = len(calls) - good
        ok, failed = ok + good, failed + (bad or int(turn.error is not None))
    return ok / (ok + failed) if ok + failed else 0.0


def reward_step_efficiency(trace: Trace, max_turns: int | None = None) -> float:
    """How few turns the answer took: in (0, 1], and 0.0 where there is no answer.

    With n turns: 1 / n, or with `max_turns` = m: 1 - (n - 1) / m, and 1 / m from n = m on. Doing
    nothing is not rewarded. Errors: ValueError for `max_turns` below 1.
    """
    if max_turns is not None and max_turns < 1:
        raise ValueError(f"max_turns is {max_turns}; it must be at least 1")
    if not _answered(trace):
        return 0.0
    turns = max(1, len(trace.turns))
    if max_turns is None:
        return 1 / turns
    return 1 - (min(turns, max_turns) - 1) / max_turns


__all__ = [
    "CallableReward",
    "answers_match",
    "as_reward",
    "check_reward",
    "is_correct",
    "reward_exact_match",
    "reward_step_efficiency",
    "reward_tool_execution_success",
]
