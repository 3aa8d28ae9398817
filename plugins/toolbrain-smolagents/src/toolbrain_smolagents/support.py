"""Which agents can be run and trained, and what to do about the others."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from smolagents import CodeAgent, LocalPythonExecutor, MultiStepAgent, TransformersModel

from toolbrain_core.errors import UnsupportedAgent


def policy_model(agent: Any, trainable: Any = None) -> TransformersModel:
    """The model of the agent, or of one it manages, that is trained.

    The top agent's unless `trainable` (a smolagents model, or the transformers model inside it)
    names another one. Errors: `UnsupportedAgent` names the part that cannot be served.
    """
    if not isinstance(agent, MultiStepAgent):
        raise UnsupportedAgent(
            f"{type(agent).__name__} is not a smolagents agent; give a CodeAgent, a "
            "ToolCallingAgent, or a subclass of one"
        )
    model = agent.model if trainable is None else _find(agent, trainable)
    if not isinstance(model, TransformersModel):
        raise UnsupportedAgent(
            f"the agent's model is {_name(model)}, whose weights are not in this process, so they "
            "cannot be trained; give the agent a smolagents.TransformersModel with an open model, "
            "or name the trainable one among its agents' models with trainable="
        )
    for member in family(agent):
        _check_member(member, is_policy(member.model, model))
    return model


def family(agent: Any) -> Iterator[Any]:
    """The agent, then every agent below it."""
    yield agent
    for managed in agent.managed_agents.values():
        if not isinstance(managed, MultiStepAgent):
            raise UnsupportedAgent(
                f"the managed agent {_name(managed)} is not a smolagents agent; wrap it in a "
                "smolagents Tool"
            )
        yield from family(managed)


def is_policy(model: Any, trained: TransformersModel) -> bool:
    """Whether `model` speaks with the weights that are trained."""
    return isinstance(model, TransformersModel) and model.model is trained.model


def _find(agent: Any, trainable: Any) -> Any:
    for member in family(agent):
        if member.model is trainable or getattr(member.model, "model", None) is trainable:
            return member.model
    raise UnsupportedAgent(
        f"trainable={_name(trainable)} is the model of neither the agent nor an agent it manages; "
        "give one of their `model` objects"
    )


def _check_member(agent: Any, trained: bool) -> None:
    label = f"agent {agent.name!r}" if agent.name else f"the {type(agent).__name__}"
    if not isinstance(agent, CodeAgent):
        return
    if trained and agent._use_structured_outputs_internally:
        raise UnsupportedAgent(
            f"{label} has use_structured_outputs_internally=True, which a TransformersModel cannot "
            "serve; build it with use_structured_outputs_internally=False"
        )
    if not isinstance(agent.python_executor, LocalPythonExecutor):
        raise UnsupportedAgent(
            f"{label} runs its code in {_name(agent.python_executor)} "
            f"(executor_type={agent.executor_type!r}), which cannot be copied for each attempt; "
            'build it with executor_type="local"'
        )


def _name(part: Any) -> str:
    return f"{type(part).__module__}.{type(part).__qualname__}"
