"""Every hook that a plugin may implement.

A plugin is a module named by an entry point of the group `toolbrain`; its functions carry
`@hookimpl`. It imports nothing heavy: names map to lazy targets (`"package.module:attribute"`).
No hook is called per token.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pluggy

if TYPE_CHECKING:
    import click

    from .registry import Registry
    from .roles import ChatModel
    from .runs import Run, TrainResult
    from .traces import Group

hookspec = pluggy.HookspecMarker("toolbrain")
hookimpl = pluggy.HookimplMarker("toolbrain")


@hookspec
def toolbrain_register_adapters(registry: Registry) -> None:
    """Agent adapters, by the name that `toolbrain_match_agent` returns.

    >>> registry.add("smolagents", "toolbrain_smolagents.adapter:SmolagentsAdapter")
    """


@hookspec
def toolbrain_register_policies(registry: Registry) -> None:
    """Policies, by `ModelRef.kind`. The target is called as `target(ref, **options)`.

    >>> registry.add("transformers", "toolbrain_transformers.policy:TransformersPolicy")
    """


@hookspec
def toolbrain_register_algorithms(registry: Registry) -> None:
    """Algorithms: attrs classes whose fields are their options. `aliases` are further names.

    >>> registry.add("sft", "toolbrain_sft.algorithm:Sft", aliases=("supervised",))
    """


@hookspec
def toolbrain_register_rewards(registry: Registry) -> None:
    """Rewards that users name: `Brain(agent, reward_func="exact-match")`.

    >>> registry.add("exact-match", "toolbrain_core.rewards:reward_exact_match")
    """


@hookspec
def toolbrain_register_judges(registry: Registry) -> None:
    """Judges.

    >>> registry.add("ranking", "toolbrain_judge.ranking:RankingJudge")
    """


@hookspec
def toolbrain_register_retrievers(registry: Registry) -> None:
    """Tool retrievers.

    >>> registry.add("bm25", "toolbrain_bm25.retriever:Bm25Retriever")
    """


@hookspec
def toolbrain_register_loaders(registry: Registry) -> None:
    """Model loaders.

    >>> registry.add("bnb-4bit", "toolbrain_bitsandbytes.loader:FourBit")
    """


@hookspec
def toolbrain_register_samplers(registry: Registry) -> None:
    """Samplers.

    >>> registry.add("vllm", "toolbrain_vllm.sampler:VllmSampler")
    """


@hookspec
def toolbrain_register_task_generators(registry: Registry) -> None:
    """Task generators.

    >>> registry.add("plans", "toolbrain_taskgen.plans:PlanGenerator")
    """


@hookspec
def toolbrain_register_commands(cli: click.Group) -> None:
    """Click commands below `toolbrain`. Import what they need inside the command.

    >>> cli.add_command(model)
    """


@hookspec(firstresult=True)
def toolbrain_match_chat_model(obj: Any) -> ChatModel | None:
    """A `ChatModel` for an endpoint, a hub id or another framework's model; None for others."""


@hookspec
def toolbrain_unavailable() -> str | None:
    """Why this plugin cannot work on this machine ("needs a CUDA GPU"), or None."""


@hookspec
def toolbrain_match_agent(agent: Any) -> tuple[str, type] | None:
    """`(adapter name, the class matched)` or None. The most specific class in the MRO wins.

    Look at the names of the classes in `type(agent).__mro__`, and import nothing:

    >>> for cls in type(agent).__mro__:
    ...     if cls.__module__.startswith("smolagents.") and cls.__name__ == "MultiStepAgent":
    ...         return "smolagents", cls
    """


@hookspec
def toolbrain_run_started(run: Run) -> None:
    """A run began. Observers that raise are logged and skipped."""


@hookspec
def toolbrain_group_finished(run: Run, group: Group) -> None:
    """All attempts at one task ended and were scored."""


@hookspec
def toolbrain_step_finished(run: Run, step: int, metrics: dict[str, Any]) -> None:
    """One update of the weights (or one skipped for want of signal) was recorded."""


@hookspec
def toolbrain_run_finished(run: Run, result: TrainResult | None) -> None:
    """A run ended; `result` is None where it failed."""
