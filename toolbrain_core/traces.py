"""The data: tasks, turns, traces, rollouts, groups. Frozen, and to JSON and back.

A failed run is data (`Trace.error`), never a crash. Recorded ids are exactly what was sampled.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from attrs import Factory, fields_dict, frozen

from .errors import DataError

#: Version of the JSON form. A reader refuses a newer one.
SCHEMA_VERSION = 1

FailureKind = Literal[
    "format",  # the agent's framework could not parse what the policy wrote
    "execution",  # the code that the policy wrote raised
    "tool",  # a tool call failed: unknown tool, bad arguments, the tool raised
    "agent",  # the agent gave up or crashed in a way that is the policy's doing
    "context_overflow",  # the conversation no longer fits the model's context
    "time_limit",  # the attempt was abandoned
    "infrastructure",  # sampler, network, adapter, setup(): not the policy's doing
    "reward",  # the reward raised, or returned something that is not a finite number
]

#: The policy's own mistakes: scored like any answer. Everything else is masked in training.
OWN_MISTAKES = frozenset({"format", "execution", "tool", "agent", "context_overflow"})


@frozen
class Failure:
    """What went wrong, typed. `exception` is the class name; `traceback` is kept where it helps."""

    kind: FailureKind
    message: str
    exception: str = ""
    traceback: str = ""

    @property
    def is_own_mistake(self) -> bool:
        """Whether the policy is to blame, so that the attempt is scored rather than masked."""
        return self.kind in OWN_MISTAKES


@frozen
class Task:
    """One thing to do. `gold_answer` may be missing; `metadata` is free (JSON)."""

    id: str
    query: str
    gold_answer: Any = None
    metadata: Mapping[str, Any] = Factory(dict)

    def fields(self) -> dict[str, Any]:
        """What a reward gets as keywords: query, gold_answer, task_id and the metadata's keys."""
        own = {"task_id": self.id, "query": self.query, "gold_answer": self.gold_answer}
        return {**self.metadata, **own}


@frozen
class ToolSpec:
    """A tool as a model is told of it; `parameters` is a JSON schema of type object.

    `side_effects`: calling it changes something outside, so that it is never called to try it.
    """

    name: str
    description: str = ""
    parameters: Mapping[str, Any] = Factory(dict)
    side_effects: bool = False


@frozen
class ToolCall:
    """One call with its arguments, and whether the policy wrote it as JSON or inside code."""

    id: str
    name: str
    arguments: Mapping[str, Any] = Factory(dict)
    via: Literal["json", "code"] = "json"


@frozen
class ToolResult:
    """What one call gave: an `output` (JSON, or its text), or the text of the `error`."""

    call_id: str
    output: Any = None
    error: str | None = None


@frozen
class Sampling:
    """How tokens are drawn. Temperature 0 is greedy; top_p 1, top_k 0, min_p 0 cut nothing."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    max_new_tokens: int = 256
    stop: tuple[str, ...] = ()


@frozen
class Turn:
    """One model call inside a run, with exactly what was sampled.

    `logprobs[i]` is the natural logarithm of the probability of `completion_ids[i]` after
    temperature and before top-p, top-k and min-p. `finish_reason`: "eos", "stop" (a stop string),
    "length" (max_new_tokens) or "context" (the context was full; what was sampled is kept).
    `row_break` says why this turn's prompt did not go on from an earlier turn's ids; None if it
    did, "first" for a conversation's first turn.
    """

    messages: tuple[Mapping[str, Any], ...]
    text: str
    prompt_ids: tuple[int, ...] = ()
    completion_ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    finish_reason: str = "eos"
    sampling: Sampling = Sampling()
    weights_version: int = 0
    agent_name: str = ""
    calls: tuple[ToolCall, ...] = ()
    results: tuple[ToolResult, ...] = ()
    error: Failure | None = None
    row_break: str | None = "first"


@frozen
class Usage:
    """Tokens counted as the model saw them (each turn's whole prompt), and wall-clock seconds."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    seconds: float = 0.0


@frozen
class Trace:
    """The execution trace of one run. `final_answer` is what the policy answered, or None."""

    turns: tuple[Turn, ...] = ()
    final_answer: Any = None
    error: Failure | None = None
    usage: Usage = Usage()
    state: Mapping[str, Any] = Factory(dict)

    @property
    def calls(self) -> tuple[ToolCall, ...]:
        """Every tool call of the run, in order."""
        return tuple(call for turn in self.turns for call in turn.calls)

    @property
    def results(self) -> tuple[ToolResult, ...]:
        """Every tool result of the run, in order."""
        return tuple(result for turn in self.turns for result in turn.results)

    @property
    def well_formed(self) -> bool:
        """Whether every turn could be parsed by the agent's framework."""
        return bool(self.turns) and not any(
            t.error and t.error.kind == "format" for t in self.turns
        )


@frozen
class RewardResult:
    """The score of one attempt. `score` is None exactly when `failure` says why.

    `parts` are a composed reward's components, `turn_scores` one number per turn or empty.
    """

    score: float | None
    parts: Mapping[str, float] = Factory(dict)
    turn_scores: tuple[float, ...] = ()
    reasons: tuple[str, ...] = ()
    failure: Failure | None = None


@frozen
class Rollout:
    """One attempt at a task. `reward` is None where nothing scored it (evaluation without one)."""

    task: Task
    trace: Trace
    reward: RewardResult | None = None
    attempt: int = 0


@frozen
class Group:
    """The attempts at one task."""

    task: Task
    rollouts: tuple[Rollout, ...]

    @property
    def scores(self) -> tuple[float | None, ...]:
        """One score per attempt; None where it could not be scored."""
        return tuple(r.reward.score if r.reward else None for r in self.rollouts)


@frozen
class Demonstration:
    """A conversation to imitate: OpenAI-shaped `messages`; the assistant's are trained on.

    `tools` and `template_options` are what the chat template gets beside them. Where
    `metadata["turns"]` is there, it is trained on instead: a list of `messages` (the prompt of one
    model call), `text` (what to write) and, if they differ, `tools`.
    """

    task: Task
    messages: tuple[Mapping[str, Any], ...]
    tools: tuple[Mapping[str, Any], ...] = ()
    template_options: Mapping[str, Any] = Factory(dict)
    metadata: Mapping[str, Any] = Factory(dict)


@functools.cache
def _converter() -> Any:
    """cattrs, imported on first use: it is only needed where JSON is read or written."""
    from cattrs.preconf.json import make_converter

    return make_converter(omit_if_default=True)


def jsonable(value: Any, depth: int = 8) -> Any:
    """`value` as JSON data. What JSON cannot hold becomes its text; nothing is dropped."""
    if isinstance(value, int) and value.bit_length() > 10_000:
        return hex(value)  # Python refuses to write more than 4,300 decimal digits
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else repr(value)
    if depth and isinstance(value, Mapping):
        return {str(key): jsonable(item, depth - 1) for key, item in value.items()}
    if depth and isinstance(value, list | tuple):
        return [jsonable(item, depth - 1) for item in value]
    if depth and isinstance(value, set | frozenset):
        return sorted((jsonable(item, depth - 1) for item in value), key=repr)
    return str(value)


def to_json(record: Any) -> dict[str, Any]:
    """The JSON form of any record of this module."""
    data: dict[str, Any] = _converter().unstructure(record)
    return data


def from_json(kind: type[Any], data: Mapping[str, Any]) -> Any:
    """A record of class `kind` from its JSON form. Errors: DataError that names what is wrong."""
    try:
        return _converter().structure(data, kind)
    except Exception as error:  # cattrs raises groups of many kinds; all mean "not this record"
        from cattrs import transform_error

        raise DataError(f"not a {kind.__name__}: {'; '.join(transform_error(error))}") from error


def json_line(record: Any, **extra: Any) -> str:
    """One line of a journal: schema version, `extra`, then the record. No line break."""
    data = {"schema": SCHEMA_VERSION, **extra, **to_json(record)}
    try:
        return json.dumps(data, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError):  # rare, so only then: NaN, or an object in a free field
        return json.dumps(jsonable(data, depth=64), ensure_ascii=False, allow_nan=False)


def read_json_lines(path: str | Path) -> Iterator[dict[str, Any]]:
    """The objects of a journal. A torn last line (a run that was killed) is left out.

    Errors: as `read_objects`; DataError for a line that a newer toolbrain wrote.
    """
    for number, data in read_objects(path):
        schema = data.get("schema", 1)
        if not isinstance(schema, int) or schema > SCHEMA_VERSION:
            raise DataError(
                f"{path}:{number}: schema {schema!r:.60}; this toolbrain reads up to "
                f"{SCHEMA_VERSION}. Upgrade toolbrain-core."
            )
        yield data


def read_objects(path: str | Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Line number and object of each line of a JSONL file, but for a torn last line.

    Errors: DataError with file and line number for a line that is not a JSON object.
    """
    # Bytes: str.splitlines also splits at U+2028 and U+0085, which JSON leaves as they are, and a
    # torn line may end inside a character.
    lines = Path(path).read_bytes().splitlines(keepends=True)
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            data = json.loads(line)
        except ValueError as error:
            if number == len(lines) and not line.endswith(b"\n"):
                return
            raise DataError(f"{path}:{number}: not JSON ({error})") from None
        if not isinstance(data, dict):
            raise DataError(f"{path}:{number}: a JSON object is needed, not {data!r:.60}")
        yield number, data


def read_rollouts(path: str | Path) -> list[Rollout]:
    """The rollouts of a `rollouts.jsonl`, in order. Errors: DataError naming file and line."""
    return [from_json(Rollout, _own_fields(Rollout, data)) for data in read_json_lines(path)]


def _own_fields(kind: type[Any], data: Mapping[str, Any]) -> dict[str, Any]:
    return {name: data[name] for name in fields_dict(kind) if name in data}


def as_tasks(data: Iterable[Any]) -> list[Task]:
    """Tasks from dicts, `Task`s or any iterable of either.

    A dict needs `query`; `id`, `gold_answer` and `metadata` are taken by name, every other key
    goes into the metadata. A missing id becomes the position ("0", "1", …).
    Errors: DataError for no tasks, a task without a query, two tasks with one id.
    """
    if isinstance(data, str | bytes | Mapping):
        raise DataError(
            f"tasks must be a list of dicts or Task objects, not one {type(data).__name__}"
        )
    if not isinstance(data, Iterable):
        raise DataError(
            f"tasks must be an iterable of dicts or Task objects, not {type(data).__name__}"
        )
    tasks = [_as_task(item, index) for index, item in enumerate(data)]
    if not tasks:
        raise DataError("no tasks: give at least one {'query': …, 'gold_answer': …}")
    seen: dict[str, int] = {}
    for index, task in enumerate(tasks):
        if task.id in seen:
            raise DataError(
                f"tasks {seen[task.id]} and {index} share the id {task.id!r}; ids must be unique"
            )
        seen[task.id] = index
    return tasks


def _as_task(item: Any, index: int) -> Task:
    if isinstance(item, Task):
        task = item
    elif isinstance(item, Mapping):
        rest = {
            k: v for k, v in item.items() if k not in {"id", "query", "gold_answer", "metadata"}
        }
        own = item.get("metadata") or {}
        if not isinstance(own, Mapping):
            raise DataError(f"task {index}: 'metadata' must be a dict, not {own!r:.60}")
        task = Task(
            # A table has an id in every row, and None where there is none.
            id=str(index if item.get("id") is None else item["id"]),
            query=item.get("query", ""),
            gold_answer=item.get("gold_answer"),
            metadata={**rest, **own},
        )
    else:
        raise DataError(f"task {index} is a {type(item).__name__}; a dict or a Task is needed")
    if not isinstance(task.metadata, Mapping):
        raise DataError(f"task {index}: 'metadata' must be a dict, not {task.metadata!r:.60}")
    if not isinstance(task.query, str) or not task.query.strip():
        raise DataError(f"task {index} (id {task.id!r}) has no 'query': {str(item)[:120]}")
    return task


__all__ = [
    "SCHEMA_VERSION",
    "Demonstration",
    "Failure",
    "FailureKind",
    "Group",
    "RewardResult",
    "Rollout",
    "Sampling",
    "Task",
    "ToolCall",
    "ToolResult",
    "ToolSpec",
    "Trace",
    "Turn",
    "Usage",
    "as_tasks",
    "from_json",
    "json_line",
    "jsonable",
    "read_json_lines",
    "read_rollouts",
    "to_json",
]
