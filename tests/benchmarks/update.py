"""The update: loss and gradients of one group, by us and by TRL's stock GRPOTrainer.

    python tests/benchmarks/update.py [--prompt 1500] [--group 8] [--new 60] [--dtype fp32|bf16]
                                      [--checkpointing] [--full] [--errors] [--trl-rows 2]
                                      [--repeats 3]

Both compute the reference's log-probabilities, the loss and its gradients, for the same model, rows
and old log-probabilities, which are perturbed: at ratio 1 the loss says nothing. The policy is a
LoRA of rank 16 on all linear layers whose weights are not those it began with, or with `--full` the
whole model; `beta` is 0.05. TRL accumulates gradients over passes of `trl-rows` rows: in fp32, four
of the default length were killed at 20 GB. `max_relative_difference` is the largest difference of a
gradient tensor between the two, by norm. `--errors` adds those of each to a plain float64
implementation, as root mean squares over the repeats, each of which has a batch of its own; tensors
whose norm is below 1e-12 are compared absolutely.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sides import Measure, Side, measured_in_turn, ours_against, parser, run, running


def main() -> None:
    run(parse(), SIDES, compare)


def parse() -> argparse.Namespace:
    made = parser(__doc__ or "")
    made.add_argument("--prompt", type=int, default=1500, help="tokens of the prompt")
    made.add_argument("--group", type=int, default=8, help="attempts, a row each")
    made.add_argument("--new", type=int, default=60, help="sampled tokens of each row")
    made.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32")
    made.add_argument("--checkpointing", action="store_true", help="recompute activations")
    made.add_argument("--full", action="store_true", help="train all weights, without LoRA")
    made.add_argument("--errors", action="store_true", help="compare with float64 too")
    made.add_argument("--trl-rows", type=int, default=2, help="rows in one pass of TRL's")
    options = made.parse_args()
    options.trl_rows = min(options.trl_rows, options.group)
    if options.group % options.trl_rows:
        made.error(f"--group must be a multiple of --trl-rows ({options.trl_rows})")
    return options


def compare(options: argparse.Namespace) -> dict[str, Any]:
    names = ("prompt", "group", "new", "dtype", "checkpointing", "full", "trl_rows")
    shapes = {key: getattr(options, key) for key in names}
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        sides = [Side("ours", directory), Side("trl", directory)]
        with running(*sides):
            measured = measured_in_turn(sides, options.repeats)
        if options.errors:
            exact = Side("exact", directory)
            with running(exact):
                measured_in_turn([exact], options.repeats)

        from exactness import errors, worst_difference  # brings torch: not beside the sides

        line = {
            "name": "update",
            **shapes,
            **ours_against(["trl"], measured),
            "max_relative_difference": worst_difference(directory, options.repeats),
            "sides": measured,
        }
        return {**line, "errors": errors(directory, options.repeats)} if options.errors else line


def ours(options: argparse.Namespace) -> Measure:
    import torch
    from batches import BETA, EPSILON, EPSILON_HIGH, perturbed, weighted_rows
    from policies import LORA, backward_of, grpo_trainer, load_policy
    from toolbrain_grpo.algorithm import Grpo
    from toolbrain_grpo.batches import micro_batches

    policy = load_policy(options.dtype, None if options.full else LORA)
    settings = Grpo(
        attempts=options.group,
        beta=BETA,
        epsilon=EPSILON,
        epsilon_high=EPSILON_HIGH,
        gradient_checkpointing=options.checkpointing,
    )
    trainer = grpo_trainer(policy, settings, options.directory)
    shape = (options.prompt, options.group, options.new)

    def measure(repeat: int) -> dict[str, float]:
        rows = weighted_rows(policy.tokenizer, *shape, repeat)
        with torch.no_grad():
            forward = policy.forward_of([weighted.row for weighted in rows])
            logps = forward.score(policy.model).logprobs.view(options.group, options.new)
        old = perturbed(logps)
        torch.save(old, options.directory / f"old-{repeat}.pt")
        number = {id(weighted): i for i, weighted in enumerate(rows)}

        def loss_and_gradients() -> float:
            batches = micro_batches([rows], settings.max_tokens_per_step, policy.cost_of)
            pieces = trainer._pieces_of(batches)
            for piece, batch in zip(pieces, batches, strict=True):
                piece["old_per_token_logps"] = old[[number[id(weighted)] for weighted in batch]]
                piece["importance_sampling_ratio"] = torch.ones_like(piece["old_per_token_logps"])
            return backward_of(trainer, pieces)

        return timed(options, repeat, policy.model, loss_and_gradients, lambda: logps)

    return measure


def trl(options: argparse.Namespace) -> Measure:
    import torch
    from batches import BETA, EPSILON, EPSILON_HIGH, weighted_rows
    from datasets import Dataset
    from peft import LoraConfig
    from policies import LORA, load_base, shake
    from toolbrain_grpo.batches import tensors
    from trl import GRPOConfig, GRPOTrainer
    from trl.models.utils import disable_gradient_checkpointing
    from trl.trainer.utils import split_tensor_dict, use_adapter

    base, tokenizer = load_base(options.dtype)
    passes = options.group // options.trl_rows
    arguments: Any = GRPOConfig(
        output_dir=str(options.directory / "trl"),
        use_cpu=True,
        bf16=False,  # autocast; the model is loaded in its dtype
        per_device_train_batch_size=options.trl_rows,
        gradient_accumulation_steps=passes,
        num_generations=options.group,
        max_completion_length=options.new,
        beta=BETA,
        epsilon=EPSILON,
        epsilon_high=EPSILON_HIGH,
        gradient_checkpointing=options.checkpointing,
        report_to="none",
    )
    lora = LoraConfig(
        r=LORA.r,
        lora_alpha=int(LORA.alpha),
        lora_dropout=0.0,
        target_modules="all-linear",
        task_type="CAUSAL_LM",
    )
    trainer: Any = GRPOTrainer(
        model=base,
        reward_funcs=lambda **_: [],
        args=arguments,
        train_dataset=Dataset.from_dict({"prompt": ["benchmark"]}),
        processing_class=tokenizer,
        peft_config=None if options.full else lora,
    )
    trainer.current_gradient_accumulation_steps = passes
    if options.checkpointing:
        trainer.model.activation_checkpointing_enable()
    shake(trainer.model)

    def score(batch: dict[str, Any], model: Any = trainer.model) -> Any:
        """(rows, new) log-probabilities by TRL's own forward pass."""
        ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1)
        mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1)
        with torch.no_grad():
            return trainer._get_per_token_logps_and_entropies(
                model, ids, mask, options.new, batch_size=options.trl_rows
            )[0]

    def reference(batch: dict[str, Any]) -> Any:
        """As in `_generate_and_score_completions`."""
        with disable_gradient_checkpointing(trainer.model, arguments.gradient_checkpointing_kwargs):
            if trainer.ref_model is not None:
                return score(batch, trainer.ref_model)
            with use_adapter(trainer.model, adapter_name=None):
                return score(batch)

    def measure(repeat: int) -> dict[str, float]:
        shape = (options.prompt, options.group, options.new)
        rows = weighted_rows(tokenizer, *shape, repeat)
        batch = tensors(rows, tokenizer.pad_token_id, trainer.accelerator.device)
        batch["num_items_in_batch"] = batch["completion_mask"].sum()
        batch["old_per_token_logps"] = torch.load(options.directory / f"old-{repeat}.pt")

        def loss_and_gradients() -> float:
            batch["ref_per_token_logps"] = reference(batch)
            trainer.model.train()
            total = 0.0
            for part in split_tensor_dict(batch, passes):
                loss = trainer._compute_loss(trainer.model, part)
                trainer.accelerator.backward(loss)
                total += float(loss.detach())
            return total

        return timed(options, repeat, trainer.model, loss_and_gradients, lambda: score(batch))

    return measure


def timed(
    options: argparse.Namespace,
    repeat: int,
    model: Any,
    loss_and_gradients: Callable[[], float],
    logps: Callable[[], Any],
) -> dict[str, float]:
    """One measurement; its results are kept to be compared."""
    from exactness import keep

    started = time.perf_counter()
    loss = loss_and_gradients()
    seconds = time.perf_counter() - started
    keep(options.directory, options.side, repeat, model, loss, logps())
    model.zero_grad(set_to_none=True)
    return {"seconds": seconds, "loss": loss}


def exact(options: argparse.Namespace) -> Measure:
    """Float64; not to be timed."""
    import copy

    import torch
    from batches import weighted_rows
    from exactness import Plain
    from policies import LORA, load_policy, shake

    policy = load_policy(options.dtype, None if options.full else LORA)
    reference = copy.deepcopy(policy.model) if options.full else None
    shake(policy.model)
    plain = Plain.of(policy.model, reference)

    def measure(repeat: int) -> dict[str, float]:
        shape = (options.prompt, options.group, options.new)
        rows = weighted_rows(policy.tokenizer, *shape, repeat)
        old = torch.load(options.directory / f"old-{repeat}.pt")
        logps: list[Any] = []

        def loss_and_gradients() -> float:
            loss, scores = plain.loss_and_logps(rows, old)
            logps.append(scores)
            return loss

        return timed(options, repeat, policy.model, loss_and_gradients, logps.pop)

    return measure


SIDES = {"ours": ours, "trl": trl, "exact": exact}

if __name__ == "__main__":
    main()
