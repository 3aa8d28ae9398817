"""Plans: small programs of tool calls, before any of them is put into words."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

from attrs import define, field

from toolbrain_core.traces import ToolCall, ToolSpec

from .values import ValueSource, allows, words_of


def required_of(tool: ToolSpec) -> list[str]:
    return list(tool.parameters.get("required", ()))


def properties_of(tool: ToolSpec) -> Mapping[str, Any]:
    properties: Mapping[str, Any] = tool.parameters.get("properties", {})
    return properties


@define
class Planner:
    """Draws plans. `returns` is the JSON type of what each tool returns, as far as it was seen.

    A plan is a chain, where each call but the first is given what the one before it returned, or
    several calls whose results are the answer as a list.
    """

    tools: Sequence[ToolSpec]
    values: ValueSource
    returns: Mapping[str, str] = field(factory=dict)

    def draw(self, calls: int, random: random.Random) -> tuple[ToolCall, ...] | None:
        """A plan of so many calls; None where this draw found none."""
        if calls > 1 and random.random() < 0.5:
            chain = self._chain(calls, random)
            if chain:
                return chain
        return self._several(calls, random)

    def call(
        self,
        number: int,
        tool: ToolSpec,
        random: random.Random,
        given: Mapping[str, Any] | None = None,
    ) -> ToolCall | None:
        """A call with drawn arguments: the required ones, and now and then an optional one."""
        arguments = dict(given or {})
        required = required_of(tool)
        for name in properties_of(tool):
            if name in arguments or (name not in required and random.random() < 0.7):
                continue
            try:
                arguments[name] = self.values.draw(tool, name, random)
            except LookupError:
                if name in required:
                    return None
        ordered = {name: arguments[name] for name in properties_of(tool) if name in arguments}
        return ToolCall(f"c{number}", tool.name, ordered)

    def _several(self, count: int, random: random.Random) -> tuple[ToolCall, ...] | None:
        plan: list[ToolCall] = []
        for number in range(1, count + 1):
            call = self.call(number, random.choice(self.tools), random)
            same = [
                c for c in plan if call and (c.name, c.arguments) == (call.name, call.arguments)
            ]
            if call is None or same:
                return None
            plan.append(call)
        if count == 1:
            return tuple(plan)
        results = [{"$result": call.id} for call in plan]
        return (*plan, ToolCall("answer", "final_answer", {"answer": results}))

    def _chain(self, count: int, random: random.Random) -> tuple[ToolCall, ...] | None:
        first = self.call(1, random.choice(self.tools), random)
        if first is None:
            return None
        plan = [first]
        while len(plan) < count:
            follower = self._follower(plan[-1], len(plan) + 1, random)
            if follower is None:
                return None
            plan.append(follower)
        return tuple(plan)

    def _follower(self, call: ToolCall, number: int, random: random.Random) -> ToolCall | None:
        """A call that is given what `call` returned, where type and name fit."""
        kind, words = self.returns.get(call.name), words_of(call.name)
        fitting = [
            (tool, name)
            for tool in self.tools
            if tool.name != call.name
            for name, schema in properties_of(tool).items()
            if kind and allows(schema, kind) and words & words_of(name)
        ]
        if not fitting:
            return None
        tool, name = random.choice(fitting)
        return self.call(number, tool, random, {name: {"$result": call.id}})


def literals(calls: Sequence[ToolCall]) -> list[Any]:
    """The scalars that a plan's arguments hold, in order, results of other calls left out."""
    found: list[Any] = []
    for call in calls:
        _collect(call.arguments, found)
    return found


def _collect(value: Any, found: list[Any]) -> None:
    if isinstance(value, Mapping):
        if set(value) != {"$result"}:
            for item in value.values():
                _collect(item, found)
    elif isinstance(value, list | tuple):
        for item in value:
            _collect(item, found)
    elif value is not None:
        found.append(value)
