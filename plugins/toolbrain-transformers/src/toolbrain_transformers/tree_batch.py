"""Decoding over a tree of cached keys and values: a shared prefix is computed once, kept once, and
read once per step for all sequences that share it.

Each sequence stands on a node (the part of its prompt that is read together with others) and has a
suffix of its own (short parts, what only it was told, and what it sampled). What a sequence leaves
behind is kept, so that its next turn goes on from there.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from .cached_attention import DecodingTree, PrefillTree, Suffixes
from .drawing import Drawer, Sequence
from .node_cache import CachedNode, NodeCache
from .prefix_tree import PrefixTree
from .tree_attention import dummy_mask

#: A new part of a prompt that is longer than this becomes a node where sequences share it. Shorter
#: nodes are copied into the suffixes of those that stand on them: a node that is read apart costs
#: operations of its own in every layer.
_COPIED = 96
#: A new part that is longer than this is prefilled by itself: its attention keeps no scores.
_LONG = 256
#: Suffixes are padded to the longest: to at most this many places, or twice what they hold.
_PADDED = 16_384


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
        if leaf.end < len(ids):
            keys, values = self.own.row(row, leaf.end - self.bases[row].end)
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
