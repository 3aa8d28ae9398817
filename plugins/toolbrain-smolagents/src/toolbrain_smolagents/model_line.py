"""The copied model whose calls go to the session, built exactly as the model would build them."""

from __future__ import annotations

import copy
import functools
import random
import uuid
from collections.abc import Generator, Mapping, Sequence
from typing import Any

from attrs import define
from smolagents import ChatMessage, ChatMessageStreamDelta, MessageRole, TransformersModel
from smolagents.models import remove_content_after_stop_sequences
from smolagents.monitoring import TokenUsage

from toolbrain_core.errors import UnsupportedAgent
from toolbrain_core.roles import ChatReply, ChatRequest, Message
from toolbrain_core.traces import Turn

from .attempts import Attempt, Scribe

#: Options of one call that a request can carry, or that only shape its messages.
_PER_CALL = frozenset(
    {
        "max_new_tokens",
        "max_tokens",
        "temperature",
        "do_sample",
        "flatten_messages_as_text",
        "custom_role_conversions",
        "convert_images_to_image_urls",
    }
)


@define(eq=False)
class Line:
    """One agent's line to the session."""

    attempt: Attempt
    scribe: Scribe

    def ask(self, model: TransformersModel, call: Mapping[str, Any]) -> tuple[str, ChatReply]:
        """Answer one model call; also the text as the model would return it.

        After the first error every further call raises it again: the session has failed, and
        smolagents would otherwise go on, or take the error's text for an answer.
        """
        if self.attempt.line_error is not None:
            raise self.attempt.line_error
        try:
            request = self.request(model, **call)
            reply = self.attempt.session.chat(request)
        except Exception as error:
            self.attempt.line_error = error
            raise
        turns = len(self.attempt.transcript.turns)
        self.scribe.turn = reply.turn if reply.turn >= 0 else turns - 1
        return remove_content_after_stop_sequences(reply.text, call["stop_sequences"]) or "", reply

    def request(
        self,
        model: TransformersModel,
        messages: Sequence[Any],
        stop_sequences: Sequence[str] | None = None,
        response_format: Any = None,
        tools_to_call_from: Sequence[Any] | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> ChatRequest:
        """The request that a call of `generate` means."""
        options = dict(options or {})
        _check_call(model, response_format, options)
        prepare = functools.partial(
            model._prepare_completion_kwargs,
            stop_sequences=stop_sequences,
            tools_to_call_from=tools_to_call_from,
            tool_choice=None,
            **options,
        )
        prepared = prepare(messages=list(messages))
        seen = self.observed(prepared["messages"])
        if self.attempt.observe is not None:  # merged and flattened as the model does it
            seen = plain_messages(prepare(messages=as_chat_messages(seen))["messages"])
        return ChatRequest(
            messages=tuple(seen),
            tools=tuple(prepared.get("tools") or ()),
            stop=tuple(prepared.get("stop") or ()),
            max_tokens=self._max_tokens(model, options),
            temperature=self._temperature(model, options, prepared),
            template_options=dict(model.apply_chat_template_kwargs),
            agent_name=self.scribe.agent_name,
        )

    def call_id(self, index: int) -> str:
        """An id for a call that was parsed from the latest turn's text.

        smolagents draws a random UUID, which gets into the next prompt; this one is of the same
        form and comes from the attempt's seed, so that a run can be repeated.
        """
        seed = self.attempt.session.key.turn_seed(self.scribe.turn)
        return str(uuid.UUID(int=random.Random(f"{seed}/{index}").getrandbits(128), version=4))

    def observed(self, messages: Sequence[Any]) -> list[Message]:
        """What the policy sees: the messages, or what `observe` makes of them."""
        seen = plain_messages(messages)
        if self.attempt.observe is None:
            return seen
        return list(self.attempt.observe(self.attempt.transcript.trace(), seen))

    def _max_tokens(self, model: TransformersModel, options: Mapping[str, Any]) -> int | None:
        asked = options.get("max_new_tokens") or options.get("max_tokens")
        if asked is None and model.kwargs != self.attempt.policy.kwargs:
            # The same weights behind another TransformersModel, with options of its own.
            asked = model.kwargs.get("max_new_tokens")
        return asked

    def _temperature(
        self, model: TransformersModel, options: Mapping[str, Any], prepared: Mapping[str, Any]
    ) -> float | None:
        own = model.kwargs != self.attempt.policy.kwargs
        if not own and not {"temperature", "do_sample"} & set(options):
            return None  # the policy knows the agent's defaults
        return 0.0 if prepared.get("do_sample") is False else prepared.get("temperature")


class SessionLine(TransformersModel):  # type: ignore[misc]
    """A TransformersModel whose words come from a session. Made by `connect`, never built."""

    _line: Line

    def generate(
        self,
        messages: Any,
        stop_sequences: Any = None,
        response_format: Any = None,
        tools_to_call_from: Any = None,
        **kwargs: Any,
    ) -> ChatMessage:
        call = {
            "messages": messages,
            "stop_sequences": stop_sequences,
            "response_format": response_format,
            "tools_to_call_from": tools_to_call_from,
            "options": kwargs,
        }
        text, reply = self._line.ask(self, call)
        return ChatMessage(
            role=MessageRole.ASSISTANT,
            content=text,
            raw={"out": text, "completion_kwargs": dict(kwargs)},
            token_usage=_token_usage(reply),
        )

    def generate_stream(
        self,
        messages: Any,
        stop_sequences: Any = None,
        response_format: Any = None,
        tools_to_call_from: Any = None,
        **kwargs: Any,
    ) -> Generator[ChatMessageStreamDelta]:
        message = SessionLine.generate(
            self, messages, stop_sequences, response_format, tools_to_call_from, **kwargs
        )
        yield ChatMessageStreamDelta(content=message.content, token_usage=message.token_usage)

    def parse_tool_calls(self, message: ChatMessage) -> ChatMessage:
        has_own_ids = bool(message.tool_calls)
        message = super().parse_tool_calls(message)
        if not has_own_ids:
            for index, call in enumerate(message.tool_calls):
                call.id = self._line.call_id(index)
        return message


class ObservedLine(TransformersModel):  # type: ignore[misc]
    """A TransformersModel that sees what `observe` makes of its messages, and answers itself."""

    _line: Line

    def generate(self, messages: Any, *args: Any, **kwargs: Any) -> ChatMessage:
        seen = self._line.observed(self._prepare_completion_kwargs(messages=messages)["messages"])
        message = super().generate(as_chat_messages(seen), *args, **kwargs)
        self._keep(seen, message.content or "")
        return message

    def generate_stream(
        self, messages: Any, *args: Any, **kwargs: Any
    ) -> Generator[ChatMessageStreamDelta]:
        seen = self._line.observed(self._prepare_completion_kwargs(messages=messages)["messages"])
        text = ""
        for delta in super().generate_stream(as_chat_messages(seen), *args, **kwargs):
            text += delta.content or ""
            yield delta
        self._keep(seen, text)

    def _keep(self, seen: Sequence[Message], text: str) -> None:
        turn = Turn(messages=tuple(seen), text=text, agent_name=self._line.scribe.agent_name)
        self._line.scribe.turn = self._line.attempt.transcript.add_turn(turn)


def connect(model: TransformersModel, line: Line, kind: type[TransformersModel]) -> Any:
    """A copy of `model` (same weights) that speaks through `line`.

    `kind` is put just before TransformersModel in the copy's class order, so that a subclass's
    own `generate` still runs and reaches the line through `super().generate`.
    """
    cls = type(model)
    copied = copy.copy(model)
    bases = (kind,) if cls is TransformersModel else (cls, kind)
    copied.__class__ = type(cls.__name__, bases, {"__module__": cls.__module__})
    copied._line = line
    return copied


def plain_messages(messages: Sequence[Any]) -> list[Message]:
    """OpenAI-shaped dicts with plain strings for roles."""
    return [{"role": MessageRole(m["role"]).value, "content": m["content"]} for m in messages]


def as_chat_messages(messages: Sequence[Message]) -> list[ChatMessage]:
    """smolagents messages of OpenAI-shaped dicts; a `tool` message is a tool's response."""
    return [ChatMessage(role=_role(m["role"]), content=_parts(m["content"])) for m in messages]


def _role(role: str) -> MessageRole:
    return MessageRole.TOOL_RESPONSE if role == "tool" else MessageRole(role)


def _parts(content: Any) -> list[dict[str, Any]]:
    return [{"type": "text", "text": content}] if isinstance(content, str) else list(content)


def _token_usage(reply: ChatReply) -> TokenUsage:
    return TokenUsage(
        input_tokens=reply.usage.prompt_tokens, output_tokens=reply.usage.completion_tokens
    )


def _check_call(model: Any, response_format: Any, options: Mapping[str, Any]) -> None:
    if response_format is not None:
        raise UnsupportedAgent(
            "the agent asks its model for a response_format, which a TransformersModel cannot "
            "serve; build the agent without structured outputs"
        )
    unknown = sorted(set(options) - _PER_CALL)
    if unknown:
        raise UnsupportedAgent(
            f"the agent passes {', '.join(unknown)} with a single model call, which cannot be "
            f"trained; give it to the {type(model).__name__} once, when it is built"
        )
