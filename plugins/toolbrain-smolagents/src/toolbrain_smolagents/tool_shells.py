"""Shells: a tool, or a managed agent, as one attempt sees it, with its calls noted."""

from __future__ import annotations

import functools
import threading
import types
from collections.abc import Callable
from typing import Any

from smolagents import Tool

from .attempts import Scribe, complete, named_arguments

#: `setup()` may load a model; tools are shared by attempts, so only one thread runs it.
_SETUP = threading.Lock()


def shell_of(tool: Any, scribe: Scribe) -> Any:
    """The tool for one attempt: its `fork()` where it has one, else the tool itself, shared.

    The shell is of a subclass of the tool's class and has the *same* attribute dictionary: state
    that a shared tool keeps stays shared, as it is when the agent runs by itself. Only `__call__`
    is new (it notes the call), and `forward` completes what an async tool returns.
    """
    if callable(getattr(tool, "fork", None)):
        tool = tool.fork()
    cls = type(tool)

    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
        _set_up(tool)
        given = {k: v for k, v in kwargs.items() if k != "sanitize_inputs_outputs"}
        arguments = named_arguments(list(getattr(tool, "inputs", {})), args, given)
        return scribe.call(tool.name, arguments, lambda: cls.__call__(self, *args, **kwargs))

    body: dict[str, Any] = {"__call__": __call__}
    if isinstance(tool, Tool):
        # A property, since a tool may hold `forward` as an instance attribute.
        body["forward"] = property(lambda self: _completing(tool.forward))
    shell: Any = object.__new__(_subclass(cls, body))
    shell.__dict__ = tool.__dict__
    return shell


def give_call_shell(agent: Any, manager: Scribe) -> None:
    """Make calls of a managed agent (an isolated copy) noted among its manager's calls."""
    cls = type(agent)

    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
        arguments = named_arguments(list(agent.inputs), args, kwargs)
        return manager.call(agent.name, arguments, lambda: cls.__call__(self, *args, **kwargs))

    agent.__class__ = _subclass(cls, {"__call__": __call__})


def _set_up(tool: Any) -> None:
    if not getattr(tool, "is_initialized", True):
        with _SETUP:
            if not tool.is_initialized:
                tool.setup()


def _completing(forward: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(forward)
    def completed(*args: Any, **kwargs: Any) -> Any:
        return complete(forward(*args, **kwargs))

    return completed


def _subclass(cls: type, body: dict[str, Any]) -> type:
    """A subclass that still goes by the name of its parent."""
    named = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, **body}
    return types.new_class(cls.__name__, (cls,), exec_body=lambda space: space.update(named))
