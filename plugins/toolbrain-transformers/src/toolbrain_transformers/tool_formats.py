"""Tool formats: how tools get into a prompt, and how calls are read out of an answer.

Formats that TRL knows by their chat template are read by transformers' response parser; blocks of
`<tool_call>{json}</tool_call>` and, for other templates, bare JSON calls are read here. What a
model writes is never an exception: a broken call is an `InvalidCall` with its reason.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from copy import copy
from functools import cached_property
from typing import Any

from attrs import frozen
from trl.chat_template_utils import add_response_schema, supports_tool_calling

from .json_calls import JSON_BLOCK, InvalidCall, ParsedAnswer, answer_of, checked_call, parse_json

Message = Mapping[str, Any]

_INSTRUCTIONS = """\
You can call these tools:

{tools}

To call one, write a JSON object with its name and arguments between tags, once for each call:

<tool_call>
{{"name": "tool_name", "arguments": {{"argument_name": "value"}}}}
</tool_call>"""


@frozen
class ToolFormat:
    """The tool format of one processor or tokenizer, which is left as it is."""

    processor: Any
    tokenizer: Any  # a copy; its response_template is None where TRL knows no parser

    @classmethod
    def of(cls, processor: Any) -> ToolFormat:
        """The format of a processor's chat template."""
        own = copy(processor)
        if hasattr(own, "tokenizer"):
            own.tokenizer = copy(own.tokenizer)
        tokenizer = getattr(own, "tokenizer", own)
        if tokenizer.response_template is None:
            try:
                add_response_schema(own)
            except ValueError:  # a template that TRL does not know
                tokenizer.response_template = None
        return cls(processor, tokenizer)

    @property
    def is_known(self) -> bool:
        """Whether transformers' response parser reads this format."""
        return self.tokenizer.response_template is not None

    @cached_property
    def takes_tools(self) -> bool:
        """Whether the chat template itself renders tools, calls and results."""
        return bool(supports_tool_calling(self.processor))

    def arrange(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]
    ) -> tuple[list[Message], list[Mapping[str, Any]]]:
        """Messages and tools for the chat template; tools move into the system message where the
        template has no place for them."""
        if self.takes_tools:
            return list(messages), list(tools)
        return with_tools_in_prompt(messages, tools), []

    def parse(
        self,
        answer: str | Sequence[int],
        tools: Sequence[Mapping[str, Any]] = (),
        prompt: str | Sequence[int] = "",
        call_id: str = "call",
    ) -> ParsedAnswer:
        """Read an answer, as ids or as text with its special tokens.

        `prompt` is what the answer followed: templates may open a reasoning block or the answer's
        header there. Calls are numbered: `{call_id}_0`, ….
        """
        raw, before = self._text(answer), self._text(prompt)
        visible = self._without_reasoning(raw, before)
        if self.is_known and not JSON_BLOCK.search(visible):
            return self._parse_known(raw, before, visible, tools, call_id)
        return parse_json(visible, call_id)

    def _parse_known(
        self,
        raw: str,
        before: str,
        visible: str,
        tools: Sequence[Mapping[str, Any]],
        call_id: str,
    ) -> ParsedAnswer:
        try:
            message = self.tokenizer.parse_response(
                raw, prefix=before, tools=[dict(tool) for tool in tools] or None
            )
        except Exception as error:  # a foreign parser on whatever a model wrote
            return ParsedAnswer(visible, (), (InvalidCall(visible, str(error)),))
        found = [checked_call(call, json.dumps(call)) for call in message.get("tool_calls") or ()]
        return answer_of(str(message.get("content") or ""), found, call_id)

    def _text(self, value: str | Sequence[int]) -> str:
        return value if isinstance(value, str) else str(self.tokenizer.decode(list(value)))

    def _without_reasoning(self, raw: str, before: str) -> str:
        """The answer as agents see it, after the reasoning that opens it."""
        opened = before.rstrip().endswith("<think>") or raw.lstrip().startswith("<think>")
        text = raw.partition("</think>")[2] if opened else raw
        for token in self.tokenizer.all_special_tokens:
            text = text.replace(token, "")
        return text.strip()


def with_tools_in_prompt(
    messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]
) -> list[Message]:
    """Messages for a template that knows no tools: these are described at the end of the system
    message (added where there is none); calls and results become text in the same format."""
    plain = [_without_calls(message) for message in messages]
    if not tools:
        return plain
    listed = "\n".join(json.dumps(t.get("function", t), ensure_ascii=False) for t in tools)
    described = _INSTRUCTIONS.format(tools=listed)
    if not plain or plain[0].get("role") not in ("system", "developer"):
        return [{"role": "system", "content": described}, *plain]
    return [{**plain[0], "content": _joined(plain[0].get("content"), described)}, *plain[1:]]


def _without_calls(message: Message) -> Message:
    if message.get("role") == "tool":
        content = _joined("<tool_response>", message.get("content"), "</tool_response>", by="\n")
        return {"role": "user", "content": content}
    if not message.get("tool_calls"):
        return message
    functions = [call.get("function", call) for call in message["tool_calls"]]
    blocks = [f"<tool_call>\n{_call_text(function)}\n</tool_call>" for function in functions]
    rest = {key: value for key, value in message.items() if key != "tool_calls"}
    return {**rest, "content": _joined(message.get("content"), *blocks, by="\n")}


def _call_text(function: Mapping[str, Any]) -> str:
    arguments = function.get("arguments") or {}
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return f'{{"name": {json.dumps(function["name"])}, "arguments": {text}}}'


def _joined(*contents: Any, by: str = "\n\n") -> Any:
    """Text, or parts where one of `contents` is a list of parts."""
    given = [content for content in contents if content]
    if all(isinstance(content, str) for content in given):
        return by.join(given)
    texts = ([{"type": "text", "text": c}] if isinstance(c, str) else list(c) for c in given)
    return [part for parts in texts for part in parts]
