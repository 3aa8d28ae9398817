"""A policy that answers from a script, and an agent that is a plain function.

Both are whole implementations of their roles, small enough to read: for tests of what stands
around them (rollouts, algorithms, adapters) without a model or an agent framework. The module is
also a plugin: register it, and `Brain(FunctionAgent(…))` works.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import json
import threading
import uuid
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from attrs import Factory, define, evolve, field, frozen

from ..errors import ContextOverflow, SamplerFailure, UnsupportedAgent
from ..hookspecs import hookimpl
from ..roles import (
    AttemptKey,
    ChatReply,
    ChatRequest,
    Message,
    ModelRef,
    Observe,
    Policy,
    Row,
    Session,
)
from ..sessions import Transcript
from ..traces import (
    Demonstration,
    Failure,
    FailureKind,
    Sampling,
    Task,
    ToolCall,
    ToolResult,
    ToolSpec,
    Trace,
    Turn,
    Usage,
    jsonable,
)

if TYPE_CHECKING:
    from ..registry import Registry

#: Turn k gets `replies[k]`, or what the function returns for (request, key, index of the turn).
Replies = Sequence[str] | Callable[[ChatRequest, AttemptKey, int], str]


@define(eq=False)
class ScriptedPolicy:
    """A policy whose answers are written down.

    Token ids are the code points of the text; every log-probability is 0. A function in `replies`
    may raise `ContextOverflow` or `SamplerFailure`, as a real session would. Replies are cut at
    stop strings, never at `max_new_tokens`. `delay` is in seconds per reply; closing the attempt
    ends the wait. `serving_now` counts the open `serving()` blocks.
    """

    replies: Replies
    delay: float = field(default=0.0, kw_only=True)
    weights_version: int = field(default=0, kw_only=True)
    serving_now: int = field(default=0, init=False)

    def session(
        self,
        key: AttemptKey,
        sampling: Sampling | None = None,
        purpose: Literal["train", "use"] = "train",
    ) -> ScriptedSession:
        return ScriptedSession(key, self, sampling)

    @contextlib.contextmanager
    def serving(self) -> Iterator[ScriptedPolicy]:
        self.serving_now += 1
        try:
            yield self
        finally:
            self.serving_now -= 1

    def rows(self, trace: Trace) -> list[Row]:
        """One row per turn: its prompt, then its completion, which is trained on."""
        return [_row(turn, index) for index, turn in enumerate(trace.turns)]

    def preflight(self) -> list[str]:
        return [] if callable(self.replies) or self.replies else ["the script has no replies"]

    def save(self, path: str | Path) -> None:
        """Writes `scripted.json`: the version and, where they are a list, the replies."""
        replies = None if callable(self.replies) else list(self.replies)
        Path(path).mkdir(parents=True, exist_ok=True)
        data = {"weights_version": self.weights_version, "replies": replies}
        (Path(path) / "scripted.json").write_text(json.dumps(data), encoding="utf-8")

    def load(self, path: str | Path) -> None:
        data = json.loads((Path(path) / "scripted.json").read_text(encoding="utf-8"))
        self.weights_version = data["weights_version"]
        if data["replies"] is not None:
            self.replies = data["replies"]

    def merge(self, path: str | Path) -> None:
        """The same as `save`: a script has no adapter to merge."""
        self.save(path)

    def describe(self) -> dict[str, Any]:
        return {"kind": "scripted", "weights_version": self.weights_version}


def _row(turn: Turn, index: int) -> Row:
    prompt, completion = len(turn.prompt_ids), len(turn.completion_ids)
    return Row(
        ids=turn.prompt_ids + turn.completion_ids,
        trained=(False,) * prompt + (True,) * completion,
        logprobs=(0.0,) * prompt + turn.logprobs,
        turn=(-1,) * prompt + (index,) * completion,
    )


@define(eq=False)
class ScriptedSession:
    """One attempt's line to a `ScriptedPolicy`."""

    key: AttemptKey
    policy: ScriptedPolicy
    sampling: Sampling | None = None
    transcript: Transcript = field(factory=Transcript)
    _asked: int = 0
    _lock: threading.Lock = field(factory=threading.Lock)

    @property
    def state(self) -> dict[str, Any]:
        return self.transcript.state

    def chat(self, request: ChatRequest) -> ChatReply:
        text = self._reply(request)
        if self.policy.delay:
            self.transcript.closed.wait(self.policy.delay)
        return self._keep(request, text)

    async def achat(self, request: ChatRequest) -> ChatReply:
        text = self._reply(request)
        await asyncio.sleep(self.policy.delay)
        return self._keep(request, text)

    def _reply(self, request: ChatRequest) -> str:
        self.transcript.check_open()
        with self._lock:
            index, self._asked = self._asked, self._asked + 1
        try:
            return self._scripted(request, index)
        except (ContextOverflow, SamplerFailure) as error:
            overflow = isinstance(error, ContextOverflow)
            kind: FailureKind = "context_overflow" if overflow else "infrastructure"
            self.transcript.fail(Failure(kind, str(error), type(error).__name__))
            raise

    def _scripted(self, request: ChatRequest, index: int) -> str:
        replies = self.policy.replies
        if callable(replies):
            return replies(request, self.key, index)
        if index >= len(replies):
            raise SamplerFailure(f"the script ends after {len(replies)} replies")
        return replies[index]

    def _keep(self, request: ChatRequest, text: str) -> ChatReply:
        sampled, text, stopped = _until_stop(text, request.stop)
        prompt = "\n".join(_text(message) for message in request.messages)
        first = not self.transcript.turns
        turn = Turn(
            messages=request.messages,
            text=text,
            prompt_ids=tuple(map(ord, prompt)),
            completion_ids=tuple(map(ord, sampled)),
            logprobs=(0.0,) * len(sampled),
            finish_reason="stop" if stopped else "eos",
            sampling=evolve(self.sampling or _own_sampling(request), stop=request.stop),
            weights_version=self.policy.weights_version,
            agent_name=request.agent_name,
            row_break="first" if first else "a script keeps one row per turn",
        )
        usage = Usage(len(turn.prompt_ids), len(turn.completion_ids))
        return ChatReply(text, "stop", usage, self.transcript.add_turn(turn))


def _own_sampling(request: ChatRequest) -> Sampling:
    sampling = Sampling()
    if request.temperature is not None:
        sampling = evolve(sampling, temperature=request.temperature)
    if request.max_tokens is not None:
        sampling = evolve(sampling, max_new_tokens=request.max_tokens)
    return sampling


def _until_stop(text: str, stop: Sequence[str]) -> tuple[str, str, bool]:
    """What was sampled (the stop string too), what the caller gets (without it), if it stopped."""
    found = [(text.index(word), word) for word in stop if word in text]
    if not found:
        return text, text, False
    at, word = min(found)
    return text[: at + len(word)], text[:at], True


def _text(message: Message) -> str:
    content = message.get("content") or ""
    if isinstance(content, str):
        return content
    return "".join(part.get("text", "") for part in content)


class AgentMistake(Exception):
    """Raised by a function agent, or by its tool calls: the policy's own mistake, of one kind."""

    def __init__(self, kind: FailureKind, message: str) -> None:
        super().__init__(message)
        self.kind = kind


@frozen
class FunctionAgent:
    """An agent that is a function: `function(ask, task)` returns the answer.

    `ask(text)` is one turn and returns the reply's text; `ask.call(name, **arguments)` runs one of
    `tools` (functions, by their `__name__`) and notes it in the trace. In a coroutine function both
    are awaited, and tools may be coroutine functions. A tool with a `fork()` method is forked for
    each attempt. A tool that raises makes `ask.call` raise `AgentMistake("tool", …)`.

    >>> FunctionAgent(lambda ask, task: ask(task.query), model=ScriptedPolicy(["4"])).run("2 + 2?")
    '4'
    """

    function: Callable[[Any, Task], Any]
    tools: tuple[Callable[..., Any], ...] = field(default=(), converter=tuple)
    model: Policy | None = None

    def run(self, query: str) -> Any:
        """Answers with `model`: what a user's own call of their agent is. None if it failed."""
        if self.model is None:
            raise UnsupportedAgent(
                "this FunctionAgent has no model: FunctionAgent(…, model=policy)"
            )
        with self.model.serving():
            session = self.model.session(AttemptKey("use", 0, "use", 0), purpose="use")
            trace = FunctionAdapter().run(self, Task("use", query), session)
            if inspect.isawaitable(trace):
                trace = asyncio.run(_awaited(trace))
        return trace.final_answer


@frozen
class FunctionAdapter:
    """The `AgentAdapter` of `FunctionAgent`s, sync and async.

    `AgentMistake` ends in `Trace.error`; any other exception is no doing of the policy's, and is
    raised.
    """

    def model(self, agent: FunctionAgent, trainable: Any = None) -> ModelRef:
        return ModelRef(kind="scripted", model=trainable or agent.model, processor=None)

    def tools(self, agent: FunctionAgent) -> list[ToolSpec]:
        return [ToolSpec(_name(tool), inspect.getdoc(tool) or "") for tool in agent.tools]

    def run(
        self,
        agent: FunctionAgent,
        task: Task,
        session: Session,
        tools: Sequence[str] | None = None,
        observe: Observe | None = None,
    ) -> Trace | Awaitable[Trace]:
        chosen = {_name(tool): tool for tool in agent.tools}
        own = {name: _fork(tool) for name, tool in chosen.items() if tools is None or name in tools}
        if inspect.iscoroutinefunction(agent.function):
            return _run_async(agent, task, AsyncAsk(session, own, observe))
        ask = Ask(session, own, observe)
        try:
            answer = agent.function(ask, task)
        except AgentMistake as mistake:
            return _mistaken(session.transcript, mistake)
        return ask.session.transcript.trace(answer)

    def demonstrate(
        self,
        agent: FunctionAgent,
        task: Task,
        calls: Sequence[ToolCall],
        tools: Sequence[str] | None = None,
        observe: Observe | None = None,
    ) -> Demonstration:
        """Each call as JSON by the assistant, its result by the user, the last result as answer."""
        own = {_name(tool): _fork(tool) for tool in agent.tools}
        messages: list[dict[str, Any]] = [_message("user", task.query)]
        results: list[Any] = []
        for call in calls:
            written = json.dumps({"name": call.name, "arguments": jsonable(call.arguments)})
            results.append(own[call.name](**call.arguments))
            messages += [_message("assistant", written), _message("user", str(results[-1]))]
        facts = {"final_answer": results[-1], "results": results} if results else {}
        messages.append(_message("assistant", str(results[-1]) if results else ""))
        return Demonstration(task, tuple(messages), metadata=facts)

    def bind(
        self, agent: FunctionAgent, policy: Policy, observe: Observe | None = None
    ) -> FunctionAgent:
        return agent if agent.model is policy else evolve(agent, model=policy)


async def _awaited(trace: Awaitable[Trace]) -> Trace:
    return await trace


async def _run_async(agent: FunctionAgent, task: Task, ask: AsyncAsk) -> Trace:
    try:
        answer = await agent.function(ask, task)
    except AgentMistake as mistake:
        return _mistaken(ask.session.transcript, mistake)
    return ask.session.transcript.trace(answer)


def _mistaken(transcript: Transcript, mistake: AgentMistake) -> Trace:
    failure = Failure(mistake.kind, str(mistake), type(mistake).__name__)
    transcript.fail_turn(failure)
    return transcript.trace(error=failure)


def _name(tool: Any) -> str:
    return str(getattr(tool, "__name__", type(tool).__name__))


def _fork(tool: Any) -> Any:
    return tool.fork() if hasattr(tool, "fork") else tool


def _message(role: str, content: str) -> dict[str, Any]:
    return {"role": role, "content": content}


@define(eq=False)
class Ask:
    """What a function agent gets: the model, its tools, and the conversation so far."""

    session: Session
    tools: Mapping[str, Callable[..., Any]]
    observe: Observe | None = None
    messages: list[Message] = field(factory=list)

    def __call__(self, text: str) -> str:
        return self._heard(self.session.chat(self._request(text)))

    def call(self, name: str, **arguments: Any) -> Any:
        """Runs a tool. Errors: `AgentMistake("tool", …)` where there is none, or it raises."""
        with self._noting(name, arguments) as outputs:
            outputs.append(self._tool(name)(**arguments))
        return outputs[0]

    @contextlib.contextmanager
    def _noting(self, name: str, arguments: Mapping[str, Any]) -> Iterator[list[Any]]:
        """Notes a call with the one output that is put into the list, or with what was raised."""
        transcript, outputs = self.session.transcript, list[Any]()
        call = ToolCall(f"call_{uuid.uuid4().hex[:8]}", name, jsonable(arguments))
        transcript.check_open()
        try:
            yield outputs
        except Exception as error:  # the tool's boundary: whatever it raises is noted
            text = f"{type(error).__name__}: {error}"
            transcript.add_call(call, ToolResult(call.id, error=text))
            raise AgentMistake("tool", f"tool {name!r} failed: {text}") from error
        transcript.check_open()
        transcript.add_call(call, ToolResult(call.id, jsonable(outputs[0])))

    def _tool(self, name: str) -> Callable[..., Any]:
        if name not in self.tools:
            raise LookupError(f"no tool named {name!r}; there are: {', '.join(self.tools)}")
        return self.tools[name]

    def _request(self, text: str) -> ChatRequest:
        self.messages.append(_message("user", text))
        seen: Sequence[Message] = self.messages
        if self.observe is not None:
            seen = self.observe(self.session.transcript.trace(), seen)
        return ChatRequest(tuple(seen))

    def _heard(self, reply: ChatReply) -> str:
        self.messages.append(_message("assistant", reply.text))
        return reply.text


@define(eq=False)
class AsyncAsk:
    """`Ask` for coroutine functions."""

    session: Session
    tools: Mapping[str, Callable[..., Any]]
    observe: Observe | None = None
    _ask: Ask = field(
        init=False, default=Factory(lambda s: Ask(s.session, s.tools, s.observe), takes_self=True)
    )

    async def __call__(self, text: str) -> str:
        return self._ask._heard(await self.session.achat(self._ask._request(text)))

    async def call(self, name: str, **arguments: Any) -> Any:
        with self._ask._noting(name, arguments) as outputs:
            output = self._ask._tool(name)(**arguments)
            outputs.append(await output if inspect.isawaitable(output) else output)
        return outputs[0]


def scripted_policy(ref: ModelRef, **options: Any) -> ScriptedPolicy:
    """The policy of a `FunctionAgent`: the one it was given. `options` have nothing to set."""
    policy: ScriptedPolicy = ref.model
    return policy


@hookimpl
def toolbrain_register_adapters(registry: Registry) -> None:
    registry.add("function", f"{__name__}:FunctionAdapter")


@hookimpl
def toolbrain_register_policies(registry: Registry) -> None:
    registry.add("scripted", f"{__name__}:scripted_policy")


@hookimpl
def toolbrain_match_agent(agent: Any) -> tuple[str, type] | None:
    return ("function", FunctionAgent) if isinstance(agent, FunctionAgent) else None


__all__ = [
    "AgentMistake",
    "FunctionAdapter",
    "FunctionAgent",
    "ScriptedPolicy",
    "ScriptedSession",
    "scripted_policy",
]
