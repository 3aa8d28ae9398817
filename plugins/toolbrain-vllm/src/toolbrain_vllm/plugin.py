"""Hook implementations; imports nothing heavy."""

from __future__ import annotations

from typing import TYPE_CHECKING

from toolbrain_core.hookspecs import hookimpl

if TYPE_CHECKING:
    from toolbrain_core.registry import Registry


@hookimpl
def toolbrain_register_samplers(registry: Registry) -> None:
    registry.add("vllm", "toolbrain_vllm.sampler:VllmSampler")
