"""From recorded ids to training rows.

A turn goes on an earlier row when its prompt begins with that row's ids. Where a row ends in an
end-of-sequence token that the next prompt does not repeat, the row goes on without it, and the
token is trained in a short row of its own, on the context that it was sampled in.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from attrs import define, field

from toolbrain_core.roles import Row
from toolbrain_core.traces import Turn


@define
class _OpenRow:
    ids: list[int] = field(factory=list)
    trained: list[bool] = field(factory=list)
    logprobs: list[float] = field(factory=list)
    turn: list[int] = field(factory=list)

    def context(self, ids: Iterable[int]) -> None:
        for token in ids:
            self.append(token, False, 0.0, -1)

    def append(self, token: int, trained: bool, logprob: float, turn: int) -> None:
        self.ids.append(token)
        self.trained.append(trained)
        self.logprobs.append(logprob)
        self.turn.append(turn)

    def split_end(self) -> _OpenRow:
        """Take the last token off into a row of its own, whose only trained token it is."""
        alone = _OpenRow()
        alone.context(self.ids[:-1])
        alone.append(self.ids.pop(), self.trained.pop(), self.logprobs.pop(), self.turn.pop())
        return alone

    def close(self) -> Row:
        return Row(tuple(self.ids), tuple(self.trained), tuple(self.logprobs), tuple(self.turn))


def rows_of(turns: Sequence[Turn], eos_ids: Collection[int]) -> list[Row]:
    """Training rows of one trace: every sampled token is trained in exactly one of them."""
    rows: list[_OpenRow] = []
    for index, turn in enumerate(turns):
        if not turn.completion_ids:
            continue
        row = _continued(rows, turn.prompt_ids, eos_ids)
        row.context(turn.prompt_ids[len(row.ids) :])
        for token, logprob in zip(turn.completion_ids, turn.logprobs, strict=True):
            row.append(token, True, logprob, index)
    return [row.close() for row in rows]


def _continued(rows: list[_OpenRow], prompt: tuple[int, ...], eos_ids: Collection[int]) -> _OpenRow:
    """The longest open row that `prompt` goes on from, or a new one (added to `rows`)."""
    for row in sorted(rows, key=lambda row: -len(row.ids)):
        if prompt[: len(row.ids)] == tuple(row.ids):
            return row
        kept = row.ids[:-1]
        if row.ids[-1] in eos_ids and row.trained[-1] and prompt[: len(kept)] == tuple(kept):
            rows.append(row.split_end())
            return row
    rows.append(_OpenRow())
    return rows[-1]
