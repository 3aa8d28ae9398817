"""TRL's `SFTTrainer` on rows that are tokenised already: rows in are rows trained."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from datasets import Dataset
from toolbrain_transformers.demonstrations import demonstration_rows
from toolbrain_transformers.policy import TransformersPolicy
from toolbrain_transformers.settings import trainer_arguments
from toolbrain_transformers.trainers import JournalCallback, raise_not_finite, run_trainer
from trl import SFTConfig, SFTTrainer

from toolbrain_core.errors import NotServed
from toolbrain_core.roles import Row
from toolbrain_core.runs import Run

from .algorithm import Sft

#: TRL fields that our rows replace.
_OWNED = {
    **dict.fromkeys(
        (
            "max_length",
            "truncation_mode",
            "packing",
            "packing_strategy",
            "padding_free",
            "completion_only_loss",
            "assistant_only_loss",
            "dataset_text_field",
            "dataset_kwargs",
            "chat_template_path",
            "eos_token",
            "pad_token",
            "shuffle_dataset",
        ),
        "the rows, which are tokenised already",
    ),
    "use_liger_kernel": "nothing: not served here",
}


def train_sft(settings: Sft, run: Run) -> tuple[int, dict[str, Any]]:
    """Run the whole training. Returns updates and the last step's metrics."""
    policy = run.policy
    if not isinstance(policy, TransformersPolicy):
        raise NotServed(f"sft trains a TransformersPolicy, not a {type(policy).__name__}")
    rows = [row for item in run.data for row in demonstration_rows(policy, item)]
    with policy.training() as model:
        trainer = RowTrainer(settings, run, policy, model, rows)
        run_trainer(trainer, run, policy)
    return trainer.state.global_step, trainer.last_metrics


class RowTrainer(SFTTrainer):  # type: ignore[misc]
    """SFT under the policy's autocast, with a journal and a check of every loss."""

    def __init__(
        self, settings: Sft, run: Run, policy: TransformersPolicy, model: Any, rows: Sequence[Row]
    ):
        self.settings = settings
        self.run = run
        self.policy = policy
        self.last_metrics: dict[str, Any] = {}
        self._rows = rows
        longest = max(len(row.ids) for row in rows)
        pieces = _pieces(settings.rows_per_step, longest, settings.max_tokens_per_step)
        steps = settings.num_iterations * math.ceil(len(rows) / settings.rows_per_step)
        run.total_steps = min(steps, settings.max_updates or steps)
        arguments = trainer_arguments(
            settings,
            SFTConfig,
            _OWNED,
            output_dir=str(run.directory.checkpoints),
            num_train_epochs=settings.num_iterations,
            max_steps=settings.max_updates or -1,
            seed=run.seed,
            use_cpu=policy.ref.model.device.type == "cpu",
            per_device_train_batch_size=settings.rows_per_step // pieces,
            gradient_accumulation_steps=pieces,
            max_length=None,
            packing=False,
            train_sampling_strategy="random" if settings.shuffle else "sequential",
        )
        columns = {
            "input_ids": [list(row.ids) for row in rows],
            "labels": [_labels(row) for row in rows],
        }
        super().__init__(
            model=model,
            args=arguments,
            train_dataset=Dataset.from_dict(columns),
            processing_class=policy.tokenizer,
            callbacks=[JournalCallback(run, self._step_figures, settings.keep_checkpoints)],
        )
        if len(self.train_dataset) != len(rows):
            raise AssertionError(f"{len(rows)} rows in, {len(self.train_dataset)} in the trainer")

    def create_model_card(self, *_: Any, **__: Any) -> None:
        """None: a checkpoint is no model to publish, and the run directory says more."""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """The loss under the policy's autocast: over the rows' prefix tree where the model can
        serve it, else TRL's. Errors: TrainingError where it is not finite."""
        with self.policy.autocast():
            if self.policy.tree and self.args.loss_type == "nll" and not return_outputs:
                outcome = self._tree_loss(model, inputs, num_items_in_batch)
            else:
                outcome = super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        loss = outcome[0] if isinstance(outcome, tuple) else outcome
        if not torch.isfinite(loss):
            raise_not_finite("loss", self.state.global_step + 1)
        return outcome

    def _tree_loss(self, model: Any, inputs: Any, num_items_in_batch: Any) -> Any:
        """Mean negative log-probability of the labels, prompts that rows share computed once."""
        rows = [
            _row_of(ids[mask.bool()].tolist(), labels[mask.bool()].tolist())
            for ids, mask, labels in zip(
                inputs["input_ids"], inputs["attention_mask"], inputs["labels"], strict=True
            )
        ]
        logprobs = self.policy.forward_of(rows).score(model).logprobs
        tokens = len(logprobs) if num_items_in_batch is None else num_items_in_batch
        # `num_items_in_batch` counts every rank's tokens, and DDP averages the ranks' gradients.
        ranks = 1 if num_items_in_batch is None else self.accelerator.num_processes
        return -logprobs.sum() * ranks / tokens

    def _step_figures(self) -> dict[str, Any]:
        tokens = sum(sum(row.trained) for row in self._rows)
        figures = {"rows": len(self._rows), "trained_tokens": tokens}
        logged = self.state.log_history[-1] if self.state.log_history else {}
        self.last_metrics = {**figures, "loss": logged.get("loss")}
        return figures


def _labels(row: Row) -> list[int]:
    return [token if trained else -100 for token, trained in zip(row.ids, row.trained, strict=True)]


def _row_of(ids: list[int], labels: list[int]) -> Row:
    trained = tuple(label != -100 for label in labels)
    return Row(tuple(ids), trained, (0.0,) * len(ids), (-1,) * len(ids))


def _pieces(rows: int, longest: int, max_tokens: int) -> int:
    """The fewest equal pieces of a step whose padded rows stay within `max_tokens`, or one row
    each."""
    divisors = [n for n in range(1, rows + 1) if rows % n == 0]
    return next((n for n in divisors if rows // n * longest <= max_tokens), rows)
