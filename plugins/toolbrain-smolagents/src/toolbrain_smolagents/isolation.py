"""An isolated copy of an agent for one attempt, field by field.

`copy.deepcopy` of an agent fails (locks, models), and `copy.copy` shares everything. What an
attempt writes to is made new here; what is left (a subclass's own attributes) is shared.
"""

from __future__ import annotations

import copy
import functools
import io
import types
from collections.abc import Callable, Sequence
from typing import Any

from rich.console import Console
from smolagents import ActionStep, AgentLogger, LogLevel, Monitor, ToolCallingAgent
from smolagents.memory import AgentMemory, CallbackRegistry

from toolbrain_core.errors import ConfigurationError

from .attempts import Attempt, Scribe
from .model_line import Line, ObservedLine, SessionLine, connect
from .steps import note_step
from .support import is_policy
from .tool_shells import give_call_shell, shell_of


def attempt_copy(agent: Any, attempt: Attempt, tools: Sequence[str] | None = None) -> Any:
    """A silent copy whose model calls go to the attempt's session.

    `tools` are the names of the tools and managed agents it keeps (`final_answer` always stays).
    Its code runs without a time limit of its own: smolagents' limit waits for the hanging code
    anyway (a pool is joined), and the attempt has a limit.
    """
    return _copy(agent, attempt, SessionLine, manager=None, names=tools)


def observed_copy(agent: Any, attempt: Attempt) -> Any:
    """A lasting copy that answers with its own weights and sees what `observe` shows it.

    It keeps the agent's logger and time limits.
    """
    return _copy(agent, attempt, ObservedLine, manager=None)


def _copy(
    agent: Any,
    attempt: Attempt,
    kind: type[SessionLine] | type[ObservedLine],
    manager: Scribe | None,
    names: Sequence[str] | None = None,
) -> Any:
    serving = kind is ObservedLine
    scribe = Scribe(
        attempt,
        agent_name=agent.name or "",
        is_policy=is_policy(agent.model, attempt.policy),
        via="json" if isinstance(agent, ToolCallingAgent) else "code",
        is_top=manager is None,
    )
    twin = copy.copy(agent)
    _rebind_methods(agent, twin)
    twin.state = _private(agent.state)
    twin.prompt_templates = copy.deepcopy(agent.prompt_templates)
    if not serving:
        twin.logger = _silent_logger()
    if scribe.is_policy:
        twin.model = connect(agent.model, Line(attempt, scribe), kind)
    twin.tools = {
        name: shell_of(tool, scribe)
        for name, tool in agent.tools.items()
        if names is None or name in names or name == "final_answer"
    }
    twin.managed_agents = {
        name: _copy(managed, attempt, kind, manager=scribe)
        for name, managed in agent.managed_agents.items()
        if names is None or name in names
    }
    _check_names(agent, names)
    twin.memory = AgentMemory(twin.system_prompt)
    twin.monitor = Monitor(twin.model, twin.logger)
    twin.step_callbacks = _callbacks(agent, twin, scribe)
    twin.final_answer_checks = [_rebound(c, agent, twin) for c in agent.final_answer_checks]
    if getattr(agent, "python_executor", None) is not None:
        twin.python_executor = _fresh_executor(agent.python_executor, keep_limit=serving)
    if isinstance(agent, ToolCallingAgent):
        _note_json_calls(twin, scribe)
    if manager is not None:
        give_call_shell(twin, manager)
    return twin


def _check_names(agent: Any, names: Sequence[str] | None) -> None:
    known = {*agent.tools, *agent.managed_agents}
    unknown = sorted(set(names or ()) - known)
    if unknown:
        raise ConfigurationError(
            f"the agent has no tool named {', '.join(map(repr, unknown))}; it has: "
            f"{', '.join(sorted(known - {'final_answer'}))}"
        )


def _private(state: dict[str, Any]) -> dict[str, Any]:
    """A deep copy, value by value; what cannot be copied (a connection, a lock) is shared."""
    return {name: _deep_or_shared(value) for name, value in state.items()}


def _deep_or_shared(value: Any) -> Any:
    try:
        return copy.deepcopy(value)
    except Exception:  # a value's own __deepcopy__ or pickling may raise anything
        return value


def _silent_logger() -> AgentLogger:
    # Not a terminal: with stream_outputs rich's Live would redirect sys.stdout of every thread.
    console = Console(file=io.StringIO(), force_terminal=False, quiet=True)
    return AgentLogger(level=LogLevel.OFF, console=console)


def _fresh_executor(executor: Any, keep_limit: bool) -> Any:
    fresh = copy.copy(executor)
    fresh.state = {"__name__": "__main__"}
    fresh.custom_tools = {}
    fresh.static_tools = None
    fresh.additional_functions = dict(executor.additional_functions)
    if not keep_limit:
        fresh.timeout_seconds = None
    return fresh


def _rebind_methods(agent: Any, twin: Any) -> None:
    for name, value in vars(agent).items():
        if getattr(value, "__self__", None) is agent:
            setattr(twin, name, _rebound(value, agent, twin))


def _callbacks(agent: Any, twin: Any, scribe: Scribe) -> CallbackRegistry:
    registry = CallbackRegistry()
    # First, so that it sees a step's error before a user's callback can change it.
    registry.register(ActionStep, functools.partial(_note, scribe))
    for step_class, callbacks in agent.step_callbacks._callbacks.items():
        for callback in callbacks:
            own = _rebound(callback, agent, twin)
            registry.register(step_class, _guarded(own, scribe.attempt))
    return registry


def _note(scribe: Scribe, step: Any) -> None:
    note_step(scribe, step)


def _rebound(function: Any, agent: Any, twin: Any) -> Any:
    """A bound method of the agent, or of its monitor, as the copy's; anything else as it is."""
    owner = getattr(function, "__self__", None)
    if owner is agent:
        return types.MethodType(function.__func__, twin)
    if owner is agent.monitor:
        return types.MethodType(function.__func__, twin.monitor)
    return function


def _guarded(callback: Callable[..., Any], attempt: Attempt) -> Callable[..., Any]:
    """The callback, whose first exception is kept: a manager would take it for its tool's."""

    @functools.wraps(callback)  # smolagents counts the parameters of the signature
    def guarded(*args: Any, **kwargs: Any) -> Any:
        try:
            return callback(*args, **kwargs)
        except Exception as error:
            attempt.callback_error = attempt.callback_error or error
            raise

    return guarded


def _note_json_calls(twin: Any, scribe: Scribe) -> None:
    execute = twin.execute_tool_call

    def execute_tool_call(tool_name: Any, arguments: Any) -> Any:
        return scribe.json_call(tool_name, arguments, lambda: execute(tool_name, arguments))

    twin.execute_tool_call = execute_tool_call
