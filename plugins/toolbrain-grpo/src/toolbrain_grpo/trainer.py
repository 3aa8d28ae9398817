"""TRL's `GRPOTrainer` on our rollouts: the only module that touches its private methods.

TRL keeps its loss (`_compute_loss`); ours are the rollouts, the rows, the advantages, the forward
pass and the loop over micro-batches. Checked against trl 1.16.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from attrs import evolve
from datasets import Dataset
from toolbrain_transformers.policy import TransformersPolicy
from toolbrain_transformers.settings import trainer_arguments
from toolbrain_transformers.trainers import JournalCallback, raise_not_finite, run_trainer
from torch.utils.data import DataLoader
from trl import GRPOConfig, GRPOTrainer

from toolbrain_core.errors import NotServed
from toolbrain_core.runs import MARKER, Run
from toolbrain_core.traces import Group, Sampling, Trace

from .advantages import advantages_of, has_signal, score_of, why_no_signal
from .algorithm import Grpo, Step, schedule_of
from .batches import WeightedRow, micro_batches, tensors, trained_tokens
from .reference import reference_of

#: TRL fields that our rollouts, rows or forward pass replace.
_OWNED = {
    "num_generations": "attempts=",
    "generation_batch_size": "tasks_per_step=",
    "steps_per_generation": "updates_per_batch=",
    "num_iterations": "updates_per_batch=",
    "max_completion_length": "max_new_tokens=",
    "temperature": "temperature=",
    "loss_type": "loss_type=",
    "beta": "beta=",
    "epsilon": "epsilon=",
    "epsilon_high": "epsilon_high=",
    "scale_rewards": "scale_rewards=",
    "shuffle_dataset": "shuffle=",
    "mask_truncated_completions": "a reward that looks at trace.turns[-1].finish_reason",
    "reward_weights": "a composed reward_func",
    "multi_objective_aggregation": "a composed reward_func",
    "vllm_importance_sampling_clip_max": "importance_cap=",
    **dict.fromkeys(
        (
            "top_p",
            "top_k",
            "min_p",
            "repetition_penalty",
            "generation_kwargs",
            "cache_implementation",
        ),
        "nothing: training samples from the whole distribution",
    ),
    **dict.fromkeys(
        (
            "use_vllm",
            "vllm_mode",
            "vllm_importance_sampling_correction",
            "vllm_importance_sampling_mode",
        ),
        "a sampler plugin",
    ),
    **dict.fromkeys(
        ("chat_template_kwargs", "max_tool_calling_iterations", "log_completions"),
        "the agent and the run directory, which have these",
    ),
    **dict.fromkeys(
        ("cast_lm_head_to_fp32", "use_liger_kernel", "sync_ref_model", "disable_dropout"),
        "nothing: not served here",
    ),
}

#: Loss types that average over rows, not over the batch's tokens, and so need a weight per piece.
_ROW_MEANS = frozenset({"grpo", "sapo", "luspo", "dr_grpo"})


def train_grpo(settings: Grpo, run: Run) -> RolloutTrainer:
    """Run the whole training; the trainer that is returned has its figures."""
    policy = run.policy
    if not isinstance(policy, TransformersPolicy):
        raise NotServed(f"grpo trains a TransformersPolicy, not a {type(policy).__name__}")
    with policy.training() as model, reference_of(policy, settings, run) as reference:
        trainer = RolloutTrainer(settings, run, policy, model, reference)
        run_trainer(trainer, run, policy)
    if not trainer.updates:
        trainer.no_signal = why_no_signal(trainer.seen, settings.on_error)
        run.warn(f"nothing was learned: {trainer.no_signal}")
    return trainer


def _no_reward(**_: Any) -> list[float]:
    raise AssertionError("rewards are computed by the rollouts")


class RolloutTrainer(GRPOTrainer):  # type: ignore[misc]
    """GRPO whose batches are rollouts of the user's agent.

    One dataloader item is one optimiser step.
    """

    def __init__(
        self, settings: Grpo, run: Run, policy: TransformersPolicy, model: Any, reference: Any
    ):
        self.settings = settings
        self.run = run
        self.policy = policy
        self.reference = reference
        self.schedule = schedule_of(settings, run.data, run.seed)
        self._skipped = _skipped_before(run)
        self.no_signal: str | None = None
        self.last_metrics: dict[str, Any] = {}
        self.seen: list[Group] = []
        self._pieces: list[dict[str, Any]] | None = None  # None: no rollouts yet
        self._live: dict[str, Any] | None = None  # the piece whose loss is being computed
        self._figures: dict[str, Any] = {}
        run.total_steps = len(self.schedule)
        super().__init__(
            model=model,
            reward_funcs=_no_reward,
            args=self._arguments(),
            train_dataset=Dataset.from_dict(
                {"prompt": [str(i) for i in range(len(self.schedule))]}
            ),
            processing_class=policy.tokenizer,
            callbacks=[JournalCallback(run, self._step_figures, settings.keep_checkpoints)],
        )
        self.beta = settings.beta  # after __init__, which would build a reference of its own

    @property
    def updates(self) -> int:
        """Finished steps that changed the weights."""
        return int(self.state.global_step) - self._skipped

    def _arguments(self) -> GRPOConfig:
        settings = self.settings
        return trainer_arguments(
            settings,
            GRPOConfig,
            _OWNED,
            output_dir=str(self.run.directory.checkpoints),
            max_steps=len(self.schedule),
            seed=self.run.seed,
            use_cpu=self.policy.ref.model.device.type == "cpu",
            num_generations=settings.attempts,
            per_device_train_batch_size=settings.attempts,
            steps_per_generation=1,
            num_iterations=settings.updates_per_batch,
            temperature=settings.temperature,
            max_completion_length=self._max_new_tokens(),
            loss_type=settings.loss_type,
            beta=0.0,
            epsilon=settings.epsilon,
            epsilon_high=settings.epsilon_high,
            scale_rewards=settings.scale_rewards,
            disable_dropout=True,
        )

    def _max_new_tokens(self) -> int:
        return self.settings.max_new_tokens or self.policy.own_sampling().max_new_tokens

    def create_model_card(self, *_: Any, **__: Any) -> None:
        """None: a checkpoint is no model to publish, and the run directory says more."""

    def get_train_dataloader(self) -> DataLoader[Any]:
        """One schedule entry per item, in order; Trainer skips what a resumed run has done."""
        return DataLoader(range(len(self.schedule)), batch_size=1, collate_fn=lambda items: items)  # type: ignore[arg-type]

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        """One optimiser step's gradients: rollouts (or the last batch again), then the loss in
        micro-batches. A batch without signal leaves no gradients, so the step changes nothing."""
        step = self.schedule[inputs[0]]
        if step.repeat == 0 or self._pieces is None:
            model.eval()
            self._pieces = self._collect(step)
        model.train()
        total = torch.zeros((), device=self.accelerator.device)
        for index, piece in enumerate(self._pieces):
            last = index == len(self._pieces) - 1
            with nullcontext() if last else self.accelerator.no_sync(model):
                total += self._backward(model, piece)
        self._skipped += not self._pieces
        self._figures["loss"] = float(total) if self._pieces else None
        return total

    def _backward(self, model: Any, piece: dict[str, Any]) -> Any:
        loss = self._piece_loss(model, piece) * piece["weight"]
        if not torch.isfinite(loss):
            raise_not_finite("loss", self.state.global_step + 1)
        self.accelerator.backward(loss)
        return loss.detach()

    def _piece_loss(self, model: Any, piece: dict[str, Any]) -> Any:
        """TRL's loss of one piece. `use_vllm` makes it apply the truncated importance weight,
        which `_get_per_token_logps_and_entropies` fills in."""
        self._live, self.use_vllm = piece, True
        try:
            return self._compute_loss(model, piece)
        finally:
            self._live, self.use_vllm = None, False

    def _get_per_token_logps_and_entropies(
        self,
        model: Any,
        input_ids: Any,
        attention_mask: Any,
        logits_to_keep: int,
        *_: Any,
        **__: Any,
    ) -> tuple[Any, Any, None]:
        """(rows, logits_to_keep) log-probabilities and entropies of the policy's own tokens.

        TRL's padded inputs are passed by: the piece has a forward pass of its own.
        """
        piece = self._live or {}
        with self.policy.autocast():
            scores = piece["forward"].score(
                model, self.settings.temperature, entropy_gradient=self._entropy_bonus_enabled
            )
        logps = _spread(piece, scores.logprobs)
        self._weigh(piece, logps.detach())
        return logps, _spread(piece, scores.entropies), None

    def _weigh(self, piece: dict[str, Any], logps: Any) -> None:
        """At a batch's first pass: old log-probabilities are those of this forward, and the
        recorded ones give the truncated importance weight and its metrics."""
        if "importance_sampling_ratio" in piece:
            return
        mask = piece["completion_mask"] * piece["tool_mask"]
        difference = (logps - piece["sampled_logps"]) * mask  # (rows, completion tokens)
        ratio = difference.exp().clamp(max=self.settings.importance_cap)
        piece["importance_sampling_ratio"] = ratio
        piece["old_per_token_logps"] = logps
        gap = difference.abs()
        self._figures["logprob_difference_max"] = max(
            self._figures.get("logprob_difference_max", 0.0), float(gap.max())
        )
        self._figures["logprob_difference_mean"] = self._figures.get(
            "logprob_difference_mean", 0.0
        ) + float(gap.sum() / piece["num_items_in_batch"])

    def _collect(self, step: Step) -> list[dict[str, Any]]:
        """Rollouts, advantages, rows: the pieces of one batch, none where nothing teaches."""
        groups = self._rollouts(step)
        teaching = [g for g in groups if has_signal(self._scores(g))]
        if not self.updates:  # to say why, should it stay so
            self.seen += [] if teaching else map(_without_turns, groups)
        weighted = self._weighted_rows(teaching)
        self._figures = self._batch_figures(groups, teaching, weighted)
        pieces = micro_batches(weighted, self.settings.max_tokens_per_step, self.policy.cost_of)
        return [] if not pieces else self._pieces_of(pieces)

    def _rollouts(self, step: Step) -> list[Group]:
        """The step's groups; those without signal are sampled again up to `resample` times."""
        sampling = Sampling(
            temperature=self.settings.temperature, max_new_tokens=self._max_new_tokens()
        )
        groups: dict[str, Group] = {}
        for again in range(self.settings.resample + 1):
            tasks = [
                task
                for task in step.tasks
                if task.id not in groups or not has_signal(self._scores(groups[task.id]))
            ]
            if not tasks:
                break
            fresh = self.run.rollout(
                tasks,
                self.settings.attempts,
                step=self.state.global_step + 1,
                iteration=step.iteration,
                sampling=sampling,
                first_attempt=again * self.settings.attempts,  # other numbers, other seeds
            )
            groups.update({group.task.id: group for group in fresh})
        return [groups[task.id] for task in step.tasks]

    def _scores(self, group: Group) -> list[float | None]:
        return [score_of(r, self.settings.on_error) for r in group.rollouts]

    def _weighted_rows(self, groups: Sequence[Group]) -> list[list[WeightedRow]]:
        settings = self.settings
        table = advantages_of(groups, settings.scale_rewards, settings.on_error)
        return [
            [
                WeightedRow(row, advantage)
                for rollout, advantage in zip(group.rollouts, advantages, strict=True)
                if advantage is not None
                for row in self.policy.rows(rollout.trace)
            ]
            for group, advantages in zip(groups, table, strict=True)
        ]

    def _pieces_of(self, pieces: list[list[WeightedRow]]) -> list[dict[str, Any]]:
        rows = sum(map(len, pieces))
        tokens = sum(map(trained_tokens, pieces))
        total = torch.tensor(float(tokens), device=self.accelerator.device)
        batch = []
        for piece in pieces:
            share = 1.0
            if self.settings.loss_type in _ROW_MEANS:
                share = len(piece) / rows
            elif self.settings.loss_type == "bnpo":
                share = trained_tokens(piece) / tokens
            columns = tensors(piece, self.policy.tokenizer.pad_token_id, self.accelerator.device)
            columns["forward"] = self.policy.forward_of([weighted.row for weighted in piece])
            batch.append({**columns, "num_items_in_batch": total, "weight": share})
        if self.reference is not None:
            for columns in batch:
                columns["ref_per_token_logps"] = self._reference_logps(columns)
        return batch

    def _reference_logps(self, columns: dict[str, Any]) -> Any:
        model, context = self.reference(self.model)
        with torch.no_grad(), context, self.policy.autocast():
            scores = columns["forward"].score(model, self.settings.temperature)
        return _spread(columns, scores.logprobs)

    def _batch_figures(
        self,
        groups: Sequence[Group],
        teaching: Sequence[Group],
        weighted: Sequence[Sequence[WeightedRow]],
    ) -> dict[str, float]:
        rollouts = [r for g in groups for r in g.rollouts]
        scores = [s for r in rollouts if (s := score_of(r, "mask")) is not None]
        turns = [t for r in rollouts for t in r.trace.turns]
        traces = sum(1 for g in teaching for s in self._scores(g) if s is not None)
        rows = [row for group in weighted for row in group]
        mean = sum(scores) / len(scores) if scores else float("nan")
        variance = sum((s - mean) ** 2 for s in scores) / len(scores) if scores else float("nan")
        return {
            "reward_mean": mean,
            "reward_std": variance**0.5,
            "groups": len(groups),
            "groups_with_signal": len(teaching),
            "attempts_masked": len(rollouts) - len(scores),
            "turns": len(turns) / max(1, len(rollouts)),
            "turns_continued": sum(t.row_break is None for t in turns),
            "turns_broken": sum(t.row_break not in (None, "first") for t in turns),
            "rows": len(rows),
            "rows_per_trace": len(rows) / max(1, traces),
            "tokens": float(sum(len(r.row.ids) for r in rows)),
            "trained_tokens": float(trained_tokens(rows)),
        }

    def _step_figures(self) -> dict[str, Any]:
        self.last_metrics = {**self._figures, "updates": self.updates}
        return self.last_metrics


def _spread(piece: dict[str, Any], values: Any) -> Any:
    """(rows, completion tokens): one value per trained token, row by row; zeros elsewhere."""
    mask = (piece["completion_mask"] * piece["tool_mask"]).bool()
    return values.new_zeros(mask.shape).masked_scatter(mask, values)


def _skipped_before(run: Run) -> int:
    """Steps without an update that a resumed run had made when its checkpoint was written."""
    if run.resume_from is None:
        return 0
    marker = json.loads((run.resume_from / MARKER).read_text(encoding="utf-8"))
    return int(marker["step"]) - int(marker["metrics"]["updates"])


def _without_turns(group: Group) -> Group:
    """The group without its tokens: how its attempts ended, and their scores."""
    rollouts = (evolve(r, trace=Trace(error=r.trace.error)) for r in group.rollouts)
    return evolve(group, rollouts=tuple(rollouts))
