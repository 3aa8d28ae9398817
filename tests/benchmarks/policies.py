"""Our side: the embedded model as a policy with a trained adapter, and GRPO's trainer on it."""

from __future__ import annotations

import atexit
import math
import warnings
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from toolbrain_grpo.algorithm import Grpo
from toolbrain_grpo.trainer import RolloutTrainer, reference_of
from toolbrain_transformers.embedded import embedded_model_path
from toolbrain_transformers.policy import Lora, TransformersPolicy
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

from toolbrain_core import Task
from toolbrain_core.roles import ModelRef
from toolbrain_core.runs import Run, RunDirectory

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
LORA = Lora(r=16, alpha=32, target_modules="all-linear")


def load_base(dtype: str = "fp32") -> tuple[Any, Any]:
    """The embedded model, computing in `dtype` throughout, and its tokenizer."""
    warnings.filterwarnings("ignore", category=FutureWarning)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    path = embedded_model_path()
    model = AutoModelForCausalLM.from_pretrained(path, dtype=DTYPES[dtype])
    return model, AutoTokenizer.from_pretrained(path)


def load_policy(dtype: str = "fp32", lora: Lora | None = LORA) -> TransformersPolicy:
    """A policy whose sequences all run to their limit: no token ends them. Shared prefixes must be
    computed once; a fallback is an error."""
    model, tokenizer = load_base(dtype)
    ref = ModelRef("transformers", model, tokenizer, name=str(embedded_model_path()))
    policy = TransformersPolicy(ref, lora=lora, dtype=dtype, tree="require")
    policy.eos_ids = frozenset()
    return policy


def shake(model: Any) -> None:
    """Give all trainable weights the values that a little training might have given them, the same
    in every process. `lora_A` gets PEFT's spread, `lora_B` leaves its zeros."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            if not parameter.requires_grad:
                continue
            noise = torch.randn(parameter.shape, generator=generator)
            if ".lora_A." in name:
                parameter.copy_(noise / math.sqrt(3 * parameter.shape[1]))
            elif ".lora_B." in name:
                parameter.copy_(0.01 * noise)
            else:
                parameter.mul_(1 + 0.01 * noise)


_OPEN = ExitStack()  # a side trains until its process ends
atexit.register(_OPEN.close)


def grpo_trainer(policy: TransformersPolicy, settings: Grpo, directory: Path) -> RolloutTrainer:
    """GRPO's trainer, as it is inside `train`, between two steps. Its reference is the policy as it
    came in; the policy itself is shaken afterwards."""
    tasks = (Task("benchmark", "benchmark"),)
    run = Run(name="benchmark", directory=RunDirectory(directory), policy=policy, data=tasks)
    model = _OPEN.enter_context(policy.training())
    reference = _OPEN.enter_context(reference_of(policy, settings, run))
    trainer = RolloutTrainer(settings, run, policy, model, reference)
    trainer.current_gradient_accumulation_steps = 1
    if settings.gradient_checkpointing:
        model.activation_checkpointing_enable()
    shake(model)
    return trainer


def backward_of(trainer: RolloutTrainer, pieces: list[dict[str, Any]]) -> float:
    """The loss of prepared pieces, with its gradients: what `training_step` does with them."""
    model: Any = trainer.model
    model.train()
    return sum(float(trainer._backward(model, piece)) for piece in pieces)


__all__ = ["DTYPES", "LORA", "backward_of", "grpo_trainer", "load_base", "load_policy", "shake"]
