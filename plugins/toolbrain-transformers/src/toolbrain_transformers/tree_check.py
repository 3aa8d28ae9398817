"""Whether a model's attention can serve a prefix tree: asked of the model itself."""

from __future__ import annotations

from typing import Any

import torch

from toolbrain_core.errors import NotServed
from toolbrain_core.roles import Row

from .scoring import PaddedForward, TreeForward
from .tree_attention import tree_attending

#: Largest difference of log-probabilities that counts as rounding, in the weights' precision.
_TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-6}
_HALF_TOLERANCE = 0.25


def tree_problem(model: Any) -> str:
    """Why the tree cannot serve `model` (a Hugging Face model), in words; empty where it can.

    Scores two short sequences that share a prefix, over the tree and over padded rows: what is not
    equal was not computed as the model does it (learned absolute positions that the model counts
    itself, recurrent layers, attention arguments that the tree lacks).
    """
    implementation = model.config._attn_implementation
    if implementation not in ("sdpa", "eager"):
        return f"the model attends with {implementation!r}"
    size = min(model.get_input_embeddings().num_embeddings, 1000)
    ids = [(7 * i * i + 3 * i) % size for i in range(48)]
    rows = [_row([*ids[:24], *ids[24:36]]), _row([*ids[:24], *ids[36:48]])]
    device = model.device
    was_training = model.training
    try:
        model.eval()
        with torch.no_grad():
            plain = PaddedForward.of(rows, device, 0).score(model).logprobs
            with tree_attending(model):
                tree = TreeForward.of(rows, device).score(model).logprobs
    except (NotServed, RuntimeError, TypeError, ValueError, AttributeError, KeyError) as error:
        return f"{type(model).__name__} cannot attend to a tree ({error})"
    finally:
        model.train(was_training)
    difference = float((plain - tree).abs().max())
    if not difference <= _TOLERANCE.get(model.dtype, _HALF_TOLERANCE):
        return f"{type(model).__name__} computes something else over a tree (by {difference:.2g})"
    return ""


def _row(ids: list[int]) -> Row:
    trained = tuple(index >= 8 for index in range(len(ids)))
    return Row(tuple(ids), trained, (0.0,) * len(ids), (0,) * len(ids))
