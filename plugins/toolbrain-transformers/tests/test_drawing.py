"""Draws by inverse CDF, summed by chunks, against one plain cumulative sum."""

from __future__ import annotations

import random

import pytest
import torch
from toolbrain_transformers.drawing import _inverse_cdf


@pytest.mark.parametrize("size", [1, 255, 256, 257, 1000, 49152])
def test_draws_are_those_of_one_cumulative_sum(size: int) -> None:
    torch.manual_seed(0)
    draw = random.Random(0)
    plain = (torch.randn(64, size) * 3).softmax(-1)
    chances = [draw.random() for _ in range(64)]
    tokens = _inverse_cdf(plain, chances)
    sums = plain.double().cumsum(1)
    for row, (token, chance) in enumerate(zip(tokens.tolist(), chances, strict=True)):
        wanted = chance * float(sums[row, -1])
        low = float(sums[row, token - 1]) if token else 0.0
        assert low - 1e-6 <= wanted <= float(sums[row, token]) + 1e-6


@pytest.mark.parametrize("chance", [0.0, 0.5, 1 - 2**-53])
def test_no_token_without_probability_is_drawn(chance: float) -> None:
    plain = torch.zeros(1, 1000)
    plain[0, 300], plain[0, 700] = 1 / 3, 2 / 3
    assert int(_inverse_cdf(plain, [chance])) in (300, 700)


def test_what_is_not_finite_still_gives_a_token() -> None:
    assert 0 <= int(_inverse_cdf(torch.full((1, 1000), float("nan")), [0.5])) < 1000
