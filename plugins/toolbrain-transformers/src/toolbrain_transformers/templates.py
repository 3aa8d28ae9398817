"""Chat templates: messages to text, the way the model's own tokenizer writes it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jinja2 import TemplateError

from toolbrain_core.errors import NotServed

_PROBE = "toolbrain probe"


class ChatTemplate:
    """Renders messages with a tokenizer's or processor's chat template.

    List-shaped content is flattened to strings where the template needs them. Errors: `NotServed`
    where there is no template, where it refuses the messages, and for parts that are not text.
    """

    def __init__(
        self, processor: Any, model_name: str = "", options: Mapping[str, Any] | None = None
    ):
        if not getattr(processor, "chat_template", None):
            raise NotServed(
                f"the tokenizer of {model_name or 'this model'} has no chat template, so messages "
                "cannot become a prompt. Use an instruction-tuned model, or set "
                "tokenizer.chat_template before building the Brain."
            )
        self.processor = processor
        self.model_name = model_name
        self.options = dict(options or {})
        self.needs_strings = self._needs_strings()

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        options: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = True,
    ) -> str:
        """The prompt as text. `options` come after the template's own."""
        shaped = [self._shape(message) for message in messages]
        try:
            return self._apply(shaped, tools, options or {}, add_generation_prompt)
        except (TemplateError, TypeError) as error:
            roles = ", ".join(str(m.get("role")) for m in messages)
            raise NotServed(
                f"the chat template of {self.model_name or 'this model'} refuses these messages "
                f"(roles: {roles}): {error}"
            ) from error

    def notes(self) -> list[str]:
        """What a user should know of this template, in words."""
        found = []
        question = {"role": "user", "content": _PROBE}
        thought = {"role": "assistant", "content": "<think>\nreasons\n</think>\n\nanswer"}
        if "reasons" not in self.render([question, thought, question]):
            found.append(
                "the chat template drops earlier reasoning from the prompt: one row per turn, so "
                "training cannot share the turns' tokens"
            )
        return found

    def _apply(
        self,
        messages: list[dict[str, Any]],
        tools: Sequence[Mapping[str, Any]],
        options: Mapping[str, Any],
        add_generation_prompt: bool,
    ) -> str:
        text = self.processor.apply_chat_template(
            messages,
            tools=[dict(tool) for tool in tools] or None,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            **{**self.options, **options},
        )
        return str(text)

    def _needs_strings(self) -> bool:
        parts = {"role": "user", "content": [{"type": "text", "text": _PROBE}]}
        try:
            text = self._apply([parts], (), {}, True)
        except (TemplateError, TypeError):
            return True
        return _PROBE not in text or "{'type'" in text

    def _shape(self, message: Mapping[str, Any]) -> dict[str, Any]:
        content = message.get("content")
        if isinstance(content, str) and not self.needs_strings and self._is_processor:
            return {**message, "content": [{"type": "text", "text": content}]}
        if not isinstance(content, Sequence) or isinstance(content, str):
            return dict(message)
        for part in content:
            if part.get("type") != "text":
                raise NotServed(
                    f"a message holds a part of type {part.get('type')!r}; toolbrain trains on "
                    "text only. Remove images and audio from the agent's messages."
                )
        if self.needs_strings:
            return {**message, "content": "\n".join(part["text"] for part in content)}
        return {**message, "content": [dict(part) for part in content]}

    @property
    def _is_processor(self) -> bool:
        return hasattr(self.processor, "tokenizer")
