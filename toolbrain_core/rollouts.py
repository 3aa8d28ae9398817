"""Tasks in, groups out: the life of an attempt, many at once, late ones abandoned, failures kept.

Every attempt runs in a daemon thread of its own. A thread cannot be killed, so a late attempt is
abandoned instead: its session is closed (its next chat or tool call unwinds it), its slot is free
at once, and nothing ever joins it.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import inspect
import logging
import queue
import threading
import time
import traceback
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Literal

from attrs import define, evolve, field, frozen

from .errors import AttemptClosed, ConfigurationError
from .roles import AgentAdapter, AttemptKey, Observe, Policy, Reward, Session
from .traces import Failure, Group, RewardResult, Rollout, Sampling, Task, Trace

logger = logging.getLogger(__name__)

#: Seconds between two looks at the clock, at `stop` and at pending signals.
POLL = 0.1

Purpose = Literal["train", "use"]


@define(eq=False, kw_only=True)
class Rollouts:
    """How attempts are run: the agent, the policy that answers it, what stands around an attempt.

    Give `agent` (the adapter isolates each attempt) or `make_agent`, which is called without
    arguments for each attempt, inside the attempt's thread.

    `setup(task)` runs before an attempt and `teardown(trace)` after it, both in the attempt's
    thread and context, so that what `setup` binds there (a context variable, a thread-local) is
    seen by the tools. A `setup` that raises makes the attempt an `infrastructure` failure.
    `teardown` always follows, also after a failed `setup`; one that raises is logged, and the
    trace keeps its result. For an abandoned attempt it runs when the thread unwinds, if it ever
    does.

    `concurrency` is the largest number of attempts at once, `time_limit` the seconds that one may
    take from its start (None: no limit). `abandoned` counts the late ones so far.
    Errors: ConfigurationError for a value that cannot be used.
    """

    adapter: AgentAdapter
    policy: Policy
    agent: Any = None
    make_agent: Callable[[], Any] | None = None
    reward: Reward | None = None
    setup: Callable[[Task], Any] | None = None
    teardown: Callable[[Trace], Any] | None = None
    observe: Observe | None = None
    concurrency: int = 64
    time_limit: float | None = 600.0
    abandoned: int = field(default=0, init=False)

    def __attrs_post_init__(self) -> None:
        if (self.agent is None) == (self.make_agent is None):
            raise ConfigurationError(
                "give either an agent or make_agent, a function that builds one"
            )
        check_limits(self.concurrency, self.time_limit)

    def run(
        self,
        tasks: Sequence[Task],
        attempts: int,
        *,
        run_name: str,
        iteration: int,
        seed: int,
        sampling: Sampling | None = None,
        purpose: Purpose = "train",
        first_attempt: int = 0,
        on_group: Callable[[Group], Any] | None = None,
        stop: threading.Event | None = None,
    ) -> list[Group]:
        """`attempts` attempts at each task, as scored groups in the order of `tasks`.

        Attempts are numbered from `first_attempt` (another number gives other seeds: resampling),
        and a task that occurs twice goes on counting. A group is scored in a thread of its own as
        soon as its last attempt ended; then `on_group(group)` is called in this thread.

        A failed attempt is data. Raises only what `policy` or `on_group` raise here, and
        KeyboardInterrupt, within a second, on Ctrl-C or once `stop` is set: every open session is
        then closed and no thread is waited for.
        """
        if not isinstance(attempts, int) or attempts < 1:
            raise ConfigurationError(f"attempts must be a number of at least 1, not {attempts!r}")
        batch = _Batch(self, tasks, attempts, sampling, purpose)
        seen: Counter[str] = Counter()
        for index, task in enumerate(tasks):
            start = first_attempt + attempts * seen[task.id]
            seen[task.id] += 1
            for number in range(start, start + attempts):
                key = AttemptKey(run_name, iteration, task.id, number, seed)
                batch.waiting.append((index, key))
        with self.policy.serving():
            return batch.run(on_group, stop)


def check_limits(concurrency: int, time_limit: float | None) -> None:
    """Errors: ConfigurationError for a value that attempts cannot be run with."""
    if concurrency < 1:
        raise ConfigurationError(f"concurrency must be at least 1, not {concurrency}")
    if time_limit is not None and time_limit <= 0:
        raise ConfigurationError(
            f"time_limit must be a positive number of seconds or None, not {time_limit}"
        )


@define(eq=False)
class _Attempt:
    """One attempt: what its thread does, and what the main thread must know of it."""

    rollouts: Rollouts
    task: Task
    session: Session
    group: int
    started: float = field(factory=time.monotonic)
    #: Set by the main thread: why nobody waits for this attempt any more.
    abandonment: Failure | None = None
    #: Set before teardown, so that a slow teardown cannot cost the result.
    trace: Trace | None = None
    _cancel: Callable[[], Any] | None = None

    def run(self) -> None:
        """The thread's body. Never raises: `trace` is set at its end."""
        self.trace = self._run()
        if self.rollouts.teardown is not None:
            try:
                self.rollouts.teardown(self.trace)
            except BaseException:  # user code; an attempt that ended well stays so
                logger.exception("teardown failed after %s", self.session.key)

    def _run(self) -> Trace:
        try:
            if self.rollouts.setup is not None:
                self.rollouts.setup(self.task)
            return self._run_agent()
        except AttemptClosed as closed:
            failure = self.abandonment or _infrastructure(closed)
        except BaseException as error:  # SystemExit in a tool must not lose the attempt either
            failure = self.abandonment or _infrastructure(error)
        return self.session.transcript.trace(error=failure)

    def _run_agent(self) -> Trace:
        rollouts = self.rollouts
        agent = rollouts.agent if rollouts.make_agent is None else rollouts.make_agent()
        trace = rollouts.adapter.run(agent, self.task, self.session, observe=rollouts.observe)
        if inspect.isawaitable(trace):
            trace = asyncio.run(self._cancellable(trace))
        if not isinstance(trace, Trace):
            name = type(rollouts.adapter).__name__
            raise TypeError(f"{name}.run returned a {type(trace).__name__}; a Trace is needed")
        return trace

    async def _cancellable(self, awaitable: Awaitable[Trace]) -> Trace:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None  # we run inside asyncio.run
        loop.set_default_executor(_DaemonThreads())
        self._cancel = lambda: loop.call_soon_threadsafe(task.cancel)
        self.session.transcript.check_open()  # abandoned before _cancel was there to be called
        return await awaitable

    def abandon(self, failure: Failure) -> Trace:
        """Close the session, cancel what awaits. The trace so far: whole if only teardown hangs."""
        self.abandonment = failure
        self.session.transcript.close()
        if self._cancel is not None:
            with contextlib.suppress(RuntimeError):  # its loop has just ended
                self._cancel()
        return self.trace or self.session.transcript.trace(error=failure)


class _DaemonThreads(ThreadPoolExecutor):
    """Where `asyncio.to_thread` runs in an attempt: a daemon thread per call.

    The workers of a stock executor are joined when the interpreter exits, so that one tool asleep
    in `to_thread` would keep the process alive.
    """

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()

        def work() -> None:
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(fn(*args, **kwargs))
                except BaseException as error:  # the awaiting coroutine gets it
                    future.set_exception(error)

        threading.Thread(target=work, name="attempt's to_thread", daemon=True).start()
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        super().shutdown(wait=False, cancel_futures=cancel_futures)


@frozen
class _Ended:
    attempt: _Attempt


@frozen
class _Scored:
    index: int
    group: Group


@define(eq=False)
class _Batch:
    """One call of `Rollouts.run`. Its state belongs to the main thread; others only send events."""

    rollouts: Rollouts
    tasks: Sequence[Task]
    attempts: int
    sampling: Sampling | None
    purpose: Purpose
    waiting: deque[tuple[int, AttemptKey]] = field(factory=deque)
    _running: set[_Attempt] = field(factory=set)
    _finished: dict[int, list[Rollout]] = field(factory=dict)
    _groups: dict[int, Group] = field(factory=dict)
    _events: queue.SimpleQueue[_Ended | _Scored] = field(factory=queue.SimpleQueue)

    def run(
        self, on_group: Callable[[Group], Any] | None, stop: threading.Event | None
    ) -> list[Group]:
        try:
            while len(self._groups) < len(self.tasks):
                if stop is not None and stop.is_set():
                    raise KeyboardInterrupt
                self._start()
                self._abandon_late()
                # A short wait: Python handles signals between two of them, whatever threads do.
                with contextlib.suppress(queue.Empty):
                    self._handle(self._events.get(timeout=POLL), on_group)
        finally:
            # Nothing is left here unless the loop was interrupted.
            for attempt in self._running:
                attempt.abandon(Failure("infrastructure", "the run was interrupted"))
        return [self._groups[index] for index in range(len(self.tasks))]

    def _start(self) -> None:
        while self.waiting and len(self._running) < self.rollouts.concurrency:
            index, key = self.waiting.popleft()
            session = self.rollouts.policy.session(key, self.sampling, self.purpose)
            attempt = _Attempt(self.rollouts, self.tasks[index], session, index)
            self._running.add(attempt)
            _in_daemon_thread(f"attempt {key.task_id}/{key.attempt}", self._attempt, attempt)

    def _attempt(self, attempt: _Attempt) -> None:
        attempt.run()
        self._events.put(_Ended(attempt))

    def _abandon_late(self) -> None:
        limit = self.rollouts.time_limit
        if limit is None:
            return
        now = time.monotonic()
        for attempt in [a for a in self._running if now - a.started > limit]:
            failure = Failure("time_limit", f"abandoned after {limit:g} seconds (time_limit)")
            self.rollouts.abandoned += 1
            logger.warning("attempt %s %s", attempt.session.key, failure.message)
            self._settle(attempt, attempt.abandon(failure))

    def _handle(self, event: _Ended | _Scored, on_group: Callable[[Group], Any] | None) -> None:
        if isinstance(event, _Scored):
            self._groups[event.index] = event.group
            if on_group is not None:
                on_group(event.group)
        elif event.attempt in self._running:  # else: abandoned, and it has unwound by now
            assert event.attempt.trace is not None  # _Attempt.run sets it
            self._settle(event.attempt, event.attempt.trace)

    def _settle(self, attempt: _Attempt, trace: Trace) -> None:
        self._running.discard(attempt)
        rollout = Rollout(attempt.task, trace, attempt=attempt.session.key.attempt)
        done = self._finished.setdefault(attempt.group, [])
        done.append(rollout)
        if len(done) == self.attempts:
            done.sort(key=lambda rollout: rollout.attempt)
            group = Group(attempt.task, tuple(done))
            _in_daemon_thread(f"score {attempt.task.id}", self._score, attempt.group, group)

    def _score(self, index: int, group: Group) -> None:
        if self.rollouts.reward is not None:
            group = _scored(group, self.rollouts.reward)
        self._events.put(_Scored(index, group))


def _in_daemon_thread(name: str, target: Callable[..., None], *args: Any) -> None:
    context = contextvars.copy_context()
    threading.Thread(target=context.run, args=(target, *args), name=name, daemon=True).start()


def _scored(group: Group, reward: Reward) -> Group:
    """The group with its rewards; a reward that breaks its contract is a typed failure of each."""
    try:
        results = list(reward(group))
        if len(results) != len(group.rollouts):
            raise ValueError(f"{len(results)} results for {len(group.rollouts)} attempts")
    except BaseException as error:  # user code in a thread: losing it would hang the run
        logger.exception("the reward failed on task %r", group.task.id)
        results = [RewardResult(None, failure=_failure("reward", error))] * len(group.rollouts)
    rollouts = zip(group.rollouts, results, strict=True)
    return evolve(group, rollouts=tuple(evolve(r, reward=result) for r, result in rollouts))


def _infrastructure(error: BaseException) -> Failure:
    return _failure("infrastructure", error)


def _failure(kind: Literal["infrastructure", "reward"], error: BaseException) -> Failure:
    name = type(error).__name__
    text = "".join(traceback.format_exception(error))
    return Failure(kind, str(error) or name, exception=name, traceback=text)


__all__ = ["Rollouts"]
