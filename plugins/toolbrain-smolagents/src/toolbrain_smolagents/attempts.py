"""What the parts of one attempt share, and what one agent of it notes in the transcript."""

from __future__ import annotations

import asyncio
import contextvars
import itertools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from typing import Any, Literal

from attrs import define, field
from smolagents import TransformersModel
from smolagents.agent_types import AgentType

from toolbrain_core.roles import Observe, Session
from toolbrain_core.sessions import Transcript
from toolbrain_core.traces import Failure, ToolCall, ToolResult, jsonable

#: How soon a pool worker notices that its attempt was abandoned, in seconds.
_POLL = 0.05
#: Set in threads that `in_daemon_thread` started (a pool's workers inherit `daemon`, and are
#: joined at exit all the same).
_OWN_THREAD = threading.local()


@define(eq=False)
class Attempt:
    """One run of an isolated copy. `thread` is the attempt's own thread.

    `line_error` and `callback_error` keep the first exception of a model call and of a user's
    callback: smolagents swallows both in places.
    """

    session: Session
    policy: TransformersModel
    observe: Observe | None = None
    thread: int = field(factory=threading.get_ident)
    line_error: Exception | None = None
    callback_error: Exception | None = None
    max_steps_reached: bool = False
    _ids: Iterator[int] = field(factory=lambda: itertools.count(1))

    @property
    def transcript(self) -> Transcript:
        return self.session.transcript

    def next_call_id(self) -> str:
        return f"call_{next(self._ids)}"

    def run_tool(self, body: Callable[[], Any]) -> Any:
        """`body()`, so that a hanging tool cannot keep the interpreter from exiting.

        smolagents runs parallel calls in a thread pool, whose workers are joined at exit. There
        the body runs in a daemon thread, and the worker waits for it or for the attempt's end.
        """
        if threading.get_ident() == self.thread or getattr(_OWN_THREAD, "here", False):
            return body()
        outcome: Future[Any] = in_daemon_thread(body)
        while not wait([outcome], timeout=_POLL).done:
            self.transcript.check_open()
        return outcome.result()


@define(eq=False)
class Scribe:
    """Notes what one agent of the attempt does. `turn` is the index of its latest turn.

    Calls made by an agent whose model is not the policy's are not noted: they are nothing that
    the policy wrote.
    """

    attempt: Attempt
    agent_name: str
    is_policy: bool
    via: Literal["json", "code"]
    turn: int = -1
    is_top: bool = True
    _written: threading.local = field(factory=threading.local)

    def call(self, name: str, arguments: Mapping[str, Any], body: Callable[[], Any]) -> Any:
        """Run one tool call and note it with its output or error. Errors: the tool's own;
        `AttemptClosed` where the attempt was abandoned."""
        transcript = self.attempt.transcript
        transcript.check_open()
        arguments = self._take_written(arguments)
        call, turn = self._new_call(name, arguments), self.turn
        try:
            output = self.attempt.run_tool(body)
        except Exception as error:
            self._note(call, ToolResult(call.id, error=describe(error)), turn)
            raise
        self._note(call, ToolResult(call.id, output=plain(output)), turn)
        transcript.check_open()
        return output

    def json_call(self, name: Any, arguments: Any, body: Callable[[], Any]) -> Any:
        """Run a call that was written as JSON. It is noted where it fails before any tool runs
        (unknown tool, arguments that do not fit), and with the arguments as they were written."""
        self._written.arguments = arguments
        try:
            return body()
        except Exception as error:
            if self._written.arguments is not None:
                call = self._new_call(str(name), _as_mapping(arguments))
                self._note(call, ToolResult(call.id, error=describe(error)), self.turn)
            raise
        finally:
            self._written.arguments = None

    def fail_turn(self, failure: Failure) -> None:
        """What went wrong in acting on the agent's latest turn."""
        if self.is_policy:
            self.attempt.transcript.fail_turn(failure, self.turn)

    def _take_written(self, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        # smolagents replaces names of state variables by their values before the tool sees them.
        written = getattr(self._written, "arguments", None)
        self._written.arguments = None
        return written if isinstance(written, Mapping) else arguments

    def _new_call(self, name: str, arguments: Mapping[str, Any]) -> ToolCall:
        return ToolCall(self.attempt.next_call_id(), name, jsonable(arguments), via=self.via)

    def _note(self, call: ToolCall, result: ToolResult, turn: int) -> None:
        if self.is_policy:
            self.attempt.transcript.add_call(call, result, turn)


def named_arguments(
    names: Sequence[str], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    """The arguments of a call by parameter name, the way `smolagents.Tool.__call__` reads them."""
    if len(args) == 1 and not kwargs and isinstance(args[0], dict) and set(args[0]) <= set(names):
        return dict(args[0])
    extra = (f"argument_{i}" for i in range(len(names) + 1, len(args) + 1))
    return {**dict(zip([*names, *extra], args, strict=False)), **kwargs}


def in_daemon_thread(body: Callable[[], Any]) -> Future[Any]:
    """Start `body()` in a daemon thread with the caller's context variables."""
    outcome: Future[Any] = Future()
    context = contextvars.copy_context()

    def work() -> None:
        _OWN_THREAD.here = True
        try:
            outcome.set_result(context.run(body))
        except BaseException as error:
            outcome.set_exception(error)

    threading.Thread(target=work, name="toolbrain-tool", daemon=True).start()
    return outcome


def complete(result: Any) -> Any:
    """`result`, or what it gives where it is a coroutine (a tool with an async `forward`)."""
    if not asyncio.iscoroutine(result):
        return result
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(result)
    return in_daemon_thread(lambda: asyncio.run(result)).result()  # e.g. called in a notebook


def plain(value: Any) -> Any:
    """JSON data of what a tool or agent gave; smolagents' own types become their text."""
    if isinstance(value, AgentType):
        return str.__str__(value.to_string())  # an AgentText may hold another one
    return jsonable(value)


def describe(error: BaseException) -> str:
    """Class and message of an exception in one text."""
    return f"{type(error).__name__}: {error}"


def _as_mapping(arguments: Any) -> Mapping[str, Any]:
    if isinstance(arguments, Mapping):
        return arguments
    return {} if arguments is None else {"argument_1": arguments}
