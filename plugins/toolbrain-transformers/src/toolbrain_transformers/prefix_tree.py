"""Sequences as a tree of shared prefixes, flattened: every distinct token once.

Pure Python. Two tokens are the same where all tokens before them are.
"""

from __future__ import annotations

from collections.abc import Sequence

from attrs import frozen


@frozen
class Node:
    """Tokens `start` to `end` of the flat row; they follow `parent` (-1: nothing)."""

    start: int
    end: int
    parent: int

    def __len__(self) -> int:
        return self.end - self.start


@frozen
class PrefixTree:
    """`ids[i]` stands at `positions[i]` of every sequence that runs through it.

    Nodes come after their parents, their tokens in that order. `leaves[s]` is the node at whose end
    sequence s ends (-1 for an empty one).
    """

    ids: tuple[int, ...]
    positions: tuple[int, ...]
    nodes: tuple[Node, ...]
    leaves: tuple[int, ...]

    @classmethod
    def of(cls, sequences: Sequence[Sequence[int]]) -> PrefixTree:
        """The tree of any sequences: duplicates, prefixes of one another and empty ones too."""
        builder = _Builder(sequences)
        builder.grow(list(range(len(sequences))), 0, -1)
        return cls(
            tuple(builder.ids),
            tuple(builder.positions),
            tuple(builder.nodes),
            tuple(builder.leaves),
        )

    def __len__(self) -> int:
        return len(self.ids)

    def path(self, node: int) -> list[int]:
        """The nodes from the root to `node`, which is the last one."""
        found = []
        while node >= 0:
            found.append(node)
            node = self.nodes[node].parent
        return found[::-1]

    def places(self, sequence: int) -> list[int]:
        """The flat index of every token of a sequence."""
        return [
            index
            for node in self.path(self.leaves[sequence])
            for index in range(self.nodes[node].start, self.nodes[node].end)
        ]


class _Builder:
    """Grows nodes for groups of sequences that agree on their first tokens."""

    def __init__(self, sequences: Sequence[Sequence[int]]):
        self.sequences = [tuple(sequence) for sequence in sequences]
        self.ids: list[int] = []
        self.positions: list[int] = []
        self.nodes: list[Node] = []
        self.leaves = [-1] * len(sequences)

    def grow(self, group: list[int], depth: int, parent: int) -> None:
        """Nodes for `group`, whose first `depth` tokens are those of `parent`'s path."""
        todo = [(group, depth, depth, parent)]
        while todo:
            members, start, end, node = todo.pop()
            if end > start:
                node = self._add(members[0], start, end, node)
            children: dict[int, list[int]] = {}
            for member in members:
                if len(self.sequences[member]) > end:
                    children.setdefault(self.sequences[member][end], []).append(member)
                else:
                    self.leaves[member] = node
            for branch in reversed(children.values()):  # the first is popped first
                todo.append((branch, end, self._extend(branch, end), node))

    def _extend(self, members: list[int], depth: int) -> int:
        """Where the members' common prefix ends."""
        low = min(self.sequences[m] for m in members)
        high = max(self.sequences[m] for m in members)  # agree with low: all in between do
        end = depth
        while end < len(low) and end < len(high) and low[end] == high[end]:
            end += 1
        return end

    def _add(self, member: int, depth: int, end: int, parent: int) -> int:
        start = len(self.ids)
        self.ids += self.sequences[member][depth:end]
        self.positions += range(depth, end)
        self.nodes.append(Node(start, len(self.ids), parent))
        return len(self.nodes) - 1
