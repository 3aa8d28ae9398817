"""Log-probabilities of recorded tokens, by one forward pass over padded rows.

The one place where training looks at the model: policy, old policy and reference all go through
`score`.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from attrs import frozen


@frozen
class Scores:
    """Both (rows, tokens), 0 where not wanted. `logprobs[r, t]` is that of token `ids[r, t]`."""

    logprobs: Any
    entropies: Any


def score(
    model: Any,
    ids: Any,
    mask: Any,
    wanted: Any,
    temperature: float = 1.0,
    entropy_gradient: bool = False,
) -> Scores:
    """Log-probabilities and entropies of the wanted tokens, at `temperature`.

    `ids`, `mask`, `wanted`: (rows, tokens). `mask` is 1 on real tokens, padding may be on either
    side; `wanted` marks tokens to score, never a row's first. The output head runs on wanted
    positions only; whatever else the model does to its logits (scaling, soft-capping) stays.
    """
    before = wanted[:, 1:].bool()  # the state before a token predicts it
    keep = torch.nn.functional.pad(before, (0, 1))  # (rows, tokens)
    inputs = {
        "input_ids": ids,
        "attention_mask": mask,
        "position_ids": (mask.cumsum(1) - 1).clamp(min=0),
        "use_cache": False,
        **_text_only(model, ids),
    }
    with _head_only_on(model, keep):
        logits = model(**inputs).logits[0]  # (wanted, vocabulary)
    logprobs = (logits.float() / temperature).log_softmax(-1)
    picked = logprobs.gather(1, ids[:, 1:][before].unsqueeze(1)).squeeze(1)  # (wanted,)
    spread = logprobs if entropy_gradient else logprobs.detach()
    entropies = -(spread.exp() * spread).sum(-1)
    return Scores(_scatter(before, picked), _scatter(before, entropies))


def _scatter(where: Any, values: Any) -> Any:
    """(rows, tokens): `values` at `where`, which is one token behind; zeros elsewhere."""
    table = values.new_zeros(where.shape).masked_scatter(where, values)
    return torch.nn.functional.pad(table, (1, 0))


@contextmanager
def _head_only_on(model: Any, keep: Any) -> Iterator[None]:
    """Let the output head see only the hidden states of `keep` (rows, tokens), as one row."""

    def select(_module: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return (args[0][keep].unsqueeze(0), *args[1:])  # (1, kept, width)

    handle = unwrapped(model).get_output_embeddings().register_forward_pre_hook(select)
    try:
        yield
    finally:
        handle.remove()


def unwrapped(model: Any) -> Any:
    """The Hugging Face model inside a DDP and a PEFT wrapper."""
    inner = model.module if isinstance(model, torch.nn.parallel.DistributedDataParallel) else model
    return inner.get_base_model() if hasattr(inner, "get_base_model") else inner


def _text_only(model: Any, ids: Any) -> dict[str, Any]:
    """Image-text models ask in training which tokens are images: none."""
    inner = unwrapped(model)
    if getattr(inner.config, "vision_config", None) is None:
        return {}
    names = inspect.signature(inner.forward).parameters
    return {
        name: torch.zeros_like(ids)
        for name in ("token_type_ids", "mm_token_type_ids")
        if name in names
    }
