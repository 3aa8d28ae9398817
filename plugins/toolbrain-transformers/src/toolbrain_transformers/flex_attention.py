"""Attention over a prefix tree as one FlexAttention call (arXiv 2412.05496): for GPUs.

A node's subtree lies in line after it, so that token k is on the path of token q just where
k <= q < until[k], with `until` the end of the subtree of k's node. Which blocks of queries and keys
meet follows from that without a (tokens, tokens) mask.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch.nn.attention import flex_attention as flex

from .prefix_tree import PrefixTree

log = logging.getLogger(__name__)

#: FlexAttention's own default, on both sides.
_BLOCK = 128


def attend(query: Any, key: Any, value: Any, scale: float, mask: Any) -> Any:
    """`query` (1, heads, tokens, dim), `key` and `value` (1, key heads, tokens, dim); compiled on a
    GPU."""
    run = _compiled() if query.is_cuda else flex.flex_attention
    return run(query, key, value, block_mask=mask, scale=scale, enable_gqa=True)


@functools.cache
def _compiled() -> Any:
    # Dynamic: no two batches have the same number of tokens.
    return torch.compile(flex.flex_attention, dynamic=True)


@functools.cache
def is_usable(device: torch.device) -> bool:
    """Whether `device` is a GPU for which FlexAttention compiles here; tried once."""
    if device.type != "cuda":
        return False
    tree = PrefixTree.of([range(40), [*range(30), *range(50, 60)]])
    query = torch.randn(1, 2, len(tree), 16, device=device, requires_grad=True)
    try:
        attend(query, query, query, 0.25, block_mask(tree, None, device)).sum().backward()
    except Exception as error:  # compilers raise what they like
        log.warning(
            "FlexAttention does not work on %s, branches attend one by one: %s", device, error
        )
        return False
    return True


def block_mask(tree: PrefixTree, window: int | None, device: Any, size: int = _BLOCK) -> Any:
    """The mask of a tree's tokens, in blocks of `size`; with a `window`, a token sees that many of
    its path."""
    tokens = len(tree)
    blocks = -(-tokens // size)
    until = _padded(_subtree_ends(tree), blocks * size, device)
    positions = _padded(tree.positions, blocks * size, device)

    def seen(_row: Any, _head: Any, q: Any, k: Any) -> Any:
        on_path = (k <= q) & (q < until[k])
        return on_path if window is None else on_path & (positions[q] - positions[k] < window)

    number = torch.arange(blocks, device=device)
    first_query, last_query = number * size, (number * size + size - 1).clamp(max=tokens - 1)
    ends, at = until.view(blocks, size), positions.view(blocks, size)
    before = number.unsqueeze(1) > number  # (blocks of queries, blocks of keys)
    some = (before | before.new_ones(blocks).diag()) & (ends.amax(1) > first_query.unsqueeze(1))
    whole = before & (ends.amin(1) > last_query.unsqueeze(1))
    if window is not None:
        whole &= at.amax(1).unsqueeze(1) - at.amin(1) < window
    return flex.BlockMask.from_kv_blocks(
        *_listed(some & ~whole),
        *_listed(whole),
        BLOCK_SIZE=size,
        mask_mod=seen,
        seq_lengths=(tokens, tokens),
    )


def _subtree_ends(tree: PrefixTree) -> list[int]:
    """For each token, where the subtree of its node ends."""
    ends = [node.end for node in tree.nodes]
    for index in reversed(range(len(tree.nodes))):
        parent = tree.nodes[index].parent
        if parent >= 0:
            ends[parent] = max(ends[parent], ends[index])
    return [end for node, end in zip(tree.nodes, ends, strict=True) for _ in range(len(node))]


def _padded(values: Sequence[int], length: int, device: Any) -> Any:
    return torch.tensor([*values, *[0] * (length - len(values))], device=device)


def _listed(chosen: Any) -> tuple[Any, Any]:
    """How many blocks of keys each block of queries meets, and which: those come first."""
    counts = chosen.sum(1, dtype=torch.int32)
    indices = chosen.int().argsort(dim=1, descending=True, stable=True).int()
    return counts[None, None], indices[None, None]
