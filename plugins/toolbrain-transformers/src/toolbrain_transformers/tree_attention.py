"""Attention over a prefix tree, through transformers' attention interface.

A call of the model with `toolbrain_tree=context` runs `context.attend` in every layer; without it
the model's attention is PyTorch's SDPA as ever. The context is a keyword argument, since those are
kept where gradient checkpointing recomputes a layer.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from toolbrain_core.errors import NotServed

from . import flex_attention
from .prefix_tree import PrefixTree

log = logging.getLogger(__name__)

NAME = "toolbrain_tree"
#: Queries per attention call: bounds the (queries, keys) mask of a long node.
_QUERY_BLOCK = 1024
#: Arguments of other attention functions that change nothing here.
_HARMLESS = {"position_ids", "cache", "past_key_values", "use_cache", "cache_position", "is_causal"}


class TreeContext(Protocol):
    """What a model call's attention looks up. Shapes: (rows, heads, tokens, head dimension)."""

    def attend(
        self, layer: int, query: Any, key: Any, value: Any, scale: float, window: int | None
    ) -> Any: ...


def tree_attention(
    module: Any,
    query: Any,
    key: Any,
    value: Any,
    attention_mask: Any,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    toolbrain_tree: TreeContext | None = None,
    **kwargs: Any,
) -> tuple[Any, None]:
    """The attention function: (rows, tokens, heads, head dimension), and no weights."""
    if toolbrain_tree is None:
        return sdpa_attention_forward(  # type: ignore[no-any-return]
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
    odd = {name for name, value in kwargs.items() if value is not None} - _HARMLESS
    if odd & {"s_aux", "softcap"} or dropout:
        raise NotServed(f"tree attention lacks {', '.join(sorted(odd)) or 'dropout'}")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    output = toolbrain_tree.attend(module.layer_idx, query, key, value, scale, sliding_window)
    return output.transpose(1, 2).contiguous(), None


AttentionInterface.register(NAME, tree_attention)
AttentionMaskInterface.register(NAME, ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])


@contextmanager
def tree_attending(model: Any) -> Iterator[None]:
    """Let `model` (a Hugging Face model) look for a tree; afterwards it attends as before."""
    before = model.config._attn_implementation
    model.set_attn_implementation(NAME)
    try:
        yield
    finally:
        model.set_attn_implementation(before)


def dummy_mask(tokens: int, device: Any) -> Any:
    """A 4-D mask: transformers passes one on as it is, and makes none of its own."""
    return torch.zeros(1, 1, 1, 1, device=device).expand(1, 1, tokens, tokens)


class TrainingTree:
    """The whole tree as one row of tokens: every node attends to its path and, causally, itself.

    One FlexAttention call where that works on the device, else one SDPA call for each node.
    """

    def __init__(self, tree: PrefixTree):
        self.tree = tree
        self.masks: dict[int | None, Any] = {}  # FlexAttention's, by window
        self.lengths = [len(node) for node in tree.nodes]
        self.paths = [tree.path(index) for index in range(len(tree.nodes))]

    def attend(
        self, layer: int, query: Any, key: Any, value: Any, scale: float, window: int | None
    ) -> Any:
        """`query` (1, heads, tokens, dim), `key` and `value` (1, key heads, tokens, dim)."""
        del layer
        if flex_attention.is_usable(query.device):
            if window not in self.masks:
                self.masks[window] = flex_attention.block_mask(self.tree, window, query.device)
            return flex_attention.attend(query, key, value, scale, self.masks[window])
        # One split for all nodes: its backward pass is one concatenation.
        queries = query.split(self.lengths, dim=2)
        keys, values = key.split(self.lengths, dim=2), value.split(self.lengths, dim=2)
        outputs = []
        for index, path in enumerate(self.paths):
            k = torch.cat([keys[node] for node in path], dim=2) if len(path) > 1 else keys[index]
            v = (
                torch.cat([values[node] for node in path], dim=2)
                if len(path) > 1
                else values[index]
            )
            outputs.append(causal(queries[index], k, v, scale, window))
        return torch.cat(outputs, dim=2)


def causal(query: Any, key: Any, value: Any, scale: float, window: int | None) -> Any:
    """The last `query` tokens of a sequence attend to it. (1, heads, queries, dim)."""
    length, total = query.shape[2], key.shape[2]
    if length == total and (window is None or total <= window):
        groups = query.shape[1] // key.shape[1]
        k, v = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
        return scaled_dot_product_attention(query, k, v, is_causal=True, scale=scale)
    blocks = []
    for begin in range(0, length, _QUERY_BLOCK):
        part = query[:, :, begin : begin + _QUERY_BLOCK]
        end = total - length + begin + part.shape[2]  # keys after the block's last query
        first = 0 if window is None else max(0, end - part.shape[2] - window + 1)
        blocks.append(_masked(part, key[:, :, first:end], value[:, :, first:end], scale, window))
    return torch.cat(blocks, dim=2) if len(blocks) > 1 else blocks[0]


def _masked(query: Any, key: Any, value: Any, scale: float, window: int | None) -> Any:
    """As `causal`, in one call. Query heads that share a key head are folded into the queries, so
    that keys are not repeated."""
    rows, heads, length, dim = query.shape
    key_heads, total = key.shape[1], key.shape[2]
    groups = heads // key_heads
    at = torch.arange(total - length, total, device=query.device).unsqueeze(1)  # (queries, 1)
    seen = torch.arange(total, device=query.device).unsqueeze(0)  # (1, keys)
    allowed = seen <= at if window is None else (seen <= at) & (seen > at - window)
    folded = query.reshape(rows, key_heads, groups * length, dim)
    output = scaled_dot_product_attention(
        folded, key, value, attn_mask=allowed.repeat(groups, 1), scale=scale
    )
    return output.reshape(rows, heads, length, dim)
