"""toolbrain: trains the agent you already have to use its tools.

Public names are imported on first use (PEP 562), so that `import toolbrain_core` stays cheap.
"""

from __future__ import annotations

import importlib
import importlib.metadata
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .brain import Brain
    from .errors import ToolBrainError
    from .evaluation import Comparison, Evaluation, compare
    from .hookspecs import hookimpl
    from .plugins import PluginManager
    from .runs import TrainResult
    from .traces import (
        Demonstration,
        Failure,
        Group,
        RewardResult,
        Rollout,
        Sampling,
        Task,
        ToolCall,
        ToolResult,
        ToolSpec,
        Trace,
        Turn,
    )

    __version__: str

_HOMES = {
    "brain": ("Brain",),
    "errors": ("ToolBrainError",),
    "evaluation": ("Comparison", "Evaluation", "compare"),
    "hookspecs": ("hookimpl",),
    "plugins": ("PluginManager",),
    "runs": ("TrainResult",),
    "traces": (
        "Demonstration",
        "Failure",
        "Group",
        "RewardResult",
        "Rollout",
        "Sampling",
        "Task",
        "ToolCall",
        "ToolResult",
        "ToolSpec",
        "Trace",
        "Turn",
    ),
}
_MODULE_OF = {name: module for module, names in _HOMES.items() for name in names}

__all__ = [
    "Brain",
    "Comparison",
    "Demonstration",
    "Evaluation",
    "Failure",
    "Group",
    "PluginManager",
    "RewardResult",
    "Rollout",
    "Sampling",
    "Task",
    "ToolBrainError",
    "ToolCall",
    "ToolResult",
    "ToolSpec",
    "Trace",
    "TrainResult",
    "Turn",
    "__version__",
    "compare",
    "hookimpl",
]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return importlib.metadata.version("toolbrain-core")
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_MODULE_OF[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
