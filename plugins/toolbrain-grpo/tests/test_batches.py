from __future__ import annotations

import pytest
import torch
from toolbrain_grpo.batches import WeightedRow, micro_batches, tensors, trained_tokens

from toolbrain_core.roles import Row


def row(trained, advantage=1.0, first_id=100):
    """A row with ids that count up; `trained` is a string of 0s and 1s."""
    flags = tuple(c == "1" for c in trained)
    n = len(flags)
    return WeightedRow(
        Row(
            ids=tuple(range(first_id, first_id + n)),
            trained=flags,
            logprobs=tuple(-float(i) if t else 0.0 for i, t in enumerate(flags)),
            turn=tuple(0 if t else -1 for t in flags),
        ),
        advantage,
    )


def test_the_prompt_ends_before_the_first_trained_token_and_the_environment_is_masked():
    columns = tensors([row("0001101"), row("0111", advantage=-2.0, first_id=200)], 7, "cpu")
    assert columns["prompt_ids"].tolist() == [[100, 101, 102], [7, 7, 200]]
    assert columns["prompt_mask"].tolist() == [[1, 1, 1], [0, 0, 1]]
    assert columns["completion_ids"].tolist() == [[103, 104, 105, 106], [201, 202, 203, 7]]
    assert columns["completion_mask"].tolist() == [[1, 1, 1, 1], [1, 1, 1, 0]]
    assert columns["tool_mask"].tolist() == [[1, 1, 0, 1], [1, 1, 1, 0]]
    assert columns["sampled_logps"].tolist() == [[-3.0, -4.0, 0.0, -6.0], [-1.0, -2.0, -3.0, 0.0]]
    assert columns["advantages"].tolist() == [1.0, -2.0]


def test_a_sampled_pad_token_is_no_padding():
    columns = tensors([row("011", first_id=7), row("01")], 8, "cpu")
    assert columns["completion_ids"][0].tolist() == [8, 9]
    assert columns["completion_mask"][0].tolist() == [1, 1]
    assert columns["completion_mask"].dtype == torch.int64


def padded(rows):
    """What a padded batch of these rows costs, in tokens."""
    return len(rows) * max((len(row.ids) for row in rows), default=0)


def cost(piece):
    return padded([weighted.row for weighted in piece])


@pytest.mark.parametrize("limit", [8, 20, 33, 1000])
def test_pieces_hold_every_row_once_within_the_limit(limit):
    groups = [[row("01" * n, first_id=10 * n) for n in (1, 4, 2)], [row("0011")], []]
    pieces = micro_batches(groups, limit, padded)
    assert all(pieces)
    assert all(cost(piece) <= limit for piece in pieces)
    held = sorted(r.row.ids for piece in pieces for r in piece)
    assert held == sorted(r.row.ids for group in groups for r in group)


def test_groups_stay_whole_where_they_fit():
    groups = [[row("0001")] * 2, [row("0011")] * 2, [row("0111")] * 2]
    pieces = micro_batches(groups, 16, padded)
    assert pieces == [groups[0] + groups[1], groups[2]]


def test_a_row_beyond_the_limit_gets_a_piece_of_its_own():
    pieces = micro_batches([[row("01" * 20), row("01"), row("01")]], 10, padded)
    assert [len(piece) for piece in pieces] == [2, 1]
    assert cost(pieces[1]) == 40


def test_nothing_gives_no_pieces():
    assert micro_batches([], 10, padded) == []
    assert micro_batches([[]], 10, padded) == []


def test_trained_tokens_are_those_that_the_policy_sampled():
    assert trained_tokens([row("0011"), row("0101")]) == 4
