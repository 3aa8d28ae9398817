"""Training rows as the tensors that TRL's loss reads, whole groups bounded by tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from attrs import frozen

from toolbrain_core.roles import Row


@frozen
class WeightedRow:
    """A row with the advantage of its trace."""

    row: Row
    advantage: float

    @property
    def start(self) -> int:
        """Index of the first trained token: what is before it is TRL's prompt."""
        return self.row.trained.index(True)


#: Tokens in the forward pass of some rows.
Cost = Callable[[Sequence[Row]], int]


def micro_batches(
    groups: Sequence[Sequence[WeightedRow]], max_tokens: int, cost: Cost
) -> list[list[WeightedRow]]:
    """Rows in pieces that cost at most `max_tokens` each. Groups stay whole where they fit; a row
    that does not fit alone is a piece of its own."""

    def fits(rows: Sequence[WeightedRow]) -> bool:
        return cost([weighted.row for weighted in rows]) <= max_tokens

    pieces: list[list[WeightedRow]] = []
    for group in groups:
        rows = list(group)
        if pieces and fits(pieces[-1] + rows):
            pieces[-1] += rows
        elif fits(rows):
            pieces.append(rows)
        else:
            pieces += _split(rows, fits)
    return [piece for piece in pieces if piece]


def _split(
    rows: list[WeightedRow], fits: Callable[[Sequence[WeightedRow]], bool]
) -> list[list[WeightedRow]]:
    pieces: list[list[WeightedRow]] = [[]]
    for row in sorted(rows, key=lambda r: len(r.row.ids)):
        if pieces[-1] and not fits([*pieces[-1], row]):
            pieces.append([])
        pieces[-1].append(row)
    return pieces


def tensors(rows: Sequence[WeightedRow], pad_id: int, device: Any) -> dict[str, Any]:
    """`prompt_*` (rows, P) padded on the left, all else (rows, C) padded on the right.

    Masks go by length. `tool_mask` is 0 on what the environment wrote; `sampled_logps` are the
    recorded log-probabilities.
    """
    heads = [list(r.row.ids[: r.start]) for r in rows]
    tails = [list(r.row.ids[r.start :]) for r in rows]

    def right(columns: list[Any], value: float) -> Any:
        width = max(map(len, columns))
        padded = [list(c) + [value] * (width - len(c)) for c in columns]
        return torch.tensor(padded, device=device)

    width = max(map(len, heads))
    return {
        "prompt_ids": torch.tensor([[pad_id] * (width - len(h)) + h for h in heads], device=device),
        "prompt_mask": torch.tensor(
            [[0] * (width - len(h)) + [1] * len(h) for h in heads], device=device
        ),
        "completion_ids": right(tails, pad_id),
        "completion_mask": right([[1] * len(t) for t in tails], 0),
        "tool_mask": right([[int(t) for t in r.row.trained[r.start :]] for r in rows], 0),
        "sampled_logps": right([r.row.logprobs[r.start :] for r in rows], 0.0),
        "advantages": torch.tensor([r.advantage for r in rows], device=device),
    }


def trained_tokens(rows: Sequence[WeightedRow]) -> int:
    """Tokens that the policy sampled."""
    return sum(sum(r.row.trained) for r in rows)
