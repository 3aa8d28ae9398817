"""What every algorithm on a TRL trainer does alike: journal, checkpoints, checks, interrupts."""

from __future__ import annotations

import logging
import math
import shutil
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import PrinterCallback, TrainerCallback

from toolbrain_core.errors import RunDirectoryError, SamplerFailure, TrainingError
from toolbrain_core.runs import Run

from .policy import TransformersPolicy

log = logging.getLogger(__name__)

#: Keys of a trainer's log that the journal has already, or that say nothing.
_DROPPED = {"epoch", "num_tokens", "total_flos", "train_runtime", "train_loss"}


class JournalCallback(TrainerCallback):
    """Writes a trainer's metrics and checkpoints into the run, and stops it when asked.

    `extra` is called with the step for metrics beyond the trainer's own. The newest `keep`
    checkpoints stay: Trainer's own rotation removes old ones before the new one is marked complete.
    """

    def __init__(self, run: Run, extra: Callable[[], Mapping[str, Any]] = dict, keep: int = 2):
        self.run = run
        self.extra = extra
        self.keep = keep
        self.since = time.monotonic()

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Stop before the step where a gradient is not finite."""
        gradients = [p.grad for p in kwargs["model"].parameters() if p.grad is not None]
        if gradients and not math.isfinite(float(torch.nn.utils.get_total_norm(gradients))):
            raise_not_finite("gradient", state.global_step + 1)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if logs and "loss" in logs:
            now = time.monotonic()
            metrics = {k: v for k, v in logs.items() if k not in _DROPPED}
            seconds = {"seconds": round(now - self.since, 3)}
            self.since = now
            self.run.record(state.global_step, {**metrics, **seconds, **self.extra()})

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.run.stop.is_set():
            control.should_training_stop = True

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        path = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        self.run.checkpoint_saved(path, state.global_step, {"metrics": dict(self.extra())})
        if self.run.rank == 0:
            self.run.directory.keep_newest_checkpoints(self.keep)


class _OptimizerWatch(TrainerCallback):
    """Knows when the weights are those of the trainer's present step, and not half of the next."""

    weights_whole = True

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.weights_whole = False

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.weights_whole = True


def raise_not_finite(what: str, step: int) -> None:
    """Errors: `TrainingError` that names the step."""
    raise TrainingError(
        f"the {what} of step {step} is not finite; the weights were not changed by it. Lower "
        "learning_rate, or use dtype='fp32'."
    )


def run_trainer(trainer: Any, run: Run, policy: TransformersPolicy) -> None:
    """Train to the end, from the run's checkpoint where it resumes one.

    A checkpoint is written at the end, also of a run that was interrupted (`KeyboardInterrupt`
    goes on upwards), unless that was in the middle of an optimiser's step, and of one that cannot
    go on, if its weights are finite.
    Errors: `TrainingError`, `SamplerFailure` that name the last good checkpoint;
    `RunDirectoryError` for one that cannot be written.
    """
    trainer.remove_callback(PrinterCallback)
    watch = _OptimizerWatch()
    trainer.add_callback(watch)
    _write_checkpoints_in_words(trainer, run)
    resume = str(run.resume_from) if run.resume_from else None
    try:
        trainer.train(resume_from_checkpoint=resume)
    except (TrainingError, SamplerFailure) as error:
        if all(bool(p.isfinite().all()) for p in trainer.model.parameters()):
            save_checkpoint(trainer, run)
        latest = run.directory.latest_checkpoint()
        kept = f"The last good checkpoint is {latest[0]}." if latest else "There is no checkpoint."
        if isinstance(error, SamplerFailure):
            kept += " Train again with resume=True, once the sampler works."
        raise type(error)(f"{error} {kept}") from error
    except KeyboardInterrupt:
        if run.stop.is_set() and watch.weights_whole:
            save_checkpoint(trainer, run)
        raise
    save_checkpoint(trainer, run)
    if run.stop.is_set():
        raise KeyboardInterrupt


def _write_checkpoints_in_words(trainer: Any, run: Run) -> None:
    """Where a checkpoint cannot be written: remove what there is of it, and say so."""
    write = trainer._save_checkpoint

    def save(*args: Any, **kwargs: Any) -> None:
        try:
            write(*args, **kwargs)
        except Exception as error:  # safetensors, tokenizers and torch have each their own
            path = run.directory.checkpoints / f"checkpoint-{trainer.state.global_step}"
            shutil.rmtree(path, ignore_errors=True)
            latest = run.directory.latest_checkpoint()
            kept = f"the last good checkpoint is {latest[0]}" if latest else "there is none before"
            raise RunDirectoryError(
                f"cannot write the checkpoint {path}: {' '.join(str(error).split())}; {kept}. Make "
                "room (or the folder writable), then train again with resume=True"
            ) from error

    trainer._save_checkpoint = save


def save_checkpoint(trainer: Any, run: Run) -> None:
    """Write a complete checkpoint of the trainer's present step, unless there is one."""
    step = trainer.state.global_step
    latest = run.directory.latest_checkpoint()
    if step and (latest is None or latest[1] < step):
        trainer._save_checkpoint(trainer.model, trial=None)
        trainer.callback_handler.on_save(trainer.args, trainer.state, trainer.control)
