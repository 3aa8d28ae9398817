"""What every session keeps: the turns of one attempt, its calls, its state, its end.

A `Transcript` is the thread-safe notebook behind a `Session`. A policy's session answers chat
requests and writes turns into it; an adapter writes the calls that followed, and freezes it all
into a `Trace`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from typing import Any

from attrs import define, evolve, field

from .errors import AttemptClosed
from .traces import Failure, ToolCall, ToolResult, Trace, Turn, Usage, jsonable


@define(eq=False)
class Transcript:
    """The turns, calls and state of one attempt. Every method may be called from any thread."""

    state: dict[str, Any] = field(factory=dict)
    failure: Failure | None = None
    _turns: list[Turn] = field(factory=list)
    _lock: threading.RLock = field(factory=threading.RLock)
    _closed: threading.Event = field(factory=threading.Event)
    _started: float = field(factory=time.monotonic)

    @property
    def closed(self) -> threading.Event:
        """Set once the attempt was abandoned."""
        return self._closed

    def close(self) -> None:
        """Abandon the attempt: its next chat or tool call raises `AttemptClosed`."""
        with self._lock:
            self._closed.set()

    def check_open(self) -> None:
        """Raise `AttemptClosed` where the attempt was abandoned."""
        if self._closed.is_set():
            raise AttemptClosed("this attempt was abandoned (time limit or interrupt)")

    def fail(self, failure: Failure) -> None:
        """Keep the first failure of the session itself (context overflow, sampler): agents may
        swallow the exception, the trace must not."""
        with self._lock:
            self.failure = self.failure or failure

    def add_turn(self, turn: Turn) -> int:
        """Append a turn; returns its index. Raises `AttemptClosed` after `close()`."""
        with self._lock:
            self.check_open()
            self._turns.append(turn)
            return len(self._turns) - 1

    def add_call(self, call: ToolCall, result: ToolResult, turn: int = -1) -> None:
        """Note a call and its result on a turn (the latest one unless told)."""
        with self._lock:
            if not self._closed.is_set() and self._turns:
                old = self._turns[turn]
                self._turns[turn] = evolve(
                    old, calls=(*old.calls, call), results=(*old.results, result)
                )

    def fail_turn(self, failure: Failure, turn: int = -1) -> None:
        """Note what went wrong in acting on a turn's text (the latest one unless told)."""
        with self._lock:
            if not self._closed.is_set() and self._turns:
                self._turns[turn] = evolve(self._turns[turn], error=failure)

    @property
    def turns(self) -> tuple[Turn, ...]:
        """The turns so far."""
        with self._lock:
            return tuple(self._turns)

    def trace(
        self,
        final_answer: Any = None,
        error: Failure | None = None,
        state: Mapping[str, Any] | None = None,
    ) -> Trace:
        """The attempt so far as a `Trace`.

        The session's own failure comes before `error`; an attempt that failed has no final answer.
        """
        with self._lock:
            turns, failure = tuple(self._turns), self.failure or error
            usage = Usage(
                prompt_tokens=sum(len(t.prompt_ids) for t in turns),
                completion_tokens=sum(len(t.completion_ids) for t in turns),
                seconds=round(time.monotonic() - self._started, 3),
            )
            return Trace(
                turns=turns,
                final_answer=None if failure else jsonable(final_answer),
                error=failure,
                usage=usage,
                state=jsonable({**self.state, **(state or {})}),
            )
