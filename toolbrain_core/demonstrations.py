"""Demonstrations from what users have: conversations, completions, rollouts."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Iterable, Mapping
from typing import Any

from attrs import define, field

from .errors import AttemptClosed, DataError
from .roles import AgentAdapter, AttemptKey, ChatReply, ChatRequest, Observe
from .sessions import Transcript
from .traces import Demonstration, Rollout, Task, as_tasks


def as_demonstrations(
    data: Iterable[Any], adapter: AgentAdapter, agent: Any, observe: Observe | None = None
) -> list[Demonstration | Rollout]:
    """Demonstrations from dicts, `Demonstration`s or `Rollout`s.

    A dict has `query` and either `messages` (a whole conversation, OpenAI-shaped) or `completion`
    (what the agent should write first; the prompt is the agent's own).
    Errors: DataError naming the item.
    """
    if isinstance(data, str | bytes | Mapping) or not isinstance(data, Iterable):
        raise DataError(f"demonstrations must be a list, not one {type(data).__name__}")
    items = [_as_demonstration(item, i, adapter, agent, observe) for i, item in enumerate(data)]
    if not items:
        raise DataError(
            "no demonstrations: give at least one {'query': …, 'messages': […]} or "
            "{'query': …, 'completion': …}"
        )
    return items


def _as_demonstration(
    item: Any, index: int, adapter: AgentAdapter, agent: Any, observe: Observe | None
) -> Demonstration | Rollout:
    if isinstance(item, Demonstration | Rollout):
        return item
    # A table (a datasets.Dataset) has every column in every row, and None where nothing is.
    given = {k: v for k, v in item.items() if v is not None} if isinstance(item, Mapping) else {}
    if not {"messages", "completion"} & set(given):
        raise DataError(
            f"demonstration {index} needs 'query' and either 'messages' or 'completion': "
            f"{str(item)[:120]}"
        )
    rest = {k: v for k, v in given.items() if k not in {"messages", "completion"}}
    task = as_tasks([{"id": str(index), **rest}])[0]
    if "messages" in given:
        return Demonstration(task, _messages(given["messages"], index))
    completion = given["completion"]
    if not isinstance(completion, str) or not completion.strip():
        raise DataError(
            f"demonstration {index}: 'completion' must be the text to write, not {completion!r:.60}"
        )
    return with_completion(adapter, agent, task, completion, observe)


def _messages(messages: Any, index: int) -> tuple[Mapping[str, Any], ...]:
    if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Iterable):
        raise DataError(
            f"demonstration {index}: 'messages' must be a list of messages, not {messages!r:.60}"
        )
    kept = tuple(messages)
    for message in kept:
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise DataError(
                f"demonstration {index}: a message is a dict with 'role' and 'content', not "
                f"{message!r:.60}"
            )
    return kept


def with_completion(
    adapter: AgentAdapter,
    agent: Any,
    task: Task,
    completion: str,
    observe: Observe | None = None,
) -> Demonstration:
    """The agent's own first request for `task`, answered with `completion`."""
    request = first_request(adapter, agent, task, observe)
    answer = {"role": "assistant", "content": completion}
    return Demonstration(
        task=task,
        messages=(*request.messages, answer),
        tools=request.tools,
        template_options=request.template_options,
        metadata={"turns": [{"messages": list(request.messages), "text": completion}]},
    )


def first_request(
    adapter: AgentAdapter, agent: Any, task: Task, observe: Observe | None = None
) -> ChatRequest:
    """What the agent asks its model first. Errors: DataError where it asks nothing."""
    session = _FirstRequest(AttemptKey("demonstration", 0, task.id, 0))
    try:
        outcome = adapter.run(agent, task, session, observe=observe)
        if inspect.isawaitable(outcome):
            asyncio.run(_finished(outcome))
    except AttemptClosed:
        pass  # raised by the session, to unwind the agent once it has asked
    if session.request is None:
        raise DataError(f"the agent ended task {task.id!r} without asking its model anything")
    return session.request


async def _finished(outcome: Any) -> Any:
    return await outcome


@define(eq=False)
class _FirstRequest:
    """A session that keeps the first request and ends the attempt."""

    key: AttemptKey
    transcript: Transcript = field(factory=Transcript)
    request: ChatRequest | None = None

    @property
    def state(self) -> dict[str, Any]:
        return self.transcript.state

    def chat(self, request: ChatRequest) -> ChatReply:
        self.request = self.request or request
        self.transcript.close()
        raise AttemptClosed("the first request is all that was wanted")

    async def achat(self, request: ChatRequest) -> ChatReply:
        return self.chat(request)
