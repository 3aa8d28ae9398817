"""The task generator: plans are drawn, run, put into words, and sifted."""

from __future__ import annotations

import hashlib
import json
import logging
import random
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from attrs import define, evolve, field, frozen, validators

from toolbrain_core.errors import ConfigurationError, DataError
from toolbrain_core.generated import GeneratedTasks
from toolbrain_core.rewards import is_correct
from toolbrain_core.roles import ChatModel
from toolbrain_core.traces import Group, Task, ToolCall, ToolSpec, to_json

from .planning import Planner, properties_of, required_of
from .running import Demonstrate, PlanRunner
from .values import ValueSource, type_of
from .wording import template_query, written_query

log = logging.getLogger(__name__)

Rollout = Callable[[Sequence[Task], int], Sequence[Group]]

#: Runs of each tool that show what it returns, before plans are drawn.
_SURVEY = 3
#: Draws for each task that is wanted, and draws in a row that gave none, before giving up.
_DRAWS, _BARREN = 20, 500


@frozen(kw_only=True)
class PlanGenerator:
    """Makes tasks whose gold answers were computed by running the agent's own tools.

    `min_calls` to `max_calls` tool calls a task. `examples`: values for arguments, by parameter or
    `tool.parameter`; needed where neither schema nor description nor another tool gives any.
    `exclude`: tools that are never run; those that say `side_effects=True` are left out too.
    `description`: what the agent is for, told to the `writer`, a `ChatModel` that puts plans into
    words (by templates without one), asked again up to `retries` times. `time_limit` in seconds for
    the two runs of a plan, `max_bytes` for its results. `probe`: attempts of the policy at each
    task, whose pass rate is kept; only tasks within `keep` stay.
    """

    min_calls: int = field(default=1, validator=validators.ge(1))
    max_calls: int = field(default=3, validator=validators.ge(1))
    examples: Mapping[str, Sequence[Any]] = field(factory=dict)
    exclude: Sequence[str] = ()
    description: str = ""
    writer: ChatModel | None = None
    retries: int = field(default=2, validator=validators.ge(0))
    time_limit: float = field(default=10.0, validator=validators.gt(0))
    max_bytes: int = field(default=10_000, validator=validators.gt(0))
    probe: int = field(default=0, validator=validators.ge(0))
    keep: tuple[float, float] = (0.0, 1.0)

    def __attrs_post_init__(self) -> None:
        if self.min_calls > self.max_calls:
            raise ValueError(f"min_calls={self.min_calls} is more than max_calls={self.max_calls}")
        if tuple(self.keep) != (0.0, 1.0) and not self.probe:
            raise ValueError("keep goes by pass rates: give probe, the attempts that measure them")

    def generate(
        self,
        tools: Sequence[ToolSpec],
        n: int,
        *,
        demonstrate: Demonstrate,
        rollout: Rollout,
        seed: int = 0,
        advance: Callable[[], None] = lambda: None,
    ) -> GeneratedTasks:
        """`n` tasks, or as many as there are; `report` says what became of the others.

        Errors: `ConfigurationError` for names that no tool has, `DataError` where no tool can be
        used.
        """
        if n < 1:
            raise ConfigurationError(f"n must be at least 1, not {n}")
        made = _Making(self, tools, demonstrate, random.Random(seed), seed)
        tasks = made.tasks(n, advance)
        if self.probe:
            tasks = made.sifted(tasks, rollout)
        if len(tasks) < n:
            log.warning("%d of %d tasks were made: %s", len(tasks), n, made.why_few())
        return GeneratedTasks(tasks, made.report(tasks, n))


@define
class _Making:
    """One call of `generate`."""

    settings: PlanGenerator
    tools: Sequence[ToolSpec]
    demonstrate: Demonstrate
    random: random.Random
    seed: int
    rejected: Counter[str] = field(factory=Counter)
    details: dict[str, str] = field(factory=dict)
    unused: dict[str, str] = field(factory=dict)
    drawn: int = 0
    seen: set[Any] = field(factory=set)  # calls and queries of earlier tasks

    def tasks(self, n: int, advance: Callable[[], None]) -> list[Task]:
        """Drawn, run and worded."""
        usable = self._usable()
        values = ValueSource(self.settings.examples)
        planner = Planner(usable, values)
        runner = PlanRunner(self.demonstrate, self.settings.time_limit, self.settings.max_bytes)
        self._survey(planner, runner)
        if not planner.tools:
            reasons = "; ".join(f"{name}: {why}" for name, why in self.unused.items())
            raise DataError(f"no tool can be used for tasks ({reasons or 'the agent has none'})")
        by_name = {tool.name: tool for tool in planner.tools}
        found: list[Task] = []
        counts = range(self.settings.min_calls, self.settings.max_calls + 1)
        barren = 0
        for _ in range(_DRAWS * n + 100):
            if len(found) == n or barren > _BARREN:
                break
            task = self._task(planner, runner, by_name, self.random.choice(counts))
            barren = 0 if task is not None else barren + 1
            if task is not None:
                found.append(task)
                advance()
        return found

    def sifted(self, tasks: Sequence[Task], rollout: Rollout) -> list[Task]:
        """With the pass rates of the policy, and without what it cannot learn from."""
        low, high = self.settings.keep
        kept = []
        for task, group in zip(tasks, rollout(tasks, self.settings.probe), strict=True):
            passed = [is_correct(r.trace, task.gold_answer) for r in group.rollouts]
            rate = sum(passed) / len(passed)
            if low <= rate <= high:
                kept.append(evolve(task, metadata={**task.metadata, "pass_rate": rate}))
            else:
                self.rejected["too easy" if rate > high else "too hard"] += 1
        return kept

    def why_few(self) -> str:
        reasons = ", ".join(f"{why} {count}" for why, count in self.rejected.most_common(4))
        return (
            f"{reasons or 'nothing else can be drawn'}. More values for arguments (examples=…) or "
            "more calls (max_calls=…) give more tasks"
        )

    def report(self, tasks: Sequence[Task], n: int) -> dict[str, Any]:
        """JSON data."""
        plans = [task.metadata["plan"] for task in tasks]
        calls = [[c["name"] for c in plan if c["name"] != "final_answer"] for plan in plans]
        used = Counter(name for names in calls for name in names)
        return {
            "asked": n,
            "made": len(tasks),
            "drawn": self.drawn,
            "rejected": dict(self.rejected.most_common()),
            "examples_of_rejected": self.details,
            "calls_per_task": dict(sorted(Counter(map(len, calls)).items())),
            "calls_of_tool": dict(used.most_common()),
            "tools_not_used": {
                tool.name: self.unused.get(tool.name, "no plan with it was kept")
                for tool in self.tools
                if tool.name not in used
            },
            "written_by": "templates" if self.settings.writer is None else "a language model",
            "seed": self.seed,
        }

    def _usable(self) -> list[ToolSpec]:
        names = {tool.name for tool in self.tools}
        for name in self.settings.exclude:
            if name not in names:
                raise ConfigurationError(
                    f"exclude has {name!r}, which no tool is called; there are {', '.join(names)}"
                )
        parameters = {f"{tool.name}.{name}" for tool in self.tools for name in properties_of(tool)}
        parameters |= {name.partition(".")[2] for name in parameters}
        for key in self.settings.examples:
            if key not in parameters:
                raise ConfigurationError(
                    f"examples has {key!r}; the parameters are {', '.join(sorted(parameters))}"
                )
        for tool in self.tools:
            if tool.name in self.settings.exclude:
                self.unused[tool.name] = "excluded"
            elif tool.side_effects:
                self.unused[tool.name] = "it has side effects"
        return [tool for tool in self.tools if tool.name not in self.unused]

    def _survey(self, planner: Planner, runner: PlanRunner) -> None:
        """Run every tool a few times by itself: what it returns may be what another one takes. In
        rounds, since it may take that itself."""
        returns: dict[str, str] = {}
        waiting = list(planner.tools)
        while waiting:
            still = []
            for tool in waiting:
                kind = self._try_out(tool, planner, runner)
                if kind is None:
                    still.append(tool)
                elif kind:
                    returns[tool.name] = kind
            if len(still) == len(waiting):
                break
            waiting = still
        planner.tools = [tool for tool in planner.tools if tool.name in returns]
        planner.returns = returns

    def _try_out(self, tool: ToolSpec, planner: Planner, runner: PlanRunner) -> str | None:
        """The JSON type of what it returns; "" for a tool of no use, None for one that may work
        once more values are known."""
        for name in required_of(tool):
            if not planner.values.candidates(tool, name):
                self.unused[tool.name] = (
                    f"no value is known for {name}: give examples={{{name!r}: […]}}"
                )
                return None
        kind = None
        for _ in range(_SURVEY):
            call = planner.call(1, tool, self.random)
            if call is None:
                continue
            outcome = runner.run(Task("survey", tool.description or tool.name), (call,))
            if outcome.why:
                self.unused[tool.name] = f"{outcome.why}: {outcome.detail}"
                if outcome.why != "raised":  # a value may be wrong; the rest is the tool's doing
                    return ""
                continue
            planner.values.learn(tool.name, outcome.results[0])
            kind = type_of(outcome.results[0])
        if kind is not None:
            self.unused.pop(tool.name, None)
        return kind

    def _task(
        self, planner: Planner, runner: PlanRunner, tools: Mapping[str, ToolSpec], calls: int
    ) -> Task | None:
        plan = planner.draw(calls, self.random)
        if plan is None:
            return None
        self.drawn += 1
        facts = [to_json(call) for call in plan]
        written = json.dumps(facts, sort_keys=True)
        if self._was_seen(_calls_of(plan)):
            return self._reject("duplicate", "")
        query = self._query(plan, tools)
        if query is None:
            return self._reject("the writer lost a value or named a tool", written)
        if self._was_seen(tuple(re.findall(r"\w+", query.lower()))):
            return self._reject("duplicate", "")
        name = hashlib.sha256(f"{written}{query}".encode()).hexdigest()[:12]
        task = Task(f"plan-{name}", query, metadata={"plan": facts})
        outcome = runner.run(task, plan)
        if outcome.why:
            return self._reject(outcome.why, f"{written}: {outcome.detail}")
        return evolve(task, gold_answer=outcome.answer)

    def _query(self, plan: Sequence[ToolCall], tools: Mapping[str, ToolSpec]) -> str | None:
        settings = self.settings
        if settings.writer is None:
            return template_query(plan, tools, self.random)
        return written_query(settings.writer, plan, tools, settings.retries, settings.description)

    def _was_seen(self, what: Any) -> bool:
        seen = what in self.seen
        self.seen.add(what)
        return seen

    def _reject(self, why: str, detail: str) -> None:
        self.rejected[why] += 1
        if detail:
            self.details.setdefault(why, detail[:300])


def _calls_of(plan: Sequence[ToolCall]) -> frozenset[str]:
    """The same for plans that make the same calls, in whatever order."""
    steps = (call for call in plan if call.name != "final_answer")
    return frozenset(json.dumps([c.name, c.arguments], sort_keys=True) for c in steps)
