"""Supervised fine-tuning on demonstrations, or on good rollouts."""

from __future__ import annotations

import time
from typing import ClassVar

from attrs import field, frozen, validators
from toolbrain_transformers.settings import TrainerSettings

from toolbrain_core.runs import Run, TrainResult


@frozen(kw_only=True)
class Sft(TrainerSettings):
    """Options of supervised fine-tuning.

    `rows_per_step` rows make one update (a demonstration is one row, or several where a turn does
    not go on from the one before). Only what the assistant wrote is trained on. `max_updates`
    ends the run early; None trains all of `num_iterations`.
    """

    consumes: ClassVar[frozenset[str]] = frozenset({"demonstrations"})
    name: ClassVar[str] = "sft"

    rows_per_step: int = field(default=8, validator=validators.gt(0))
    max_updates: int | None = field(default=None, validator=validators.optional(validators.gt(0)))
    shuffle: bool = True

    def train(self, run: Run) -> TrainResult:
        """Train `run.policy` on `run.data` (demonstrations and rollouts)."""
        from .trainer import train_sft

        started = time.monotonic()
        steps, metrics = train_sft(self, run)
        return TrainResult(
            algorithm=self.name,
            updates=steps,
            steps=steps,
            metrics=metrics,
            warnings=tuple(run.warnings),
            run_dir=run.directory.path,
            seconds=time.monotonic() - started,
        )
