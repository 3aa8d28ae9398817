"""Decoding over a tree of cached keys and values: a shared prefix is computed once, kept once, and
read once per step for all sequences that share it.

Each sequence stands on a node (the shared part of its prompt) and has a suffix of its own (what
only it was told, and what it sampled). Attention to each node of its path and to the suffix is
computed apart and merged by their log-sum-exps, which is exact but for rounding (as in
FlashAttention, arXiv 2205.14135). What a sequence leaves behind is kept, so that its next turn goes
on from there.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from typing import Any

import torch
from attrs import define
from torch.nn.functional import pad

from .drawing import Drawer, Sequence
from .node_cache import CachedNode, NodeCache
from .tree_attention import causal, dummy_mask

#: A prompt's new part becomes a node where this many sequences share it.
_SHARED_BY = 2
#: It also does when it is longer than this: long suffixes pad every other sequence's.
_LONG = 256
#: Suffix places are made in steps of this many tokens, and rows with some to spare.
_STEP = 64
_SPARE_ROWS = 8


class TreeBatch:
    """Sequences that decode together. The model must be `tree_attending`."""

    def __init__(self, model: Any, drawer: Drawer, max_cache_bytes: int = 1 << 30):
        self.model = model
        self.drawer = drawer
        self.cache = NodeCache(max_cache_bytes)
        self.sequences: list[Sequence] = []
        self.leaves: list[CachedNode] = []  # what each sequence stands on
        self.own = Suffixes()

    def add(self, arrived: list[Sequence]) -> list[Sequence]:
        """See `Batch.add`."""
        self.cache.evict(self.leaves)
        prompts: dict[tuple[int, ...], list[Sequence]] = {}
        for sequence in arrived:
            prompts.setdefault(sequence.prompt, []).append(sequence)
        ended: list[Sequence] = []
        alone: list[tuple[Sequence, CachedNode]] = []
        for prompt, sharers in sorted(prompts.items(), key=lambda item: len(item[0])):
            leaf = self.cache.match(prompt)
            rest = len(prompt) - leaf.end
            shared = len(sharers) >= _SHARED_BY or leaf is self.cache.root
            if shared or rest > _LONG or (not rest and not leaf.private):
                node = self._prompt_node(prompt, leaf)
                ended += self._join(sharers, [node] * len(sharers), node.logits)
            else:
                alone.append((sharers[0], leaf))
        return ended + self._add_alone(alone)

    def step(self) -> list[Sequence]:
        """See `Batch.step`."""
        device = self.model.device
        ones = [1] * len(self.sequences)
        tokens = torch.tensor([[s.ids[-1]] for s in self.sequences], device=device)
        positions = torch.tensor([[s.length - 1] for s in self.sequences], device=device)
        logits = self._forward(tokens, positions, DecodingTree(self.own, self.leaves, ones), 1)
        self.own.grew(ones)
        self.drawer.draw(self.sequences, logits[:, -1])
        ended = [i for i, s in enumerate(self.sequences) if s.finish_reason]
        for row in ended:
            self._keep_suffix(row)
        return self._drop(ended)

    def drop_cancelled(self) -> None:
        """See `Batch.drop_cancelled`."""
        self._drop([i for i, s in enumerate(self.sequences) if s.future.done()])

    def release(self) -> None:
        """See `Batch.release`."""
        self.sequences, self.leaves, self.own = [], [], Suffixes()
        self.cache.clear()

    def _drop(self, rows: list[int]) -> list[Sequence]:
        """Take these sequences out; returns them."""
        dropped = [self.sequences[row] for row in rows]
        for row in sorted(rows, reverse=True):  # the last row takes the place
            for column in (self.sequences, self.leaves):
                column[row] = column[-1]  # type: ignore[index]
                column.pop()  # type: ignore[attr-defined]
            self.own.drop(row)
        return dropped

    def _keep_suffix(self, row: int) -> None:
        """Cache what a sequence that ended leaves behind, for its next turn. Its last token was
        drawn and never read."""
        sequence, leaf, length = self.sequences[row], self.leaves[row], self.own.lengths[row]
        ids = (*sequence.prompt, *sequence.ids)[leaf.end : leaf.end + length]
        if ids and ids[0] not in leaf.children:
            keys, values = self.own.row(row)
            self.cache.insert(CachedNode(ids, keys, values, leaf, leaf.end, private=True))

    def _prompt_node(self, prompt: tuple[int, ...], leaf: CachedNode) -> CachedNode:
        """The node at whose end `prompt` ends, with its last token's logits."""
        if leaf.end < len(prompt):
            node = self._prefill(prompt[leaf.end :], leaf)
            self.cache.insert(node)
            return node
        if leaf.logits is None:  # cached as a part of something longer: read its last token again
            before = self.cache.match(prompt[:-1])
            leaf.logits = self._prefill(prompt[-1:], before).logits
        return leaf

    def _prefill(self, ids: tuple[int, ...], leaf: CachedNode) -> CachedNode:
        """A new node after `leaf`, not yet in the cache."""
        device = self.model.device
        context = PrefillTree(leaf)
        positions = torch.arange(leaf.end, leaf.end + len(ids), device=device).unsqueeze(0)
        logits = self._forward(torch.tensor([ids], device=device), positions, context, 1)
        node = CachedNode(ids, context.keys, context.values, leaf, leaf.end)
        node.logits = logits[0, -1]
        return node

    def _add_alone(self, alone: list[tuple[Sequence, CachedNode]]) -> list[Sequence]:
        """Sequences whose new tokens nobody shares: prefilled together, into their suffixes, after
        what is cached of them alone."""
        if not alone:
            return []
        device = self.model.device
        leaves = [_shared(leaf) for _, leaf in alone]
        suffix = Suffixes.of([_private(leaf) for _, leaf in alone])
        depths = [leaf.end for _, leaf in alone]
        rests = [s.prompt[depth:] for (s, _), depth in zip(alone, depths, strict=True)]
        # A prompt that is cached to its end is read again from its last token on.
        rests = [r or s.prompt[-1:] for r, (s, _) in zip(rests, alone, strict=True)]
        depths = [len(s.prompt) - len(r) for r, (s, _) in zip(rests, alone, strict=True)]
        suffix.lengths = [d - leaf.end for d, leaf in zip(depths, leaves, strict=True)]
        lengths = [len(rest) for rest in rests]
        width = max(lengths)
        tokens = torch.tensor([[*r, *[0] * (width - len(r))] for r in rests], device=device)
        positions = torch.tensor([[*range(d, d + width)] for d in depths], device=device)
        ends = sorted({length - 1 for length in lengths})
        context = DecodingTree(suffix, leaves, lengths)
        logits = self._forward(tokens, positions, context, torch.tensor(ends, device=device))
        suffix.grew(lengths)
        last = torch.tensor([ends.index(length - 1) for length in lengths], device=device)
        rows = torch.arange(len(alone), device=device)
        return self._join([s for s, _ in alone], leaves, logits[rows, last], suffix)

    def _join(
        self,
        sequences: list[Sequence],
        leaves: list[CachedNode],
        logits: Any,
        suffix: Suffixes | None = None,
    ) -> list[Sequence]:
        """Draw first tokens from logits (sequences, vocabulary) or (vocabulary,); those that go on
        take their places."""
        if logits.dim() == 1:
            logits = logits.expand(len(sequences), -1)
        self.drawer.draw(sequences, logits)
        alive = [i for i, s in enumerate(sequences) if not s.finish_reason]
        self.sequences += [sequences[i] for i in alive]
        self.leaves += [leaves[i] for i in alive]
        if suffix is None:
            self.own.append(len(alive))
        else:
            self.own.extend(suffix, alive)
        return [s for s in sequences if s.finish_reason]

    def _forward(self, tokens: Any, positions: Any, context: Any, keep: Any) -> Any:
        """Logits (rows, kept, vocabulary)."""
        return self.model(
            input_ids=tokens,
            position_ids=positions,
            attention_mask=dummy_mask(tokens.shape[1], tokens.device),
            use_cache=False,
            logits_to_keep=keep,
            toolbrain_tree=context,
        ).logits


def _shared(leaf: CachedNode) -> CachedNode:
    """The last node of the path that is not private."""
    while leaf.private and leaf.parent is not None:
        leaf = leaf.parent
    return leaf


def _private(leaf: CachedNode) -> list[CachedNode]:
    """The nodes of the path after `_shared(leaf)`."""
    shared = _shared(leaf)
    return [node for node in leaf.path() if node.start >= shared.end]


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
        kept = _kept_dtype(query)
        self.keys.append(key[0].to(kept))
        self.values.append(value[0].to(kept))
        keys = torch.cat([*(node.keys[layer] for node in self.path), self.keys[-1]], dim=1)
        values = torch.cat([*(node.values[layer] for node in self.path), self.values[-1]], dim=1)
        output = causal(query.to(kept), keys.unsqueeze(0), values.unsqueeze(0), scale, window)
        return output.to(query.dtype)


def _kept_dtype(query: Any) -> torch.dtype:
    """Keys and values are kept in fp32 or better on a CPU, which multiplies small batches of half
    precision several times slower."""
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

    def row(self, row: int) -> tuple[list[Any], list[Any]]:
        """Copies of one row's keys and values, per layer (key heads, tokens, dim)."""
        length = self.lengths[row]
        keys = [k[row, :, :length].clone() for k in self.keys]
        return keys, [v[row, :, :length].clone() for v in self.values]

    def append(self, rows: int) -> None:
        """Add empty rows."""
        self.lengths += [0] * rows
        self._reserve(len(self.lengths), 0)

    def extend(self, other: Suffixes, rows: Many[int]) -> None:
        """Add these rows of another."""
        if not rows:
            return
        first = len(self.lengths)
        self.lengths += [other.lengths[row] for row in rows]
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
    """One forward pass: `new[r]` tokens of row r (padded to the longest) after its suffix.

    Rows that stand on the same node read it together.
    """

    def __init__(self, own: Suffixes, leaves: Many[CachedNode], new: Many[int]):
        self.own = own
        self.rows: dict[int, tuple[CachedNode, list[int]]] = {}
        for row, leaf in enumerate(leaves):
            for node in leaf.path():
                self.rows.setdefault(id(node), (node, []))[1].append(row)
        self.depths = [leaf.end for leaf in leaves]
        self.width = max(new)
        self.most = max(own.lengths) + self.width
        self._shapes: tuple[Any, Any, Any] | None = None

    def attend(
        self, layer: int, query: Any, key: Any, value: Any, scale: float, window: int | None
    ) -> Any:
        """`query` (rows, heads, tokens, dim), `key` and `value` (rows, key heads, tokens, dim)."""
        rows, heads, tokens, dim = query.shape
        places, allowed, indices = self._prepared(query)
        groups, kept = heads // key.shape[1], _kept_dtype(query)
        keys, values = self.own.write(layer, key.to(kept), value.to(kept), places, self.most)
        # Query heads that share a key head are folded into the queries.
        folded = query.to(kept).reshape(rows, key.shape[1], groups * tokens, dim) * scale
        scores = torch.matmul(folded, keys.transpose(2, 3))  # (rows, key heads, queries, places)
        if window is not None:
            seen = torch.arange(self.most, device=places.device)
            allowed = allowed & (seen > places.unsqueeze(2) - window).unsqueeze(1)
        scores = scores.masked_fill(~allowed.repeat(1, 1, groups, 1), float("-inf"))
        merged = _Merged.of(scores, values)
        for (node, _), index in zip(self.rows.values(), indices, strict=True):
            part = self._node_part(node, layer, folded, index, groups, tokens, window, places)
            merged.add(part, index)
        return merged.output().reshape(rows, heads, tokens, dim).to(query.dtype)

    def _prepared(self, query: Any) -> tuple[Any, Any, Any]:
        """Where new tokens go (rows, tokens), what each may see of its suffix (rows, 1, tokens,
        places), and the rows of each node; the same for every layer."""
        if self._shapes is None:
            device = query.device
            start = torch.tensor(self.own.lengths, device=device).unsqueeze(1)
            places = start + torch.arange(self.width, device=device)
            seen = torch.arange(self.most, device=device)
            allowed = (seen <= places.unsqueeze(2)).unsqueeze(1)
            everyone = len(self.own.lengths)
            indices = [
                None if len(rows) == everyone else torch.tensor(rows, device=device)
                for _, rows in self.rows.values()
            ]
            self._shapes = (places, allowed, indices)
        return self._shapes

    def _node_part(
        self,
        node: CachedNode,
        layer: int,
        folded: Any,
        index: Any,
        groups: int,
        tokens: int,
        window: int | None,
        places: Any,
    ) -> tuple[Any, Any, Any]:
        """Output, maximum and sum of exponentials of the node's rows over its keys."""
        query = folded if index is None else folded[index]  # (sharers, key heads, queries, dim)
        sharers, key_heads, queries, dim = query.shape
        flat = query.transpose(0, 1).reshape(key_heads, sharers * queries, dim)
        scores = torch.matmul(flat, node.keys[layer].transpose(1, 2))  # (key heads, ·, node tokens)
        if window is not None:
            depth = torch.tensor(self.depths, device=places.device).unsqueeze(1)
            at = depth + places if index is None else (depth + places)[index]
            seen = torch.arange(node.start, node.end, device=places.device)
            near = (seen > at.unsqueeze(2) - window).repeat(1, groups, 1)  # (sharers, queries, ·)
            near = near.reshape(1, sharers * queries, -1)
            scores = scores.masked_fill(~near, float("-inf"))
        output, top, total = _softmax_parts(scores, node.values[layer])

        def back(tensor: Any) -> Any:
            return tensor.reshape(key_heads, sharers, queries, -1).transpose(0, 1)

        return back(output), back(top), back(total)


def _softmax_parts(scores: Any, values: Any) -> tuple[Any, Any, Any]:
    """Unnormalised output, maximum (…, 1) and sum of exponentials (…, 1)."""
    scores = scores.float()
    # A row that may see nothing here has a maximum of -inf: shift by 0, so that its sum is 0.
    top = scores.amax(-1, keepdim=True)
    weights = (scores - top.clamp(min=torch.finfo(scores.dtype).min)).exp()
    output = torch.matmul(weights.to(values.dtype), values).float()
    return output, top, weights.sum(-1, keepdim=True)


@define
class _Merged:
    """A softmax over several sets of keys, one after the other."""

    out: Any
    top: Any
    total: Any

    @classmethod
    def of(cls, scores: Any, values: Any) -> _Merged:
        return cls(*_softmax_parts(scores, values))

    def add(self, part: tuple[Any, Any, Any], index: Any) -> None:
        """Take in another set, for all rows or those of `index`."""
        if index is None:
            self.out, self.top, self.total = _merge((self.out, self.top, self.total), part)
            return
        mine = (self.out[index], self.top[index], self.total[index])
        for whole, piece in zip((self.out, self.top, self.total), _merge(mine, part), strict=True):
            whole.index_copy_(0, index, piece)

    def output(self) -> Any:
        return self.out / self.total


def _merge(a: tuple[Any, Any, Any], b: tuple[Any, Any, Any]) -> tuple[Any, Any, Any]:
    top = torch.maximum(a[1], b[1])
    left, right = (a[1] - top).exp(), (b[1] - top).exp()
    return a[0] * left + b[0] * right, top, a[2] * left + b[2] * right
