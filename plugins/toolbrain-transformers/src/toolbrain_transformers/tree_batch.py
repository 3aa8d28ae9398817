"""Decoding over a tree of cached keys and values: a shared prefix is computed once, kept once, and
read once per step for all sequences that share it.

Each sequence stands on a node (the shared part of its prompt) and has a suffix of its own (what
only it was told, and what it sampled). Attention to each node of its path and to the suffix is
computed apart and merged by their log-sum-exps, which is exact but for rounding (as in
FlashAttention, arXiv 2205.14135). What a sequence leaves behind is kept, so that its next turn goes
on from there.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Many
from typing import Any

import torch
from attrs import Factory, define
from torch.nn.functional import pad

from .drawing import Drawer, Sequence
from .node_cache import CachedNode, NodeCache
from .prefix_tree import PrefixTree
from .tree_attention import causal, dummy_mask

#: A new part of a prompt that is longer than this becomes a node where sequences share it. Shorter
#: nodes are copied into the suffixes of those that stand on them: a node that is read apart costs
#: operations of its own in every layer.
_COPIED = 96
#: A new part that is longer than this is prefilled by itself: its attention keeps no scores.
_LONG = 256
#: Suffixes are padded to the longest: to at most this many places, or twice what they hold.
_PADDED = 16_384
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
        self.leaves: list[CachedNode] = []  # where each sequence's prompt ended in the cache
        self.bases: list[CachedNode] = []  # the part of that path that is read apart
        self.own = Suffixes()  # all that comes after

    def add(self, arrived: list[Sequence]) -> list[Sequence]:
        """See `Batch.add`."""
        self.cache.evict(self.leaves)
        prompts: dict[tuple[int, ...], list[Sequence]] = {}
        for sequence in arrived:
            prompts.setdefault(sequence.prompt, []).append(sequence)
        for prefix in _shared_prefixes(list(prompts)):
            leaf = self.cache.match(prefix)
            if len(prefix) - leaf.end > _COPIED:
                self._prompt_node(prefix, leaf)
        ended: list[Sequence] = []
        rest: list[tuple[list[Sequence], CachedNode]] = []
        alone = self._too_long(prompts)
        for prompt, sharers in prompts.items():
            leaf = self.cache.match(prompt)
            new = len(prompt) - leaf.end
            shared = len(sharers) > 1 or leaf is self.cache.root or prompt in alone
            if new > (_COPIED if shared else _LONG):
                leaf = self._prompt_node(prompt, leaf, private=not shared)
            if leaf.end == len(prompt) and leaf.logits is not None:
                ended += self._join(sharers, leaf, leaf.logits)
                continue
            if leaf.end == len(prompt):  # cached as a part of something longer
                self.cache.match(prompt[:-1])  # cut: the last token will be read again
            rest.append((sharers, leaf))
        return ended + self._add_rest(rest)

    def _too_long(self, prompts: Iterable[tuple[int, ...]]) -> set[tuple[int, ...]]:
        """Prompts whose new part would pad all other suffixes too much: nodes of their own."""
        new = {p: len(p) - _base_of(self.cache.match(p)).end for p in prompts}
        lengths = sorted(new.values())
        total, most = sum(lengths) + sum(self.own.lengths), max(self.own.lengths, default=0)
        count = len(lengths) + len(self.own.lengths)
        while lengths and lengths[-1] > most and count * lengths[-1] > max(2 * total, _PADDED):
            total -= lengths.pop()
            count -= 1
        longest = lengths[-1] if lengths else most
        return {prompt for prompt, length in new.items() if length > longest}

    def step(self) -> list[Sequence]:
        """See `Batch.step`."""
        device = self.model.device
        ones = [1] * len(self.sequences)
        tokens = torch.tensor([[s.ids[-1]] for s in self.sequences], device=device)
        positions = torch.tensor([[s.length - 1] for s in self.sequences], device=device)
        logits = self._forward(tokens, positions, DecodingTree(self.own, self.bases, ones), 1)
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
        self.sequences, self.leaves, self.bases, self.own = [], [], [], Suffixes()
        self.cache.clear()

    def _drop(self, rows: list[int]) -> list[Sequence]:
        """Take these sequences out; returns them."""
        dropped = [self.sequences[row] for row in rows]
        for row in sorted(rows, reverse=True):  # the last row takes the place
            for column in (self.sequences, self.leaves, self.bases):
                column[row] = column[-1]  # type: ignore[index]
                column.pop()  # type: ignore[attr-defined]
            self.own.drop(row)
        return dropped

    def _keep_suffix(self, row: int) -> None:
        """Cache what a sequence that ended leaves behind, for its next turn. Its last token was
        drawn and never read."""
        sequence = self.sequences[row]
        ids = (*sequence.prompt, *sequence.ids[:-1])
        leaf = self.cache.match(ids)
        first = leaf.end - self.bases[row].end
        if leaf.end < len(ids) and first >= 0:
            keys, values = self.own.row(row, first)
            node = CachedNode(ids[leaf.end :], keys, values, leaf, leaf.end, private=True)
            self.cache.insert(node)

    def _prompt_node(
        self, prompt: tuple[int, ...], leaf: CachedNode, private: bool = False
    ) -> CachedNode:
        """A node after `leaf`, at whose end `prompt` ends, with its last token's logits."""
        node = self._prefill(prompt[leaf.end :], leaf)
        node.private = private
        self.cache.insert(node)
        return node

    def _prefill(self, ids: tuple[int, ...], leaf: CachedNode) -> CachedNode:
        """A new node after `leaf`, not yet in the cache."""
        device = self.model.device
        context = PrefillTree(leaf)
        positions = torch.arange(leaf.end, leaf.end + len(ids), device=device).unsqueeze(0)
        logits = self._forward(torch.tensor([ids], device=device), positions, context, 1)
        node = CachedNode(ids, context.keys, context.values, leaf, leaf.end)
        node.logits = logits[0, -1]
        return node

    def _add_rest(self, rest: list[tuple[list[Sequence], CachedNode]]) -> list[Sequence]:
        """Sequences with the same prompt, and where it is cached up to: the short rests of all
        prompts are prefilled together, each as the suffix that its sequences begin with."""
        if not rest:
            return []
        device = self.model.device
        prompts, leaves = [sharers[0].prompt for sharers, _ in rest], [leaf for _, leaf in rest]
        bases = [_base_of(leaf) for leaf in leaves]
        suffix = Suffixes.of([_after(b, leaf) for b, leaf in zip(bases, leaves, strict=True)])
        # A prompt that is cached to its end is read again from its last token on.
        depths = [min(leaf.end, len(p) - 1) for p, leaf in zip(prompts, leaves, strict=True)]
        new = [p[depth:] for p, depth in zip(prompts, depths, strict=True)]
        suffix.lengths = [d - base.end for d, base in zip(depths, bases, strict=True)]
        lengths = [len(ids) for ids in new]
        width = max(lengths)
        tokens = torch.tensor([[*ids, *[0] * (width - len(ids))] for ids in new], device=device)
        positions = torch.tensor([[*range(d, d + width)] for d in depths], device=device)
        ends = sorted({length - 1 for length in lengths})
        context = DecodingTree(suffix, bases, lengths)
        logits = self._forward(tokens, positions, context, torch.tensor(ends, device=device))
        suffix.grew(lengths)
        ended: list[Sequence] = []
        for row, (sharers, leaf) in enumerate(rest):
            last = logits[row, ends.index(lengths[row] - 1)]
            ended += self._join(sharers, leaf, last, suffix, row)
        return ended

    def _join(
        self,
        sharers: list[Sequence],
        leaf: CachedNode,
        logits: Any,
        suffix: Suffixes | None = None,
        row: int = 0,
    ) -> list[Sequence]:
        """Draw first tokens from logits (vocabulary,); those that go on take their places, each
        with this row of `suffix`, or what is cached after its base."""
        self.drawer.draw(sharers, logits.expand(len(sharers), -1))
        alive = [s for s in sharers if not s.finish_reason]
        base = _base_of(leaf)
        self.sequences += alive
        self.leaves += [leaf] * len(alive)
        self.bases += [base] * len(alive)
        self.own.extend(suffix or Suffixes.of([_after(base, leaf)]), [row] * len(alive))
        return [s for s in sharers if s.finish_reason]

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


def _shared_prefixes(prompts: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """What several of these prompts begin with, the shorter ones first."""
    tree = PrefixTree.of(prompts)
    parents = {node.parent for node in tree.nodes} - {-1}
    found = []
    for index in sorted(parents):
        sequence = next(s for s, leaf in enumerate(tree.leaves) if index in tree.path(leaf))
        node = tree.nodes[index]
        found.append(prompts[sequence][: tree.positions[node.end - 1] + 1])
    return found


def _base_of(leaf: CachedNode) -> CachedNode:
    """The last node of the path that is worth reading apart; the root where none is."""
    while leaf.parent is not None and (leaf.private or len(leaf.ids) <= _COPIED):
        leaf = leaf.parent
    return leaf


def _after(base: CachedNode, leaf: CachedNode) -> list[CachedNode]:
    """The nodes of the path to `leaf` after `base`."""
    return [node for node in leaf.path() if node.start >= base.end]


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

    Nodes that all rows stand on share one softmax with the suffixes; nodes of some rows only are
    merged in by their log-sum-exps.
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
            allowed = seen <= at
            self._made[window] = self._added(
                allowed if window is None else allowed & (seen > at - window)
            )
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
