"""What the sides of `update.py` computed, compared with each other and with float64."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from attrs import frozen
from batches import plain_loss
from transformers.models.llama.modeling_llama import LlamaRMSNorm

#: Gradients with a smaller norm are compared absolutely.
NEGLIGIBLE = 1e-12

Results = Mapping[str, Any]


def keep(directory: Path, side: str, repeat: int, model: Any, loss: float, logps: Any) -> None:
    """Leave what one side computed for one batch."""
    named = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    results = {
        "gradients": named,
        "loss": torch.tensor(loss, dtype=torch.float64),
        "logprobs": logps,
    }
    torch.save(results, directory / f"{side}-{repeat}.pt")


@frozen
class Plain:
    """A plain implementation in float64. `reference` is a model, or None: `model` without its
    adapter."""

    model: Any
    reference: Any = None

    @classmethod
    def of(cls, model: Any, reference: Any = None) -> Plain:
        for module in filter(None, (model, reference)):
            for norm in module.double().modules():
                if isinstance(norm, LlamaRMSNorm):
                    norm.forward = partial(_rms_norm, norm)  # its own computes in float32
        return cls(model, reference)

    def loss_and_logps(self, rows: Any, old: Any) -> tuple[float, Any]:
        """The loss, whose gradients are added to the model's, and (rows, new) logps.

        The rows have one prompt.
        """
        ids = torch.tensor([weighted.row.ids for weighted in rows])
        logps = _logps(self.model, ids, old.shape[1])
        reference = self._reference(ids, old.shape[1])
        advantages = torch.tensor([[w.advantage] for w in rows], dtype=torch.float64)
        loss = plain_loss(logps, old.double(), reference, advantages).mean()
        loss.backward()
        return float(loss.detach()), logps.detach()

    @torch.no_grad()
    def _reference(self, ids: Any, new: int) -> Any:
        if self.reference is not None:
            return _logps(self.reference, ids, new)
        with self.model.disable_adapter():
            return _logps(self.model, ids, new)


def _logps(model: Any, ids: Any, new: int) -> Any:
    """(rows, new) log-probabilities of the last tokens. The prompt that all rows share is computed
    once, by the model's own cache: in float64 that is exact enough, and six times as fast."""
    prompt, completions = ids[:1, :-new], ids[:, -new:]
    assert (ids[:, :-new] == prompt).all()
    first = model(input_ids=prompt, use_cache=True, logits_to_keep=1)
    cache = first.past_key_values
    cache.batch_repeat_interleave(len(ids))
    rest = model(input_ids=completions[:, :-1], past_key_values=cache).logits
    logits = torch.cat([first.logits.expand(len(ids), 1, -1), rest], dim=1)
    return logits.log_softmax(-1).gather(2, completions[..., None]).squeeze(2)


def _rms_norm(norm: Any, x: Any) -> Any:
    return torch.nn.functional.rms_norm(x, norm.weight.shape, norm.weight, norm.variance_epsilon)


def worst_difference(directory: Path, repeats: int) -> float:
    """The largest relative difference between gradient tensors of ours and TRL's."""
    worst = 0.0
    for ours, trl in results_of(directory, ("ours", "trl"), repeats):
        worst = max(worst, *_differences(ours["gradients"], trl["gradients"]).values())
    return worst


def errors(directory: Path, repeats: int) -> dict[str, Any]:
    """Root mean squares over the batches of the relative errors to float64.

    `gradient` is the worst tensor's; `median_ratio` and `worst_ratio` are quotients of ours and
    TRL's for one tensor.
    """
    squares: dict[str, dict[str, float]] = {"ours": {}, "trl": {}}
    for ours, trl, exact in results_of(directory, ("ours", "trl", "exact"), repeats):
        for side, got in (("ours", ours), ("trl", trl)):
            found = _differences(got["gradients"], exact["gradients"])
            found |= _differences({k: got[k] for k in SCALARS}, {k: exact[k] for k in SCALARS})
            for name, value in found.items():
                squares[side][name] = squares[side].get(name, 0.0) + value**2 / repeats
    rms = {side: {k: v**0.5 for k, v in found.items()} for side, found in squares.items()}
    tensors = {side: {k: v for k, v in e.items() if k not in SCALARS} for side, e in rms.items()}
    ratios = {name: tensors["ours"][name] / error for name, error in tensors["trl"].items()}
    worst = max(ratios, key=lambda name: ratios[name])
    return {
        **{what: {side: found[what] for side, found in rms.items()} for what in SCALARS},
        "gradient": {side: max(found.values()) for side, found in tensors.items()},
        "median_ratio": round(median(ratios.values()), 3),
        "worst_ratio": round(ratios[worst], 3),
        "worst_tensor": worst,
        "tensors": len(ratios),
    }


SCALARS = ("logprobs", "loss")


def results_of(directory: Path, sides: tuple[str, ...], repeats: int) -> Iterator[list[Results]]:
    """What the sides kept, batch by batch."""
    for repeat in range(repeats):
        yield [torch.load(directory / f"{side}-{repeat}.pt") for side in sides]


def _differences(values: Results, true: Results) -> dict[str, float]:
    assert values.keys() == true.keys(), f"differ: {sorted(values.keys() ^ true.keys())[:3]}"
    return {name: difference(values[name], true[name]) for name in true}


def difference(value: Any, true: Any) -> float:
    """By norm, relative unless the norm of `true` is negligible."""
    size = float(true.double().norm())
    gap = float((value.double() - true.double()).norm())
    return gap / size if size >= NEGLIGIBLE else gap
