"""Our requests and answers as vLLM's `/v1/completions` has them: token ids in, token ids out."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from toolbrain_core.errors import SamplerFailure
from toolbrain_core.roles import Sampled
from toolbrain_core.traces import Sampling


def request_of(
    prompt_ids: Sequence[int], sampling: Sampling, seed: int, room: int, eos_ids: Collection[int]
) -> dict[str, Any]:
    """The body of a request, but for its model. `room`: tokens that fit after the prompt.

    The policy's end-of-sequence tokens end a completion, and no others that the server may know.
    """
    return {
        "prompt": list(prompt_ids),
        "max_tokens": min(sampling.max_new_tokens, room),
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "repetition_penalty": sampling.repetition_penalty,
        "stop": list(sampling.stop),
        "stop_token_ids": sorted(eos_ids),
        "ignore_eos": True,
        "seed": seed,
        "logprobs": 0,  # of the sampled tokens only
        "return_token_ids": True,
    }


def sampled_of(
    answer: Mapping[str, Any],
    sampling: Sampling,
    eos_ids: Collection[int],
    version: int,
) -> Sampled:
    """What an answer holds.

    Errors: `SamplerFailure` for an answer that was cut off, or without token ids.
    """
    choice = (answer.get("choices") or [{}])[0]
    ids, logprobs = choice.get("token_ids"), (choice.get("logprobs") or {}).get("token_logprobs")
    if not ids or not logprobs or len(ids) != len(logprobs):
        raise SamplerFailure(
            "the server's answer has no token ids with their log-probabilities: is it vLLM, "
            "and new enough for return_token_ids?"
        )
    reason = _finish_reason(choice["finish_reason"], ids, sampling, eos_ids)
    return Sampled(tuple(ids), tuple(logprobs), reason, version)


def _finish_reason(
    theirs: str, ids: Sequence[int], sampling: Sampling, eos_ids: Collection[int]
) -> str:
    if theirs == "stop":
        return "eos" if ids[-1] in eos_ids else "stop"
    if theirs == "length":
        return "length" if len(ids) >= sampling.max_new_tokens else "context"
    raise SamplerFailure(f"vLLM ended a request with {theirs!r}")
