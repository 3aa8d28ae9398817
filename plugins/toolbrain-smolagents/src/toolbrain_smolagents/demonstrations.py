"""A plan of calls, executed for real by the agent itself, with scripted words for its model."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from attrs import define, field
from smolagents import CodeAgent, TransformersModel
from smolagents.utils import parse_code_blobs

from toolbrain_core.errors import ConfigurationError, DataError
from toolbrain_core.roles import AttemptKey, ChatReply, ChatRequest, Session
from toolbrain_core.sessions import Transcript
from toolbrain_core.traces import Demonstration, Task, ToolCall, Trace, Turn

#: What smolagents stops a planning call at.
_END_OF_PLAN = "<end_plan>"
#: Opening and closing tags that a regular expression in `code_block_tags` may stand for.
_OPENING = ("<code>", "```python", "```py")
_CLOSING = ("</code>", "\n```", "```")

#: The words for the action turn of this index (0, 1, …), given the outputs so far by call id.
Words = Callable[[int, Mapping[str, Any]], str]


@define(eq=False)
class PlanSession:
    """A session that answers from a plan, and keeps every request with the text it gave."""

    words: Words
    plan: str
    calls: Sequence[ToolCall]
    key: AttemptKey
    transcript: Transcript = field(factory=Transcript)
    asked: list[tuple[ChatRequest, str]] = field(factory=list)
    _actions: Iterator[int] = field(factory=lambda: itertools.count())

    @property
    def state(self) -> dict[str, Any]:
        return self.transcript.state

    def chat(self, request: ChatRequest) -> ChatReply:
        text = self._text(request)
        self.asked.append((request, text))
        turn = self.transcript.add_turn(Turn(messages=request.messages, text=text))
        return ChatReply(text=text, turn=turn)  # the line cuts it at the stop strings

    async def achat(self, request: ChatRequest) -> ChatReply:
        return self.chat(request)

    def _text(self, request: ChatRequest) -> str:
        if _END_OF_PLAN in request.stop:
            return self.plan + _END_OF_PLAN
        return self.words(next(self._actions), self._outputs())

    def _outputs(self) -> dict[str, Any]:
        trace = self.transcript.trace()
        return {
            call.id: result.output
            for call, result in zip(self.calls, trace.results, strict=False)
            if result.error is None
        }


def demonstration(
    agent: Any,
    policy: TransformersModel,
    task: Task,
    calls: Sequence[ToolCall],
    play: Callable[[Session], tuple[Any, Trace]],
) -> Demonstration:
    """See `SmolagentsAdapter.demonstrate`. `play` runs a copy of the agent in a session."""
    _check_calls(agent, task, calls)
    writes_code = isinstance(agent, CodeAgent)
    words = code_words(agent, calls) if writes_code else json_words(agent, policy, calls)
    key = AttemptKey(run="demonstration", iteration=0, task_id=task.id, attempt=0)
    session = PlanSession(words, _plan(calls), calls, key)
    _, trace = play(session)
    _check_trace(agent, task, calls, trace)
    request, text = session.asked[-1]
    return Demonstration(
        task=task,
        messages=(*request.messages, {"role": "assistant", "content": text}),
        tools=request.tools,
        template_options=request.template_options,
        metadata={
            "turns": [
                {"messages": list(asked.messages), "tools": list(asked.tools), "text": text}
                for asked, text in session.asked
            ],
            "final_answer": trace.final_answer,
            "results": [result.output for result in trace.results],
        },
    )


def code_words(agent: Any, calls: Sequence[ToolCall]) -> Words:
    """One code block for all calls: `a = price(item="mug")`, …, `final_answer(a)`."""
    names = _variable_names({*agent.tools, *agent.managed_agents, *agent.state})
    variables = {call.id: next(names) for call in calls}
    lines = []
    for call in calls:
        arguments = ", ".join(f"{k}={_source(v, variables)}" for k, v in call.arguments.items())
        target = "" if call.name == "final_answer" else f"{variables[call.id]} = "
        lines.append(f"{target}{call.name}({arguments})")
    if calls[-1].name != "final_answer":
        lines.append(f"final_answer({variables[calls[-1].id]})")
    text = code_block(agent.code_block_tags, "\n".join(lines))
    return lambda index, outputs: text


def code_block(tags: tuple[str, str], code: str) -> str:
    """`code` between tags that the agent's parser accepts. Errors: `ConfigurationError`."""
    opening, closing = _literal(tags[0], _OPENING), _literal(tags[1], _CLOSING)
    text = f"{opening}\n{code}\n{closing.lstrip()}"
    if parse_code_blobs(text, tags) != code:
        raise ConfigurationError(f"no text can be written that code_block_tags={tags!r} parse")
    return text


def json_words(agent: Any, policy: TransformersModel, calls: Sequence[ToolCall]) -> Words:
    """One call per turn as JSON, then `final_answer` with the last output.

    After `Action:` where the agent's own system prompt shows calls that way.
    """
    lead = "Action:\n" if "Action:" in agent.system_prompt else ""

    def words(index: int, outputs: Mapping[str, Any]) -> str:
        if index < len(calls):
            name = calls[index].name
            arguments = _with_outputs(calls[index].arguments, outputs)
        else:
            name, arguments = "final_answer", {"answer": outputs.get(calls[-1].id)}
        call = {policy.tool_name_key: name, policy.tool_arguments_key: arguments}
        return lead + json.dumps(call, ensure_ascii=False)

    return words


def _check_calls(agent: Any, task: Task, calls: Sequence[ToolCall]) -> None:
    if not calls:
        raise DataError(f"no calls to demonstrate for task {task.id!r}")
    seen: set[str] = set()
    for number, call in enumerate(calls, 1):
        label = f"call {number} ({call.name}) of the demonstration for task {task.id!r}"
        if call.name in agent.managed_agents:
            raise DataError(f"{label} asks a managed agent, whose words only its model can give")
        if call.name not in agent.tools:
            raise DataError(f"{label}: the agent has no such tool; it has {', '.join(agent.tools)}")
        if call.name == "final_answer" and number < len(calls):
            raise DataError(f"{label}: final_answer must be the last call")
        if call.id in seen:
            raise DataError(f"{label}: its id {call.id!r} is an earlier call's; ids must be unique")
        missing = _references(call.arguments) - seen
        if missing:
            raise DataError(f"{label} refers to {sorted(missing)}, which no earlier call has as id")
        seen.add(call.id)
    turns = 1 if isinstance(agent, CodeAgent) else len(calls) + (calls[-1].name != "final_answer")
    if turns > agent.max_steps:
        raise DataError(
            f"the demonstration for task {task.id!r} needs {turns} steps; the agent's max_steps "
            f"is {agent.max_steps}"
        )


def _check_trace(agent: Any, task: Task, calls: Sequence[ToolCall], trace: Trace) -> None:
    for number, (call, result) in enumerate(zip(trace.calls, trace.results, strict=True), 1):
        if result.error is not None:
            raise DataError(
                f"call {number} ({call.name}) of the demonstration for task {task.id!r} failed: "
                f"{result.error}"
            )
    errors = [e for e in (*(turn.error for turn in trace.turns), trace.error) if e is not None]
    if errors or not trace.calls or trace.calls[-1].name != "final_answer":
        reason = errors[0].message if errors else "it gave no final answer"
        raise DataError(f"the demonstration for task {task.id!r} did not work: {reason}")


def _plan(calls: Sequence[ToolCall]) -> str:
    steps = [f"Call {call.name}." for call in calls if call.name != "final_answer"]
    return "".join(f"{i}. {s}\n" for i, s in enumerate([*steps, "Give the final answer."], 1))


def _reference(value: Any) -> str | None:
    """The call id of `{"$result": id}`."""
    if isinstance(value, Mapping) and set(value) == {"$result"}:
        return str(value["$result"])
    return None


def _references(value: Any) -> set[str]:
    if (call_id := _reference(value)) is not None:
        return {call_id}
    if isinstance(value, Mapping):
        return set().union(*map(_references, value.values()))
    if isinstance(value, list | tuple):
        return set().union(*map(_references, value))
    return set()


def _source(value: Any, variables: Mapping[str, str]) -> str:
    """JSON data as Python source, with references as variables."""
    if (call_id := _reference(value)) is not None:
        return variables[call_id]
    if isinstance(value, Mapping):
        pairs = (f"{_source(k, {})}: {_source(v, variables)}" for k, v in value.items())
        return "{" + ", ".join(pairs) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_source(item, variables) for item in value) + "]"
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str) else repr(value)


def _with_outputs(value: Any, outputs: Mapping[str, Any]) -> Any:
    """JSON data with references replaced by the outputs themselves."""
    if (call_id := _reference(value)) is not None:
        return outputs.get(call_id)
    if isinstance(value, Mapping):
        return {key: _with_outputs(item, outputs) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_with_outputs(item, outputs) for item in value]
    return value


def _variable_names(taken: set[str]) -> Iterator[str]:
    letters = "abcdefghijklmnopqrstuvwxyz"
    names = (f"{letter}{n or ''}" for n in itertools.count() for letter in letters)
    return (name for name in names if name not in taken)


def _literal(pattern: str, candidates: Sequence[str]) -> str:
    """A text that the tag, a regular expression, matches as a whole."""
    for text in (pattern, *candidates):
        if re.fullmatch(pattern, text):
            return text
    raise ConfigurationError(
        f"code_block_tags has {pattern!r}, for which no literal tag is known; use a plain text tag"
    )
