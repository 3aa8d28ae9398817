"""The update: loss and gradients of one group, by us and by TRL's stock GRPOTrainer.

    python tests/benchmarks/update.py [--prompt 1500] [--group 8] [--new 60] [--dtype fp32|bf16]
                                      [--checkpointing] [--full] [--errors] [--repeats 3]

Both compute the reference's log-probabilities, the loss and its gradients, for the same model, rows
and old log-probabilities, which are perturbed: at ratio 1 the loss says nothing. The policy is a
LoRA of rank 16 on all linear layers whose weights are not those it began with, or with `--full` the
whole model; `beta` is 0.05. `max_relative_difference` is the largest difference of a gradient
tensor between the two, by norm. `--errors` adds those of each to a plain float64 implementation,
row by row; tensors whose norm is below 1e-12 are compared absolutely.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from prompts import prompt_ids, text_ids
from sides import Measure, Side, measured_in_turn, ours_against, parser, running, serve

BETA, EPSILON, EPSILON_HIGH = 0.05, 0.2, 0.28
NEGLIGIBLE = 1e-12


def main() -> None:
    options = parse()
    if options.side:
        serve(partial(SIDES[options.side], options))
    else:
        print(json.dumps(compare(options)))


def parse() -> argparse.Namespace:
    made = parser(__doc__ or "")
    made.add_argument("--prompt", type=int, default=1500, help="tokens of the prompt")
    made.add_argument("--group", type=int, default=8, help="attempts, a row each")
    made.add_argument("--new", type=int, default=60, help="sampled tokens of each row")
    made.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32")
    made.add_argument("--checkpointing", action="store_true", help="recompute activations")
    made.add_argument("--full", action="store_true", help="train all weights, without LoRA")
    made.add_argument("--errors", action="store_true", help="compare with float64 too")
    return made.parse_args()


def compare(options: argparse.Namespace) -> dict[str, Any]:
    names = ("prompt", "group", "new", "dtype", "checkpointing", "full")
    shapes = {key: getattr(options, key) for key in names}
    with tempfile.TemporaryDirectory() as directory:
        sides = [Side(name, directory) for name in ("ours", "trl")]
        with running(*sides):
            measured = measured_in_turn(sides, options.repeats)
        line = {
            "name": "update",
            **shapes,
            **ours_against(["trl"], measured),
            "max_relative_difference": worst_difference(Path(directory)),
            "sides": measured,
        }
        if not options.errors:
            return line
        exact = Side("exact", directory)
        with running(exact):
            exact.measure(0)
        return {**line, "errors": errors(Path(directory))}


# The batch ------------------------------------------------------------------------------------


def weighted_rows(options: argparse.Namespace, tokenizer: Any) -> list[Any]:
    """The group's rows: one prompt, completions that differ from their first token on."""
    from toolbrain_grpo.batches import WeightedRow

    from toolbrain_core.roles import Row

    draw = random.Random(0)
    words, n = text_ids(tokenizer, 2000), options.new
    prompt = prompt_ids(tokenizer, options.prompt, 0)
    advantages = [draw.gauss(0, 1) for _ in range(options.group)]
    rows = []
    for advantage in advantages:
        ids = (*prompt, *draw.choices(words, k=n))
        trained = (False,) * options.prompt + (True,) * n
        turns = (-1,) * options.prompt + (0,) * n
        rows.append(WeightedRow(Row(ids, trained, (0.0,) * len(ids), turns), advantage))
    return rows


def perturbed(logps: Any) -> Any:
    """Old log-probabilities (rows, new): some ratios are clipped, on both sides."""
    import torch

    generator = torch.Generator().manual_seed(1)
    return logps + 0.2 * torch.randn(logps.shape, generator=generator)


# The sides ------------------------------------------------------------------------------------


def ours(options: argparse.Namespace) -> Measure:
    import torch
    from policies import LORA, backward_of, grpo_trainer, load_policy
    from toolbrain_grpo.algorithm import Grpo
    from toolbrain_grpo.batches import micro_batches

    policy = load_policy(options.dtype, None if options.full else LORA)
    rows = weighted_rows(options, policy.tokenizer)
    settings = Grpo(
        attempts=options.group,
        beta=BETA,
        epsilon=EPSILON,
        epsilon_high=EPSILON_HIGH,
        gradient_checkpointing=options.checkpointing,
    )
    trainer = grpo_trainer(policy, settings, options.directory)

    def score() -> Any:
        with torch.no_grad():
            forward = policy.forward_of([weighted.row for weighted in rows])
            return forward.score(policy.model).logprobs.view(options.group, options.new)

    old = perturbed(score())
    torch.save(old, options.directory / "old.pt")
    number = {id(weighted): i for i, weighted in enumerate(rows)}

    def loss_and_gradients() -> float:
        batches = micro_batches([rows], settings.max_tokens_per_step, policy.cost_of)
        pieces = trainer._pieces_of(batches)
        for piece, batch in zip(pieces, batches, strict=True):
            piece["old_per_token_logps"] = old[[number[id(weighted)] for weighted in batch]]
            piece["importance_sampling_ratio"] = torch.ones_like(piece["old_per_token_logps"])
        return backward_of(trainer, pieces)

    return partial(timed, options, policy.model, loss_and_gradients, score)


def trl(options: argparse.Namespace) -> Measure:
    import torch
    from datasets import Dataset
    from peft import LoraConfig
    from policies import LORA, load_base, shake
    from toolbrain_grpo.batches import tensors
    from trl import GRPOConfig, GRPOTrainer
    from trl.models.utils import disable_gradient_checkpointing
    from trl.trainer.utils import use_adapter

    base, tokenizer = load_base(options.dtype)
    arguments = GRPOConfig(
        output_dir=str(options.directory / "trl"),
        use_cpu=True,
        bf16=False,  # autocast; the model is loaded in its dtype
        per_device_train_batch_size=options.group,
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
    trainer.current_gradient_accumulation_steps = 1
    if options.checkpointing:
        trainer.model.activation_checkpointing_enable()
    shake(trainer.model)
    rows = weighted_rows(options, tokenizer)
    batch = tensors(rows, tokenizer.pad_token_id, trainer.accelerator.device)
    batch["num_items_in_batch"] = batch["completion_mask"].sum()
    ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1)
    mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1)

    def score(model: Any = trainer.model) -> Any:
        with torch.no_grad():
            return trainer._get_per_token_logps_and_entropies(
                model, ids, mask, options.new, batch_size=options.group
            )[0]

    def reference() -> Any:
        """As in `_generate_and_score_completions`."""
        with disable_gradient_checkpointing(trainer.model, arguments.gradient_checkpointing_kwargs):
            if trainer.ref_model is not None:
                return score(trainer.ref_model)
            with use_adapter(trainer.model, adapter_name=None):
                return score()

    def loss_and_gradients() -> float:
        old = torch.load(options.directory / "old.pt")
        inputs = {**batch, "old_per_token_logps": old, "ref_per_token_logps": reference()}
        trainer.model.train()
        loss = trainer._compute_loss(trainer.model, inputs)
        trainer.accelerator.backward(loss)
        return float(loss.detach())

    return partial(timed, options, trainer.model, loss_and_gradients, score)


def timed(
    options: argparse.Namespace, model: Any, loss_and_gradients: Any, score: Any, repeat: int
) -> dict[str, float]:
    """One measurement; the first one's results are kept to be compared."""
    started = time.perf_counter()
    loss = loss_and_gradients()
    seconds = time.perf_counter() - started
    if repeat == 0:
        keep(options, model, loss, score())
    model.zero_grad(set_to_none=True)
    return {"seconds": seconds, "loss": loss}


def keep(options: argparse.Namespace, model: Any, loss: float, logps: Any) -> None:
    import torch

    named = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    results = {"gradients": named, "loss": loss, "logps": logps}
    torch.save(results, options.directory / f"{options.side}.pt")


def exact(options: argparse.Namespace) -> Measure:
    """A plain implementation in float64, one row after the other."""
    import copy

    import torch
    from policies import LORA, load_policy, shake

    policy = load_policy(options.dtype, None if options.full else LORA)
    model = policy.model
    reference = copy.deepcopy(model).double() if options.full else model
    shake(model)
    for norm in [m for m in model.double().modules() if type(m).__name__ == "LlamaRMSNorm"]:
        norm.forward = partial(_rms_norm, norm)  # its own computes in float32
    for norm in [m for m in reference.modules() if type(m).__name__ == "LlamaRMSNorm"]:
        norm.forward = partial(_rms_norm, norm)

    def logps_of(scored: Any, ids: Any) -> Any:
        logits = scored(input_ids=ids, use_cache=False, logits_to_keep=options.new + 1).logits
        new = ids[0, -options.new :, None]
        return logits[0, :-1].log_softmax(-1).gather(1, new).squeeze(1)  # (new,)

    def reference_logps(ids: Any) -> Any:
        with torch.no_grad():
            if options.full:
                return logps_of(reference, ids)
            with model.disable_adapter():
                return logps_of(model, ids)

    def measure(repeat: int) -> dict[str, float]:
        old = torch.load(options.directory / "old.pt").double()
        started, loss, scores = time.perf_counter(), 0.0, []
        for weighted, old_logps in zip(weighted_rows(options, policy.tokenizer), old, strict=True):
            ids = torch.tensor([weighted.row.ids])
            logps = logps_of(model, ids)
            row_loss = plain_loss(logps, old_logps, reference_logps(ids), weighted.advantage)
            share = row_loss.sum() / (options.group * options.new)
            share.backward()
            loss += float(share.detach())
            scores.append(logps.detach())
        keep(options, model, loss, torch.stack(scores))
        return {"seconds": time.perf_counter() - started, "loss": loss}

    return measure


def _rms_norm(norm: Any, x: Any) -> Any:
    import torch

    return torch.nn.functional.rms_norm(x, norm.weight.shape, norm.weight, norm.variance_epsilon)


def plain_loss(logps: Any, old: Any, reference: Any, advantage: float) -> Any:
    """(new,) DAPO's loss (arXiv 2503.14476, eq. 8), and the k3 estimate of the KL divergence with
    the ratio as a factor (arXiv 2512.02556)."""
    import torch

    ratio = (logps - old).exp()
    clipped = ratio.clamp(1 - EPSILON, 1 + EPSILON_HIGH)
    gap = reference - logps
    kl = (gap.exp() - gap - 1) * ratio
    return -torch.min(ratio * advantage, clipped * advantage) + BETA * kl


SIDES = {"ours": ours, "trl": trl, "exact": exact}


# What they computed ---------------------------------------------------------------------------


def difference(value: Any, true: Any) -> float:
    """By norm, relative unless the norm of `true` is negligible."""
    size = float(true.double().norm())
    gap = float((value.double() - true.double()).norm())
    return gap / size if size >= NEGLIGIBLE else gap


def results_of(directory: Path, side: str) -> Mapping[str, Any]:
    import torch

    results: Mapping[str, Any] = torch.load(directory / f"{side}.pt")
    return results


def worst_difference(directory: Path) -> float:
    ours, trl = (results_of(directory, side)["gradients"] for side in ("ours", "trl"))
    assert ours.keys() == trl.keys(), f"other gradients: {sorted(ours.keys() ^ trl.keys())[:3]}"
    return max(difference(ours[name], trl[name]) for name in trl)


def errors(directory: Path) -> dict[str, Any]:
    """Of each side, to float64. `gradient` is that of the worst tensor; `median_ratio` and
    `worst_ratio` are quotients of ours and TRL's for one tensor."""
    exact = results_of(directory, "exact")
    sides = {side: results_of(directory, side) for side in ("ours", "trl")}
    tensors = {
        side: {
            name: difference(got["gradients"][name], g) for name, g in exact["gradients"].items()
        }
        for side, got in sides.items()
    }
    ratios = {name: tensors["ours"][name] / e for name, e in tensors["trl"].items() if e}
    worst = max(ratios, key=lambda name: ratios[name])
    return {
        "logprobs": {s: difference(got["logps"], exact["logps"]) for s, got in sides.items()},
        "loss": {
            side: abs(got["loss"] - exact["loss"]) / abs(exact["loss"])
            for side, got in sides.items()
        },
        "gradient": {side: max(found.values()) for side, found in tensors.items()},
        "median_ratio": median(ratios.values()),
        "worst_ratio": ratios[worst],
        "worst_tensor": worst,
        "tensors": len(ratios),
    }


if __name__ == "__main__":
    main()
