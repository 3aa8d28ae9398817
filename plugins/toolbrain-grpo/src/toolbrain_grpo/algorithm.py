"""GRPO: group relative policy optimisation (arXiv 2402.03300) of a tool-using agent."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from typing import ClassVar, Literal

from attrs import field, frozen, validators
from toolbrain_transformers.settings import TrainerSettings

from toolbrain_core.errors import ConfigurationError
from toolbrain_core.runs import Run, TrainResult
from toolbrain_core.traces import Task

LossType = Literal["dapo", "grpo", "bnpo", "dr_grpo", "cispo", "sapo", "vespo", "luspo"]


@frozen(kw_only=True)
class Grpo(TrainerSettings):
    """Options of GRPO.

    `tasks_per_step` x `attempts` rollouts make one batch, which is used for `updates_per_batch`
    optimiser steps (TRL's num_iterations, μ). `temperature` of the sampling that trains;
    `max_new_tokens` per turn (None: the agent's own). `beta` weighs the KL divergence to the
    policy as it was when training began (the k3 estimate times the ratio, which makes its gradient
    unbiased, arXiv 2512.02556; without the ratio: `trl={"use_bias_correction_kl": False}`).
    `epsilon`, `epsilon_high` clip the ratio (DAPO, arXiv 2503.14476). `scale_rewards` divides
    advantages by the standard deviation of the group, of the batch, or not at all. Groups whose
    rewards are all equal are sampled again up to `resample` times, then skipped and counted.
    `on_error="zero"` counts attempts that were lost (time limit, infrastructure, a reward that
    failed) as 0 instead of leaving them out.
    `importance_cap` truncates the weight exp(training forward - recorded log-probability)
    (arXiv 2505.24034; TRL's vllm_importance_sampling_clip_max).
    """

    consumes: ClassVar[frozenset[str]] = frozenset({"tasks"})
    name: ClassVar[str] = "grpo"

    attempts: int = field(default=8, validator=validators.ge(2))
    tasks_per_step: int = field(default=4, validator=validators.gt(0))
    updates_per_batch: int = field(default=1, validator=validators.gt(0))
    temperature: float = field(default=1.0, validator=validators.gt(0))
    max_new_tokens: int | None = field(
        default=None, validator=validators.optional(validators.gt(0))
    )
    loss_type: LossType = field(
        default="dapo",
        validator=validators.in_(LossType.__args__),  # type: ignore[attr-defined]
    )
    beta: float = field(default=0.0, validator=validators.ge(0))
    epsilon: float = field(default=0.2, validator=validators.ge(0))
    epsilon_high: float | None = field(
        default=0.28, validator=validators.optional(validators.ge(0))
    )
    scale_rewards: Literal["group", "batch", "none"] = field(
        default="group", validator=validators.in_(("group", "batch", "none"))
    )
    resample: int = field(default=1, validator=validators.ge(0))
    on_error: Literal["mask", "zero"] = field(
        default="mask", validator=validators.in_(("mask", "zero"))
    )
    importance_cap: float = field(default=3.0, validator=validators.gt(0))
    shuffle: bool = True

    def train(self, run: Run) -> TrainResult:
        """Train `run.policy` on `run.data` (tasks)."""
        from .trainer import train_grpo

        if self.checkpoint_every % self.updates_per_batch:
            raise ConfigurationError(
                f"checkpoint_every={self.checkpoint_every} must be a multiple of "
                f"updates_per_batch={self.updates_per_batch}: a batch is not split by a checkpoint"
            )
        started = time.monotonic()
        trainer = train_grpo(self, run)
        return TrainResult(
            algorithm=self.name,
            updates=trainer.updates,
            steps=trainer.state.global_step,
            metrics=trainer.last_metrics,
            warnings=tuple(run.warnings),
            run_dir=run.directory.path,
            seconds=time.monotonic() - started,
            no_signal=trainer.no_signal,
        )


@frozen
class Step:
    """One batch of tasks; `repeat` counts its optimiser steps from 0."""

    iteration: int
    tasks: tuple[Task, ...]
    repeat: int = 0


def schedule_of(settings: Grpo, tasks: Sequence[Task], seed: int) -> list[Step]:
    """Every optimiser step of the run: each iteration is one pass over the tasks, shuffled by
    (seed, iteration)."""
    steps: list[Step] = []
    for iteration in range(settings.num_iterations):
        order = list(tasks)
        if settings.shuffle:
            random.Random(f"{seed}/{iteration}").shuffle(order)
        size = settings.tasks_per_step
        batches = [tuple(order[i : i + size]) for i in range(0, len(order), size)]
        steps += [
            Step(iteration, batch, repeat)
            for batch in batches
            for repeat in range(settings.updates_per_batch)
        ]
    return steps
