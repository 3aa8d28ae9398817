"""Demonstrations and rollouts as training rows, tokenised as a session would have."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from toolbrain_core.errors import DataError
from toolbrain_core.roles import Row
from toolbrain_core.traces import Demonstration, Rollout, Turn

from .policy import TransformersPolicy


def demonstration_rows(policy: TransformersPolicy, item: Demonstration | Rollout) -> list[Row]:
    """Rows that train what the assistant wrote, and nothing else.

    A rollout's rows are its recorded ids. A demonstration's turns (`metadata["turns"]`, else its
    assistant messages) are tokenised like sampled ones: prompt and answer apart, and a turn that
    goes on from the one before shares its row.
    Errors: DataError that names the task, where nothing is trained or a row exceeds the context.
    """
    name = f"the demonstration of task {item.task.id!r}"
    if isinstance(item, Rollout):
        rows = policy.rows(item.trace)
    else:
        rows = policy.rows_of_turns([_turn(policy, item, t) for t in _turns(item)])
    if not any(any(row.trained) for row in rows):
        raise DataError(f"{name} has no assistant text to train on")
    for row in rows:
        if len(row.ids) > policy.context_length:
            raise DataError(
                f"{name} has a row of {len(row.ids)} tokens, beyond the context of "
                f"{policy.context_length}: shorten its prompt or split it"
            )
    return rows


def _turns(item: Demonstration) -> list[Mapping[str, Any]]:
    """Each turn's prompt messages and the assistant's text."""
    if "turns" in item.metadata:
        return list(item.metadata["turns"])
    return [
        {"messages": item.messages[:index], "text": message}
        for index, message in enumerate(item.messages)
        if message.get("role") == "assistant"
    ]


def _turn(policy: TransformersPolicy, item: Demonstration, turn: Mapping[str, Any]) -> Turn:
    """A turn as if it had been sampled: its text up to the end of sequence that follows it."""
    template, options = policy.template, item.template_options
    tools = turn.get("tools", item.tools)
    messages = tuple(turn["messages"])
    answer = turn["text"]
    message = answer if isinstance(answer, Mapping) else {"role": "assistant", "content": answer}
    prompt = template.render(messages, tools, options)
    whole = template.render([*messages, message], tools, options, add_generation_prompt=False)
    if whole.startswith(prompt):
        written = policy.encode(whole[len(prompt) :])
    else:  # a template that writes a finished answer otherwise than it asks for one
        written = policy.encode(str(message["content"])) + tuple(sorted(policy.eos_ids)[:1])
    ends = [i for i, token in enumerate(written) if token in policy.eos_ids]
    kept = written[: ends[0] + 1] if ends else written
    return Turn(
        messages=messages,
        text=policy.visible_text(kept),
        prompt_ids=policy.encode(prompt),
        completion_ids=kept,
        logprobs=(0.0,) * len(kept),
        finish_reason="eos" if ends else "stop",
    )
