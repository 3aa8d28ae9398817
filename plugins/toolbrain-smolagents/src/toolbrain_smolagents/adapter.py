"""The agent adapter for smolagents."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

from attrs import define
from smolagents import RunResult
from smolagents.models import get_tool_json_schema

from toolbrain_core.errors import ConfigurationError, UnsupportedAgent
from toolbrain_core.roles import ModelRef, Observe, Policy, Session
from toolbrain_core.sessions import Transcript
from toolbrain_core.traces import Demonstration, Task, ToolCall, ToolSpec, Trace

from .attempts import Attempt, plain
from .demonstrations import demonstration
from .isolation import attempt_copy, observed_copy
from .serving import OwnSession
from .steps import run_failure
from .support import policy_model


@define
class SmolagentsAdapter:
    """Runs a CodeAgent, a ToolCallingAgent or a subclass, with all that they do, as it is.

    `trainable` is the model object that is trained where it is not the top agent's; `model()` sets
    it. An adapter that trains another model needs an instance of its own.
    """

    trainable: Any = None

    def model(self, agent: Any, trainable: Any = None) -> ModelRef:
        """The trainable model inside. Errors: `UnsupportedAgent` naming the missing part."""
        model = policy_model(agent, trainable)
        self.trainable = trainable
        return ModelRef(
            kind="transformers",
            model=model.model,
            processor=model.processor if model._is_vlm else model.tokenizer,
            defaults=dict(model.kwargs),
            template_options=dict(model.apply_chat_template_kwargs),
            name=model.model_id or "",
        )

    def tools(self, agent: Any) -> Sequence[ToolSpec]:
        """The agent's tools and managed agents, without `final_answer`, which it always has."""
        tools = {**agent.tools, **agent.managed_agents}
        return [_spec(tool) for name, tool in tools.items() if name != "final_answer"]

    def run(
        self,
        agent: Any,
        task: Task,
        session: Session,
        tools: Sequence[str] | None = None,
        observe: Observe | None = None,
    ) -> Trace:
        """One isolated attempt on a copy of `agent`.

        `task.metadata["additional_args"]` goes to `agent.run(additional_args=…)`. The trace's state
        has `max_steps_reached` where smolagents had to ask for a last answer.
        Errors: `UnsupportedAgent` (see `model`; also for `metadata["reset"]` False),
        `ConfigurationError` for an unknown name in `tools`, and what a tool's `fork()` raises.
        All else is in the trace.
        """
        attempt = Attempt(session, policy_model(agent, self.trainable), observe)
        return run_copy(attempt_copy(agent, attempt, tools), task, attempt)

    def demonstrate(
        self,
        agent: Any,
        task: Task,
        calls: Sequence[ToolCall],
        tools: Sequence[str] | None = None,
        observe: Observe | None = None,
    ) -> Demonstration:
        """The calls, executed for real, as this agent would have written them.

        An argument `{"$result": "<call id>"}` stands for the output of an earlier call. The final
        answer is the last call's output, unless the last call is `final_answer` itself.
        `metadata["turns"]` lists every model call with the `messages` and `tools` it saw and the
        `text` to learn: train on these, since later prompts hold the agent's rendering of earlier
        turns, not what was written. Errors: `DataError` for calls that cannot be made.
        """
        policy = policy_model(agent, self.trainable)

        def play(session: Session) -> tuple[Any, Trace]:
            attempt = Attempt(session, policy, observe)
            twin = attempt_copy(agent, attempt, tools)
            return twin, run_copy(twin, task, attempt)

        return demonstration(agent, policy, task, calls, play)

    def bind(self, agent: Any, policy: Policy, observe: Observe | None = None) -> Any:
        """The user's agent with the trained weights: `agent` itself, since the policy trains its
        weights in place; with `observe` a lasting copy whose model sees what `observe` shows."""
        del policy  # its weights are the agent's
        if observe is None:
            return agent
        session = OwnSession()
        attempt = Attempt(session, policy_model(agent, self.trainable), observe)
        bound = observed_copy(agent, attempt)
        run = bound.run

        def run_anew(*args: Any, **kwargs: Any) -> Any:
            if kwargs.get("reset", True):
                session.transcript = Transcript()
            return run(*args, **kwargs)

        bound.run = run_anew
        return bound


def _spec(tool: Any) -> ToolSpec:
    schema = get_tool_json_schema(tool)["function"]
    # An attribute that users put on their tools: smolagents has none for it.
    effects = bool(getattr(tool, "side_effects", False))
    return ToolSpec(schema["name"], schema["description"], schema["parameters"], effects)


def run_copy(twin: Any, task: Task, attempt: Attempt) -> Trace:
    """Run an isolated copy to its end. The trace has an answer exactly when nothing failed."""
    answer, error = None, None
    arguments = _run_arguments(task)
    try:
        answer = twin.run(task.query, **arguments)
    except Exception as raised:  # the boundary: an agent runs code of three parties
        error = raised
    if isinstance(attempt.line_error, ConfigurationError):
        raise attempt.line_error
    failure = run_failure(error, attempt)
    if failure is None and not attempt.transcript.turns:
        raise UnsupportedAgent(
            f"the agent answered without asking its model: {type(twin.model).__name__} (or the "
            "agent) generates in its own way; call super().generate() there"
        )
    state = {"max_steps_reached": True} if attempt.max_steps_reached else {}
    return attempt.transcript.trace(_plain_answer(answer), failure, state)


def _run_arguments(task: Task) -> dict[str, Any]:
    if task.metadata.get("reset") is False:
        raise UnsupportedAgent(
            f"task {task.id!r} asks for reset=False, but attempts are isolated and start with an "
            "empty memory; put what the agent must know into the query or additional_args"
        )
    arguments = task.metadata.get("additional_args")
    return {"additional_args": copy.deepcopy(arguments)} if arguments else {}


def _plain_answer(answer: Any) -> Any:
    return plain(answer.output if isinstance(answer, RunResult) else answer)
