"""What is asked of vLLM, and what is made of its answers."""

from __future__ import annotations

from typing import Any

import pytest
from toolbrain_vllm.completions import request_of, sampled_of

from toolbrain_core.errors import SamplerFailure
from toolbrain_core.roles import Sampled
from toolbrain_core.traces import Sampling

EOS = frozenset({2, 7})


def answer(finish_reason: str, ids: Any = (5, 6), logprobs: Any = (-0.5, -1.0)) -> dict[str, Any]:
    choice = {
        "finish_reason": finish_reason,
        "token_ids": ids and list(ids),
        "logprobs": logprobs and {"token_logprobs": list(logprobs)},
    }
    return {"choices": [choice]}


def test_a_request_says_everything_that_decides_what_is_drawn() -> None:
    sampling = Sampling(
        temperature=0.7,
        top_p=0.9,
        top_k=40,
        min_p=0.01,
        repetition_penalty=1.1,
        max_new_tokens=16,
        stop=("</code>",),
    )
    request = request_of((1, 2, 3), sampling, 99, 100, EOS)
    assert request["prompt"] == [1, 2, 3]
    assert (request["temperature"], request["top_p"], request["top_k"]) == (0.7, 0.9, 40)
    assert (request["min_p"], request["repetition_penalty"]) == (0.01, 1.1)
    assert (request["max_tokens"], request["seed"]) == (16, 99)
    assert request["stop"] == ["</code>"]
    assert (request["stop_token_ids"], request["ignore_eos"]) == ([2, 7], True)


@pytest.mark.parametrize(("room", "asked"), [(10, 10), (16, 16), (17, 16)])
def test_no_more_is_asked_for_than_fits_the_context(room: int, asked: int) -> None:
    assert request_of((1,), Sampling(max_new_tokens=16), 0, room, EOS)["max_tokens"] == asked


@pytest.mark.parametrize(
    ("theirs", "ids", "limit", "ours"),
    [
        ("stop", (5, 2), 8, "eos"),
        ("stop", (5, 7), 2, "eos"),
        ("stop", (5, 6), 8, "stop"),
        ("length", (5, 6), 2, "length"),
        ("length", (5, 6), 8, "context"),
    ],
)
def test_how_a_completion_ended_has_the_words_of_the_core(
    theirs: str, ids: tuple[int, ...], limit: int, ours: str
) -> None:
    sampled = sampled_of(answer(theirs, ids), Sampling(max_new_tokens=limit), EOS, 3)
    assert sampled == Sampled(ids, (-0.5, -1.0), ours, 3)


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        (answer("stop", ids=None), "no token ids"),
        (answer("stop", logprobs=None), "no token ids with their log-probabilities"),
        (answer("stop", logprobs=(-0.5,)), "no token ids with their log-probabilities"),
        (answer("abort"), "ended a request with 'abort'"),
    ],
)
def test_an_answer_that_cannot_be_trained_on_is_a_failure_of_the_sampler(
    bad: dict[str, Any], says: str
) -> None:
    with pytest.raises(SamplerFailure, match=says):
        sampled_of(bad, Sampling(), EOS, 0)
