"""The group that both sides of `update.py` compute an update of, and its loss."""

from __future__ import annotations

import random
from typing import Any

import torch
from prompts import prompt_ids, text_ids
from toolbrain_grpo.batches import WeightedRow

from toolbrain_core.roles import Row

BETA, EPSILON, EPSILON_HIGH = 0.05, 0.2, 0.28


def weighted_rows(tokenizer: Any, prompt: int, group: int, new: int, repeat: int) -> list[Any]:
    """One prompt, and completions that differ from their first token on."""
    draw = random.Random(repeat)
    words, shared = text_ids(tokenizer, 2000), prompt_ids(tokenizer, prompt, repeat)
    trained = (False,) * prompt + (True,) * new
    turns = (-1,) * prompt + (0,) * new
    rows = []
    for _ in range(group):
        ids = (*shared, *draw.choices(words, k=new))
        rows.append(WeightedRow(Row(ids, trained, (0.0,) * len(ids), turns), draw.gauss(0, 1)))
    return rows


def perturbed(logps: Any) -> Any:
    """Old log-probabilities, (rows, new): some ratios are clipped, on both sides."""
    generator = torch.Generator().manual_seed(1)
    return logps + 0.2 * torch.randn(logps.shape, generator=generator)


def plain_loss(logps: Any, old: Any, reference: Any, advantages: Any) -> Any:
    """(rows, new), with `advantages` (rows, 1): DAPO's loss (arXiv 2503.14476, eq. 8), and the k3
    estimate of the KL divergence with the ratio as a factor (arXiv 2512.02556)."""
    ratio = (logps - old).exp()
    clipped = ratio.clamp(1 - EPSILON, 1 + EPSILON_HIGH)
    gap = reference - logps
    kl = (gap.exp() - gap - 1) * ratio
    return -torch.min(ratio * advantages, clipped * advantages) + BETA * kl
