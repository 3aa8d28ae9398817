"""A radix tree of cached keys and values."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

from attrs import define, field


@define(eq=False)
class CachedNode:
    """Keys and values of `ids`, per layer (key heads, tokens, dim), after those of `parent`.

    `logits` of the last token (vocabulary,) where a prompt ended here. A `private` node holds what
    one sequence sampled or was told alone.
    """

    ids: tuple[int, ...] = ()
    keys: list[Any] = field(factory=list)
    values: list[Any] = field(factory=list)
    parent: CachedNode | None = None
    start: int = 0
    private: bool = False
    children: dict[int, CachedNode] = field(factory=dict)
    logits: Any = None
    used: int = 0

    @property
    def end(self) -> int:
        """Position after the last token."""
        return self.start + len(self.ids)

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def bytes(self) -> int:
        if not self.keys:
            return 0
        first = self.keys[0]  # (key heads, tokens, dim), and all layers are alike
        return 2 * len(self.keys) * first.numel() * first.element_size()

    def path(self) -> list[CachedNode]:
        """The nodes from the first to this one, without the root."""
        found: list[CachedNode] = []
        node: CachedNode | None = self
        while node is not None and node.parent is not None:
            found.append(node)
            node = node.parent
        return found[::-1]

    def cut(self, at: int) -> CachedNode:
        """A new node takes the first `at` tokens and becomes this one's parent: whoever stands on
        this node still stands on the same tokens."""
        assert self.parent is not None
        upper = CachedNode(
            self.ids[:at],
            [k[:, :at] for k in self.keys],
            [v[:, :at] for v in self.values],
            self.parent,
            self.start,
            self.private,
            used=self.used,
        )
        self.parent.children[upper.ids[0]] = upper
        self.ids, self.start, self.parent = self.ids[at:], self.start + at, upper
        self.keys = [k[:, at:] for k in self.keys]
        self.values = [v[:, at:] for v in self.values]
        upper.children = {self.ids[0]: self}
        return upper


class NodeCache:
    """Cached nodes, at most `max_bytes` of them but for those in use."""

    def __init__(self, max_bytes: int):
        self.max_bytes = max_bytes
        self.root = CachedNode()
        self._clock = itertools.count(1)

    def match(self, ids: tuple[int, ...]) -> CachedNode:
        """The node at whose end the longest cached prefix of `ids` ends. A node that agrees with
        `ids` only in part is cut there, so that what follows has a place of its own."""
        node, now = self.root, next(self._clock)
        while node.end < len(ids) and ids[node.end] in node.children:
            child = node.children[ids[node.end]]
            agreed = _agreed(child.ids, ids, child.start)
            node = child if agreed == len(child) else child.cut(agreed)
            node.used = now
        return node

    def insert(self, node: CachedNode) -> None:
        """Add a node below its parent, where `match` ended: no other begins alike."""
        assert node.parent is not None
        node.used = next(self._clock)
        node.parent.children[node.ids[0]] = node

    def clear(self) -> None:
        """Drop everything at once: parents and children hold each other, and would wait for
        Python's cycle collector, which knows nothing of the tensors' size."""
        for node in _below(self.root):
            node.keys, node.values, node.logits = [], [], None
            node.children, node.parent = {}, None
        self.root = CachedNode()

    def evict(self, in_use: Iterable[CachedNode]) -> None:
        """Drop the least recently used leaves until the rest fits."""
        kept = {id(node) for leaf in in_use for node in leaf.path()}
        nodes = _below(self.root)
        total = sum(node.bytes for node in nodes)
        # A parent is used whenever its child is, so that it comes no earlier in this order.
        for node in sorted(nodes, key=lambda n: (n.used, -n.start)):
            if total <= self.max_bytes:
                return
            if not node.children and id(node) not in kept and node.parent is not None:
                del node.parent.children[node.ids[0]]
                total -= node.bytes


def _below(root: CachedNode) -> list[CachedNode]:
    found: list[CachedNode] = []
    stack = list(root.children.values())
    while stack:
        node = stack.pop()
        found.append(node)
        stack += node.children.values()
    return found


def _agreed(own: tuple[int, ...], ids: tuple[int, ...], start: int) -> int:
    most = min(len(own), len(ids) - start)
    if own[:most] == ids[start : start + most]:
        return most
    return next(i for i in range(most) if own[i] != ids[start + i])
