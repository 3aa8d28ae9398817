"""One attempt's line to the policy: messages in, exact ids, text out.

Rule: never retokenise what was sampled. Where the next prompt's text begins with an earlier turn's
prompt and completion, the recorded ids are kept and only the rest is tokenised. An end-of-sequence
token that the template would not repeat is left out of that match.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping
from concurrent.futures import CancelledError, Future
from concurrent.futures import TimeoutError as FutureTimeout
from typing import TYPE_CHECKING, Any

from attrs import define, evolve, field, frozen

from toolbrain_core.errors import AttemptClosed, ContextOverflow, ToolBrainError
from toolbrain_core.roles import AttemptKey, ChatReply, ChatRequest, Sampled
from toolbrain_core.sessions import Transcript
from toolbrain_core.traces import Failure, FailureKind, Sampling, Turn, Usage, jsonable

if TYPE_CHECKING:
    from .policy import TransformersPolicy

_POLL_SECONDS = 0.2


@frozen
class _Prompt:
    """A rendered prompt: `text` is exactly what `ids` stand for."""

    text: str
    ids: tuple[int, ...]
    row_break: str | None


@frozen
class _Past:
    """A turn that later prompts may go on from: text and ids of prompt and completion."""

    text: str
    ids: tuple[int, ...]


@define(eq=False)
class PolicySession:
    """A `Session` on a `TransformersPolicy`. `sampling` is None for the agent's own."""

    policy: TransformersPolicy
    key: AttemptKey
    sampling: Sampling | None
    keep_ids: bool
    transcript: Transcript = field(factory=Transcript)
    _past: dict[str, list[_Past]] = field(factory=dict)
    _asked: int = 0
    _lock: threading.Lock = field(factory=threading.Lock)

    @property
    def state(self) -> dict[str, Any]:
        return self.transcript.state

    def chat(self, request: ChatRequest) -> ChatReply:
        """Answer one request. Errors: see `Session`."""
        prompt, sampling, future = self._ask(request)
        while True:
            try:
                return self._answer(request, prompt, sampling, future.result(_POLL_SECONDS))
            except FutureTimeout:
                self._leave_if_closed(future)
            except CancelledError:
                self.transcript.check_open()
                raise
            except ToolBrainError as error:
                self._note(error)
                raise

    async def achat(self, request: ChatRequest) -> ChatReply:
        """`chat` for asynchronous agents. Cancelling it frees the request's place."""
        prompt, sampling, future = self._ask(request)
        waited = asyncio.wrap_future(future)
        while True:
            try:
                sampled = await asyncio.wait_for(asyncio.shield(waited), _POLL_SECONDS)
                return self._answer(request, prompt, sampling, sampled)
            except TimeoutError:
                self._leave_if_closed(future)
            except asyncio.CancelledError:
                future.cancel()
                raise
            except ToolBrainError as error:
                self._note(error)
                raise

    def _ask(self, request: ChatRequest) -> tuple[_Prompt, Sampling, Future[Sampled]]:
        self.transcript.check_open()
        try:
            prompt = self._prompt(request)
            sampling = self._sampling(request)
            with self._lock:
                number, self._asked = self._asked, self._asked + 1
            self.policy.check_fits(len(prompt.ids))
            seed = self.key.turn_seed(number)
            return prompt, sampling, self.policy.sampler.generate(prompt.ids, sampling, seed)
        except ToolBrainError as error:
            self._note(error)
            raise

    def _leave_if_closed(self, future: Future[Sampled]) -> None:
        if self.transcript.closed.is_set():
            future.cancel()
            raise AttemptClosed("this attempt was abandoned while it waited for the policy")

    def _note(self, error: ToolBrainError) -> None:
        kind: FailureKind = (
            "context_overflow" if isinstance(error, ContextOverflow) else "infrastructure"
        )
        self.transcript.fail(Failure(kind, str(error), type(error).__name__))

    def _sampling(self, request: ChatRequest) -> Sampling:
        """The sampling of this call: in training the algorithm's, else the agent's own."""
        sampling = self.sampling or self.policy.own_sampling()
        if self.sampling is None and request.temperature is not None:
            sampling = evolve(sampling, temperature=request.temperature)
        if request.max_tokens is not None:
            limit = min(sampling.max_new_tokens, request.max_tokens)
            sampling = evolve(sampling, max_new_tokens=limit)
        return evolve(sampling, stop=tuple(dict.fromkeys((*sampling.stop, *request.stop))))

    def _prompt(self, request: ChatRequest) -> _Prompt:
        text = self.policy.template.render(
            request.messages, request.tools, request.template_options
        )
        with self._lock:
            past = list(self._past.get(request.agent_name, ()))
        if not self.keep_ids:
            return _Prompt(text, self.policy.encode(text), "prompts are tokenised whole in use")
        matches = [p for p in past if text.startswith(p.text)]
        if matches:
            longest = max(matches, key=lambda p: len(p.text))
            rest = self.policy.encode(text[len(longest.text) :])
            return _Prompt(text, longest.ids + rest, None)
        return _Prompt(text, self.policy.encode(text), _why_broken(text, past))

    def _answer(
        self, request: ChatRequest, prompt: _Prompt, sampling: Sampling, sampled: Sampled
    ) -> ChatReply:
        self._remember(request.agent_name, prompt, sampled)
        turn = Turn(
            messages=tuple(_plain(message) for message in request.messages),
            text=_before_stop(self.policy.visible_text(sampled.ids), sampling.stop),
            prompt_ids=prompt.ids,
            completion_ids=sampled.ids,
            logprobs=sampled.logprobs,
            finish_reason=sampled.finish_reason,
            sampling=sampling,
            weights_version=sampled.weights_version,
            agent_name=request.agent_name,
            row_break=prompt.row_break,
        )
        index = self.transcript.add_turn(turn)
        if sampled.finish_reason == "context":
            raise ContextOverflow(
                f"the context of {self.policy.context_length} tokens was full after "
                f"{len(prompt.ids)} prompt and {len(sampled.ids)} sampled tokens. Shorten the "
                "agent's prompt or history (observe=), or lower max_new_tokens."
            )
        usage = Usage(len(prompt.ids), len(sampled.ids))
        calls = self._tool_calls(request, prompt, sampled, index)
        return ChatReply(turn.text, sampled.finish_reason, usage, index, calls)

    def _tool_calls(
        self, request: ChatRequest, prompt: _Prompt, sampled: Sampled, turn: int
    ) -> tuple[Mapping[str, Any], ...]:
        """The calls of an answer to a request that offered tools. Agents that parse text
        themselves leave them aside."""
        tool_format = self.policy.tool_format
        if not request.tools:
            return ()
        written = self.policy.decode(sampled.ids)
        if not tool_format.is_known and "<tool_call>" not in written:
            return ()
        return tool_format.parse(written, request.tools, prompt.text, f"call_{turn}").calls

    def _remember(self, agent_name: str, prompt: _Prompt, sampled: Sampled) -> None:
        if not self.keep_ids or not sampled.ids:
            return
        written = self.policy.decode(sampled.ids)
        past = [_Past(prompt.text + written, prompt.ids + sampled.ids)]
        if sampled.finish_reason == "eos":
            kept = sampled.ids[:-1]
            past.append(_Past(prompt.text + self.policy.decode(kept), prompt.ids + kept))
        with self._lock:
            self._past.setdefault(agent_name, []).extend(past)


def _plain(message: Mapping[str, Any]) -> dict[str, Any]:
    data: dict[str, Any] = jsonable(message)
    return data


def _before_stop(text: str, stops: tuple[str, ...]) -> str:
    for stop in stops:
        text = text.split(stop, 1)[0]
    return text


def _why_broken(text: str, past: list[_Past]) -> str:
    if not past:
        return "first"
    common = max(_common(text, p.text) for p in past)
    return (
        f"the prompt no longer begins with an earlier turn's text: they part at character "
        f"{common}, after {text[max(0, common - 20) : common]!r}"
    )


def _common(a: str, b: str) -> int:
    short = min(len(a), len(b))
    return next((i for i in range(short) if a[i] != b[i]), short)
