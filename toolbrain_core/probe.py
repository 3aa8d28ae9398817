"""Do tools keep state from one attempt to the next? Then attempts at a task cannot be compared.

A group's advantages mean something only if every attempt meets the same world.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Sequence
from itertools import pairwise, takewhile

from attrs import evolve

from .rollouts import Rollouts
from .traces import Group, Sampling, Task, ToolCall, ToolResult, Trace, jsonable

#: Tasks tried, at most, until an attempt calls a tool.
MAX_TASKS = 3

_REMEDY = (
    "Either the tool keeps state from one attempt to the next, or its answers vary by themselves "
    "(a clock, random numbers); attempts at one task cannot be compared then. Give each attempt "
    "a world of its own: Brain(make_agent) with a function that builds the agent, a fork() method "
    "on the tool, or setup= and teardown= that reset what it uses"
)


def probe_statefulness(
    rollouts: Rollouts,
    tasks: Sequence[Task],
    seed: int = 0,
    stop: threading.Event | None = None,
) -> str | None:
    """What is wrong, in words, where one greedy attempt that runs twice gets different results.

    The same attempt (same key, temperature 0, unscored) runs twice, one after the other, on the
    first tasks, until it calls a tool: at most three tasks. None if nothing was found, or if no
    tool was called. The tools are called for real. Errors: KeyboardInterrupt once `stop` is set.
    """
    unscored = evolve(rollouts, reward=None)
    for task in tasks[:MAX_TASKS]:
        first, second = (_greedy(unscored, task, seed, stop) for _ in range(2))
        if first.calls:
            return _difference(first, second)
    return None


def conflicting_results(group: Group) -> list[str]:
    """Of a group's attempts whose first calls are identical: where the results differ, in words.

    A first call has no history, so its result may depend on nothing but its arguments. Costs
    nothing, so that training can look at every group.
    """
    seen: dict[str, list[tuple[ToolCall, ToolResult]]] = {}
    for rollout in group.rollouts:
        for call, result in list(_answered(rollout.trace))[:1]:
            seen.setdefault(_written(call), []).append((call, result))
    return [
        message
        for pairs in seen.values()
        if (message := next(filter(None, (_conflict(a, b) for a, b in pairwise(pairs))), None))
    ]


def _greedy(rollouts: Rollouts, task: Task, seed: int, stop: threading.Event | None) -> Trace:
    groups = rollouts.run(
        [task],
        1,
        run_name="probe",
        iteration=0,
        seed=seed,
        sampling=Sampling(temperature=0.0),
        purpose="use",
        stop=stop,
    )
    return groups[0].rollouts[0].trace


def _difference(first: Trace, second: Trace) -> str | None:
    """The first call whose result differs though everything before it was the same."""
    pairs = zip(_answered(first), _answered(second), strict=False)
    alike = takewhile(lambda pair: _written(pair[0][0]) == _written(pair[1][0]), pairs)
    return next(filter(None, (_conflict(one, other) for one, other in alike)), None)


def _answered(trace: Trace) -> Iterator[tuple[ToolCall, ToolResult]]:
    for turn in trace.turns:
        results = {result.call_id: result for result in turn.results}
        yield from ((call, results[call.id]) for call in turn.calls if call.id in results)


def _conflict(one: tuple[ToolCall, ToolResult], other: tuple[ToolCall, ToolResult]) -> str | None:
    before, after = _shown(one[1]), _shown(other[1])
    if before == after:
        return None
    return (
        f"tool {one[0].name!r} gave different results for one call, {_written(one[0])}, in two "
        f"attempts at the same task: {before} and {after}. {_REMEDY}"
    )


def _written(call: ToolCall) -> str:
    arguments = (f"{k}={json.dumps(jsonable(v))}" for k, v in sorted(call.arguments.items()))
    return f"{call.name}({', '.join(arguments)})"


def _shown(result: ToolResult) -> str:
    if result.error is not None:
        return f"the error {result.error!r}"
    return json.dumps(jsonable(result.output), ensure_ascii=False)


__all__ = ["conflicting_results", "probe_statefulness"]
