"""Attention to cached keys and values while sequences decode.

What all sequences of a step share and what each has of its own go through one softmax; what only
some share is computed apart and merged in by its log-sum-exp, which is exact but for rounding (as
in FlashAttention, arXiv 2205.14135).
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from typing import Any

import torch
from attrs import Factory, define
from torch.nn.functional import pad

from .node_cache import CachedNode
from .tree_attention import causal

#: Suffix places are made in steps of this many tokens, and rows with some to spare.
_STEP = 64
_SPARE_ROWS = 8


class PrefillTree:
    """One row of new tokens after a cached path; keeps their keys and values."""

    def __init__(self, leaf: CachedNode):
        self.path = leaf.path()
        self.keys: list[Any] = []
        self.values: list[Any] = []

    def attend(
        self, layer: int, query: Any, key: Any, value: Any, scale: float, window: int | None
    ) -> Any:
        """`query` (1, heads, tokens, dim), `key` and `value` (1, key heads, tokens, dim)."""
        before = [(node.keys[layer], node.values[layer]) for node in self.path]
        self.keys.append(key[0].to(_score_dtype(query)).contiguous())
        self.values.append(value[0].contiguous())
        if before:  # keys came from the model's own dtype, and go back unchanged
            key = torch.cat([*(k.to(key.dtype) for k, _ in before), key[0]], dim=1).unsqueeze(0)
            value = torch.cat([*(v for _, v in before), value[0]], dim=1).unsqueeze(0)
        return causal(query, key, value, scale, window)


def _score_dtype(query: Any) -> torch.dtype:
    """The dtype of kept keys: fp32 or better on a CPU, whose matrix products would round scores to
    half precision."""
    on_cpu = query.device.type == "cpu"
    return torch.promote_types(query.dtype, torch.float32) if on_cpu else query.dtype


class Suffixes:
    """The own keys and values of each sequence: per layer (rows and spare rows, key heads, places,
    dim). What lies beyond a row's length is finite and never attended to."""

    def __init__(self) -> None:
        self.lengths: list[int] = []
        self.keys: list[Any] = []
        self.values: list[Any] = []

    @classmethod
    def of(cls, nodes: Many[Many[CachedNode]]) -> Suffixes:
        """A row for each list of nodes, with their keys and values."""
        made = cls()
        made.lengths = [sum(len(node.ids) for node in row) for row in nodes]
        example = next((node for row in nodes for node in row), None)
        if example is not None:
            places = -(-max(made.lengths) // _STEP) * _STEP
            made.keys = [
                _gather([[n.keys[i] for n in row] for row in nodes], places, k)
                for i, k in enumerate(example.keys)
            ]
            made.values = [
                _gather([[n.values[i] for n in row] for row in nodes], places, v)
                for i, v in enumerate(example.values)
            ]
        return made

    def row(self, row: int, first: int) -> tuple[list[Any], list[Any]]:
        """Copies of one row's keys and values from place `first` on, per layer (key heads, tokens,
        dim)."""
        places = slice(first, self.lengths[row])
        keys = [k[row, :, places].clone() for k in self.keys]
        return keys, [v[row, :, places].clone() for v in self.values]

    def extend(self, other: Suffixes, rows: Many[int]) -> None:
        """Add these rows of another."""
        if not rows:
            return
        first = len(self.lengths)
        self.lengths += [other.lengths[row] for row in rows]
        if not other.keys:
            self._reserve(len(self.lengths), 0)
            return
        if not self.keys:
            shape = (len(self.lengths), *other.keys[0].shape[1:])
            self.keys = [k.new_zeros(shape) for k in other.keys]
            self.values = [v.new_zeros(shape) for v in other.values]
        places = other.keys[0].shape[2]
        self._reserve(len(self.lengths), places)
        index = torch.tensor(list(rows), device=other.keys[0].device)
        for mine, theirs in ((self.keys, other.keys), (self.values, other.values)):
            for own, new in zip(mine, theirs, strict=True):
                own[first : first + len(rows), :, :places] = new[index]

    def drop(self, row: int) -> None:
        """Take a row out; the last one takes its place."""
        last = len(self.lengths) - 1
        if row < last:
            length = self.lengths[last]
            for tensor in (*self.keys, *self.values):
                tensor[row, :, :length] = tensor[last, :, :length]
        self.lengths[row] = self.lengths[last]
        self.lengths.pop()

    def grew(self, by: list[int]) -> None:
        """Count what a forward pass wrote."""
        self.lengths = [length + more for length, more in zip(self.lengths, by, strict=True)]

    def write(self, layer: int, key: Any, value: Any, places: Any, most: int) -> tuple[Any, Any]:
        """Put new keys and values (rows, heads, tokens, dim) at `places` (rows, tokens); returns
        the layer's, up to place `most`."""
        if layer == len(self.keys):
            shape = (key.shape[0], key.shape[1], 0, key.shape[3])
            self.keys.append(key.new_zeros(shape))
            self.values.append(value.new_zeros(shape))
        self._reserve(len(self.lengths), most, layer)
        rows = key.shape[0]
        index = places[:, None, :, None].expand_as(key)
        keys, values = self.keys[layer][:rows], self.values[layer][:rows]
        keys.scatter_(2, index, key)
        values.scatter_(2, index, value)
        return keys[:, :, :most], values[:, :, :most]

    def _reserve(self, rows: int, places: int, layer: int | None = None) -> None:
        """Make room, in one layer or in all, with some to spare."""
        layers = range(len(self.keys)) if layer is None else [layer]
        for column in (self.keys, self.values):
            for number in layers:
                have = column[number]
                wide = -(-max(places, have.shape[2]) // _STEP) * _STEP
                tall = have.shape[0] if have.shape[0] >= rows else rows + _SPARE_ROWS
                if (tall, wide) != (have.shape[0], have.shape[2]):
                    more = (0, 0, 0, wide - have.shape[2], 0, 0, 0, tall - have.shape[0])
                    column[number] = pad(have, more)


def _gather(rows: Many[Many[Any]], places: int, like: Any) -> Any:
    """(rows, key heads, places, dim) of each row's tensors (key heads, tokens, dim), in order."""
    table = like.new_zeros(len(rows), like.shape[0], places, like.shape[2])
    for row, parts in enumerate(rows):
        at = 0
        for part in parts:
            table[row, :, at : at + part.shape[1]] = part
            at += part.shape[1]
    return table


class DecodingTree:
    """One forward pass: `new[r]` tokens of row r (padded to the longest) after its base's path and
    its suffix.

    Nodes that all rows stand on are `common`, the others `partial`, with the rows on them.
    """

    def __init__(self, own: Suffixes, bases: Many[CachedNode], new: Many[int]):
        self.own = own
        rows: dict[int, tuple[CachedNode, list[int]]] = {}
        for row, base in enumerate(bases):
            for node in base.path():
                rows.setdefault(id(node), (node, []))[1].append(row)
        self.common = [node for node, those in rows.values() if len(those) == len(bases)]
        self.partial = [(n, those) for n, those in rows.values() if len(those) < len(bases)]
        self.depths = [base.end for base in bases]
        self.width = max(new)
        self.most = max(own.lengths) + self.width
        self._masks: _Masks | None = None

    def attend(
        self, layer: int, query: Any, key: Any, value: Any, scale: float, window: int | None
    ) -> Any:
        """`query` (rows, heads, tokens, dim), `key` and `value` (rows, key heads, tokens, dim)."""
        rows, heads, tokens, dim = query.shape
        exact = _score_dtype(query)
        masks = self._masks = self._masks or self._masks_for(query, heads // key.shape[1])
        keys, values = self.own.write(layer, key.to(exact), value, masks.places, self.most)
        # Query heads that share a key head are folded into the queries.
        folded = query.to(exact).reshape(rows, key.shape[1], -1, dim) * scale
        scores = torch.matmul(folded, keys.transpose(2, 3)) + masks.of_suffix(window)
        nodes = [(node.keys[layer], node.values[layer]) for node in self.common]
        if nodes:
            flat = _by_head(folded)
            shared = [_by_row(torch.matmul(flat, k.transpose(1, 2)), rows) for k, _ in nodes]
            seen = [_add(s, masks.of(n, window)) for s, n in zip(shared, self.common, strict=True)]
            scores = torch.cat([*seen, scores], -1)  # (rows, key heads, queries, keys)
        scores = _exact(scores)
        widths = [*map(len, self.common), self.most]
        *weights, last = scores.softmax(-1).to(value.dtype).split(widths, -1)
        output = _exact(torch.matmul(last, values))  # (rows, key heads, queries, dim)
        for weight, (_, v) in zip(weights, nodes, strict=True):
            output = output + _by_row(torch.matmul(_by_head(weight), v), rows)
        if self.partial:
            self._add_partial(layer, folded, output, scores, window, masks)
        return output.reshape(rows, heads, tokens, dim).to(query.dtype)

    def _add_partial(
        self, layer: int, folded: Any, output: Any, scores: Any, window: int | None, masks: _Masks
    ) -> None:
        """Put into `output` what the rows of partial nodes see in these."""
        total = scores.logsumexp(-1, keepdim=True)
        for (node, rows), index in zip(self.partial, masks.indices, strict=True):
            score = torch.matmul(_by_head(folded[index]), node.keys[layer].transpose(1, 2))
            mask = masks.of(node, window, index)
            score = _exact(_add(score, None if mask is None else _by_head(mask)))
            values = node.values[layer]
            part = _exact(torch.matmul(score.softmax(-1).to(values.dtype), values))
            # A row that sees nothing of the node (a sliding window) has a weight of 0.
            part = _by_row(part.nan_to_num(), len(rows))
            new, old = _by_row(score.logsumexp(-1, keepdim=True), len(rows)), total[index]
            output[index] = torch.lerp(output[index], part, torch.sigmoid(new - old))
            total[index] = torch.logaddexp(old, new)

    def _masks_for(self, query: Any, groups: int) -> _Masks:
        device = query.device
        start = torch.tensor(self.own.lengths, device=device).unsqueeze(1)
        places = start + torch.arange(self.width, device=device)
        depths = torch.tensor(self.depths, device=device).unsqueeze(1)
        indices = [torch.tensor(rows, device=device) for _, rows in self.partial]
        return _Masks(places, depths + places, groups, self.most, indices)


@define(eq=False)
class _Masks:
    """What queries may see, alike in all layers: 0 or -inf, added to the scores.

    `places` (rows, tokens) in the suffixes and `positions` (rows, tokens) of the new tokens;
    `groups` query heads share a key head; `indices` are the rows of each partial node.
    """

    places: Any
    positions: Any
    groups: int
    most: int
    indices: list[Any]
    _made: dict[Any, Any] = Factory(dict)

    def of_suffix(self, window: int | None) -> Any:
        """(rows, 1, queries, places)"""
        if window not in self._made:
            at = self.places.unsqueeze(2)  # (rows, tokens, 1)
            seen = torch.arange(self.most, device=at.device)
            near = seen > at - (self.most if window is None else window)
            self._made[window] = self._added((seen <= at) & near)
        return self._made[window]

    def of(self, node: CachedNode, window: int | None, index: Any = None) -> Any:
        """(rows, 1, queries, node tokens), of the rows of `index`; None where all is seen."""
        key = (id(node), window)
        if key not in self._made:
            at = self.positions if index is None else self.positions[index]
            if window is None or int(at.max()) - window < node.start:
                self._made[key] = None
            else:
                seen = torch.arange(node.start, node.end, device=at.device)
                self._made[key] = self._added(seen > at.unsqueeze(2) - window)
        return self._made[key]

    def _added(self, allowed: Any) -> Any:
        mask = torch.zeros(allowed.shape, device=allowed.device).masked_fill_(
            ~allowed, float("-inf")
        )
        return mask.repeat(1, self.groups, 1).unsqueeze(1)


def _exact(tensor: Any) -> Any:
    """In fp32 or better."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def _add(scores: Any, mask: Any) -> Any:
    return scores if mask is None else scores + mask


def _by_head(tensor: Any) -> Any:
    """(key heads, rows x queries, dim) of (rows, key heads, queries, dim)."""
    return tensor.transpose(0, 1).reshape(tensor.shape[1], -1, tensor.shape[-1])


def _by_row(tensor: Any, rows: int) -> Any:
    """The reverse of `_by_head`."""
    return tensor.reshape(tensor.shape[0], rows, -1, tensor.shape[-1]).transpose(0, 1)
