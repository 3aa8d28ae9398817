"""Tasks that were made rather than found, with what became of those that were not kept."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from .errors import DataError, ToolBrainError
from .traces import Task, ToolCall, from_json


class GeneratedTasks(list[Task]):
    """A list of tasks; `report` (JSON data) counts what was made and what was rejected, and why."""

    def __init__(self, tasks: Iterable[Task], report: Mapping[str, Any]):
        super().__init__(tasks)
        self.report = dict(report)


def plan_of(task: Task) -> tuple[ToolCall, ...]:
    """The calls that answer a generated task. Errors: DataError where it carries no plan."""
    plan = task.metadata.get("plan")
    if not isinstance(plan, list | tuple) or not plan:
        raise DataError(
            f"task {task.id!r} carries no plan of calls (metadata['plan']): only tasks that "
            "generate_tasks made do"
        )
    try:
        return tuple(from_json(ToolCall, call) for call in plan)
    except ToolBrainError as error:
        raise DataError(f"task {task.id!r}: metadata['plan']: {error}") from error
