"""The contracts between rooms. Each is a protocol: a plugin implements it, and never inherits.

`toolbrain_core.testing` has a contract test for each, which a plugin author runs.
"""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

from attrs import Factory, field, frozen

from .errors import SamplerFailure
from .generated import GeneratedTasks
from .sessions import Transcript
from .traces import (
    Demonstration,
    Group,
    RewardResult,
    Sampling,
    Task,
    ToolCall,
    ToolSpec,
    Trace,
    Usage,
)

if TYPE_CHECKING:
    from .runs import Run, TrainResult

Message = Mapping[str, Any]
#: From the trace so far to the messages the policy sees instead of the agent's own history.
Observe = Callable[[Trace, Sequence[Message]], Sequence[Message]]


@frozen
class ChatRequest:
    """One model call, OpenAI-shaped: message dicts with `role` and `content` (a string, or parts).

    `tools` are OpenAI function schemas. `stop`, `max_tokens` and `temperature` are the caller's;
    in training the algorithm's sampling comes before them, `stop` always counts.
    `template_options` go to the chat template as they are. `agent_name` tells apart the agents
    that share one session (a manager and its managed agents).
    """

    messages: tuple[Message, ...]
    tools: tuple[Mapping[str, Any], ...] = ()
    tool_choice: Any = None
    stop: tuple[str, ...] = ()
    max_tokens: int | None = None
    temperature: float | None = None
    template_options: Mapping[str, Any] = Factory(dict)
    response_format: Mapping[str, Any] | None = None
    agent_name: str = ""


@frozen
class ChatReply:
    """The answer: `text` ends before the stop string. `turn` is its index in the session."""

    text: str
    finish_reason: str = "stop"
    usage: Usage = Usage()
    turn: int = -1
    tool_calls: tuple[Mapping[str, Any], ...] = ()


@frozen
class AttemptKey:
    """Names one attempt. Seeds come from it and the turn's number, whatever the batching."""

    run: str
    iteration: int
    task_id: str
    attempt: int
    seed: int = 0

    def turn_seed(self, turn: int) -> int:
        """A 63-bit seed for one turn."""
        words = f"{self.seed}/{self.iteration}/{self.task_id}/{self.attempt}/{turn}"
        return int.from_bytes(hashlib.sha256(words.encode()).digest()[:8], "big") >> 1


@runtime_checkable
class ChatModel(Protocol):
    """Any other language model: teacher, judge, writer."""

    def chat(self, request: ChatRequest) -> ChatReply: ...


@runtime_checkable
class Session(Protocol):
    """One attempt's line to the policy. Thread-safe.

    `chat` errors: `ContextOverflow` and `SamplerFailure` (both are noted in
    `transcript.failure` first, since agents swallow exceptions), `AttemptClosed` after
    `transcript.close()`.
    """

    key: AttemptKey
    transcript: Transcript

    @property
    def state(self) -> dict[str, Any]:
        """What tools and agents note; frozen into `Trace.state` at the end."""

    def chat(self, request: ChatRequest) -> ChatReply: ...

    async def achat(self, request: ChatRequest) -> ChatReply: ...


@frozen
class ModelRef:
    """The trainable model inside an agent.

    `kind` names the policy that can train it ("transformers"). `processor` is its tokenizer or
    processor. `defaults` are the agent's own generation options (`max_new_tokens`, `do_sample`,
    `temperature`, …), used in evaluation; `template_options` go to its chat template.
    """

    kind: str
    model: Any
    processor: Any
    defaults: Mapping[str, Any] = Factory(dict)
    template_options: Mapping[str, Any] = Factory(dict)
    name: str = ""


@runtime_checkable
class AgentAdapter(Protocol):
    """Runs the user's own agent object. One instance serves many threads."""

    def model(self, agent: Any, trainable: Any = None) -> ModelRef:
        """The trainable model inside. Errors: `UnsupportedAgent` naming the part that cannot be
        served and what to do instead."""

    def tools(self, agent: Any) -> Sequence[ToolSpec]: ...

    def run(
        self,
        agent: Any,
        task: Task,
        session: Session,
        tools: Sequence[str] | None = None,
        observe: Observe | None = None,
    ) -> Trace | Awaitable[Trace]:
        """One isolated attempt (may be a coroutine function); never changes `agent`.

        The agent's own failures are in `Trace.error`; what is not the agent's doing may raise.
        """

    def demonstrate(
        self,
        agent: Any,
        task: Task,
        calls: Sequence[ToolCall],
        tools: Sequence[str] | None = None,
        observe: Observe | None = None,
    ) -> Demonstration:
        """A plan of calls (executed for real) as this agent would write it.

        An argument `{"$result": "<call id>"}` stands for the output of an earlier call. The
        demonstration's metadata has the `final_answer` and the calls' `results`.
        """

    def bind(self, agent: Any, policy: Policy, observe: Observe | None = None) -> Any:
        """The user's agent, serving with the trained weights: `agent` itself where nothing had to
        be added, else a copy of it."""


@frozen
class Row:
    """One training row of a trace, from recorded ids.

    All tuples have the same length. `trained[i]` marks what the policy sampled; `logprobs[i]` and
    `turn[i]` (index of the turn that sampled it) are 0.0 and -1 elsewhere.
    """

    ids: tuple[int, ...]
    trained: tuple[bool, ...]
    logprobs: tuple[float, ...]
    turn: tuple[int, ...]


@frozen
class Sampled:
    """What a sampler drew after a prompt.

    `ids` end with the token that ended them: an end-of-sequence token, or the one that completes
    a stop string. `logprobs[i]`: natural log of the probability of `ids[i]` after temperature (at
    temperature 1 for greedy decoding), before top-p, top-k, min-p and repetition penalty.
    `finish_reason`: "eos", "stop", "length" (`max_new_tokens`) or "context" (it is full).
    """

    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: str
    weights_version: int = 0


@runtime_checkable
class Sampler(Protocol):
    """Turns prompt ids into sampled ids for one policy, which calls it in this order: `check` once,
    then `update_weights`, `start`, `generate` from many threads, `stop`, as often as it serves.

    `failure` is why it broke down since it was started: the policy raises it where serving ends,
    since everything that was asked afterwards is lost. None while it works, also where single
    requests failed.
    """

    failure: SamplerFailure | None

    def check(self, policy: Any) -> None:
        """Errors: `NotServed` for a policy that this sampler cannot sample from."""

    def update_weights(self, policy: Any) -> None:
        """Take over the policy's present weights, where `policy.weights_version` is not the one
        that is served. Errors: `SamplerFailure`, `ConfigurationError`."""

    def start(self) -> None: ...

    def generate(self, prompt_ids: Sequence[int], sampling: Sampling, seed: int) -> Future[Sampled]:
        """Ask for one completion. Cancelling the future frees its place.

        Errors: `SamplerFailure`, here or as the future's exception.
        """

    def stop(self) -> None:
        """End serving: what is in flight fails with `SamplerFailure`."""


@runtime_checkable
class Policy(Protocol):
    """The model being trained: weights, tokenizer, adapters.

    `weights_version` is another number whenever the weights may be others."""

    weights_version: int

    def session(
        self,
        key: AttemptKey,
        sampling: Sampling | None = None,
        purpose: Literal["train", "use"] = "train",
    ) -> Session:
        """A new attempt's session. `sampling=None` is the agent's own. For `"use"` prompts are
        tokenised whole, as the agent does by itself; for `"train"` sampled ids are kept."""

    def serving(self) -> AbstractContextManager[Any]:
        """Sessions may chat only inside. Leaving drops cached keys and values.

        Errors: `SamplerFailure` on entering, or on leaving where the sampler broke down inside.
        """

    def rows(self, trace: Trace) -> Sequence[Row]:
        """Training rows: every sampled token is trained in exactly one of them."""

    def preflight(self) -> Sequence[str]:
        """What is wrong with the model, in words, from one dummy turn; empty when nothing is."""

    def save(self, path: str | Path) -> None: ...

    def load(self, path: str | Path) -> None: ...

    def merge(self, path: str | Path) -> None: ...

    def describe(self) -> Mapping[str, Any]:
        """Model, dtype, device, adapter: for the run's `config.json` (JSON)."""


@runtime_checkable
class Algorithm(Protocol):
    """Improves a policy. A frozen attrs class whose fields are its options."""

    consumes: frozenset[str]

    def train(self, run: Run) -> TrainResult: ...


#: Scores a group. `rewards.as_reward` makes one of any callable that a user gives.
Reward = Callable[[Group], Sequence[RewardResult]]


@frozen
class ScoredTool:
    """A tool that a retriever chose, and why: higher is better, the scale is the retriever's."""

    tool: ToolSpec
    score: float = field(default=0.0)


@runtime_checkable
class Retriever(Protocol):
    """Picks the tools that matter for a query. `select` is called from many threads."""

    def index(self, tools: Sequence[ToolSpec]) -> None: ...

    def select(self, query: str, k: int) -> Sequence[ScoredTool]: ...


@runtime_checkable
class TaskGenerator(Protocol):
    """Makes tasks from an agent's tools. Built from its attrs options.

    `demonstrate` is `Brain.demonstrate`: it runs a plan of calls for real. `rollout(tasks,
    attempts)` runs the policy on tasks as it is used. `advance` is called for each task made.
    """

    def generate(
        self,
        tools: Sequence[ToolSpec],
        n: int,
        *,
        demonstrate: Callable[[Task, Sequence[ToolCall]], Demonstration],
        rollout: Callable[[Sequence[Task], int], Sequence[Group]],
        seed: int = 0,
        advance: Callable[[], None] = lambda: None,
    ) -> GeneratedTasks: ...


@runtime_checkable
class ModelLoader(Protocol):
    """How base weights are loaded: as they are, in 4 bits, through another library."""

    def load(self, model_id: str, **options: Any) -> Any: ...
