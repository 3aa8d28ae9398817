"""Sequences in flight, and how their next token is drawn.

A sequence's draws depend on its own logits and seed, whatever else is in the batch.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection
from collections.abc import Sequence as Many
from concurrent.futures import Future
from typing import Any, Protocol

import torch
from attrs import define, field, frozen
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from toolbrain_core.roles import Sampled
from toolbrain_core.traces import Sampling

#: Probabilities that are summed at once.
_CHUNK = 256


@define(eq=False)
class Sequence:
    """One request in flight. `limit`: tokens that fit the context after the prompt."""

    prompt: tuple[int, ...]
    sampling: Sampling
    limit: int
    draws: random.Random
    future: Future[Sampled]
    ids: list[int] = field(factory=list)
    logprobs: list[float] = field(factory=list)
    finish_reason: str = ""

    @property
    def length(self) -> int:
        return len(self.prompt) + len(self.ids)


class Batch(Protocol):
    """Sequences being decoded together."""

    sequences: list[Sequence]

    def add(self, arrived: list[Sequence]) -> list[Sequence]:
        """Prefill new sequences and draw their first token; returns those that ended with it."""

    def step(self) -> list[Sequence]:
        """One forward pass and one token for every sequence; returns those that ended."""

    def drop_cancelled(self) -> None:
        """Free the places of sequences whose future is done."""

    def release(self) -> None:
        """Drop all keys and values: serving has ended."""


@frozen
class Drawer:
    """Draws tokens and sees where sequences end. `decode(ids)` gives text to look for stops in."""

    eos_ids: Collection[int]
    decode: Callable[[Many[int]], str]

    def draw(self, sequences: Many[Sequence], logits: Any) -> None:
        """Append one token to each sequence. `logits`: (sequences, vocabulary)."""
        logits = logits.float()
        scale = [s.sampling.temperature or 1.0 for s in sequences]
        scaled = logits / torch.tensor(scale, device=logits.device).unsqueeze(1)
        logprobs = scaled.log_softmax(-1)  # (sequences, vocabulary)
        tokens = _choose(sequences, logits, logprobs)
        picked = logprobs.gather(1, tokens.unsqueeze(1)).squeeze(1)
        drawn = zip(sequences, tokens.tolist(), picked.tolist(), strict=True)
        for sequence, token, logprob in drawn:
            sequence.ids.append(token)
            sequence.logprobs.append(logprob)
            sequence.finish_reason = self._finish_reason(sequence)

    def _finish_reason(self, sequence: Sequence) -> str:
        sampling = sequence.sampling
        if sequence.ids[-1] in self.eos_ids:
            return "eos"
        if sampling.stop and self._hit_stop(sequence):
            return "stop"
        if len(sequence.ids) >= sampling.max_new_tokens:
            return "length"
        return "context" if len(sequence.ids) >= sequence.limit else ""

    def _hit_stop(self, sequence: Sequence) -> bool:
        stops = sequence.sampling.stop
        # A character takes up to four byte tokens; the newest token completes the stop string.
        window = 4 * max(map(len, stops)) + 4
        tail = self.decode(sequence.ids[-window:])
        return any(stop in tail for stop in stops)


def _choose(sequences: Many[Sequence], logits: Any, logprobs: Any) -> Any:
    """Token ids (sequences,): the largest logit, or a draw by inverse CDF."""
    drawn = logits.argmax(-1)
    for row, sequence in enumerate(sequences):
        if sequence.sampling.repetition_penalty != 1 and sequence.sampling.temperature == 0:
            drawn[row] = _penalised(sequence, logits[row]).argmax()
    random_rows = [row for row, s in enumerate(sequences) if s.sampling.temperature > 0]
    if random_rows:
        index = torch.tensor(random_rows, device=logits.device)
        chances = [sequences[row].draws.random() for row in random_rows]
        plain = logprobs[index].exp()  # (random rows, vocabulary)
        for place, row in enumerate(random_rows):
            if _is_cut(sequences[row].sampling):
                plain[place] = _cut_probabilities(sequences[row], logits[row])
        drawn[index] = _inverse_cdf(plain, chances)
    return drawn


def _inverse_cdf(plain: Any, chances: Many[float]) -> Any:
    """The token (rows,) where the sum of probabilities (rows, vocabulary) exceeds each chance.

    Summed by chunks and then within one chunk, so that only these few sums need double precision.
    """
    size = plain.shape[1]
    chunks = plain[:, : size - size % _CHUNK].unflatten(1, (-1, _CHUNK)).sum(2)
    rest = plain[:, size - size % _CHUNK :].sum(1, keepdim=True)
    until = torch.cat([chunks, rest], 1).double().cumsum(1)  # (rows, chunks + 1)
    wanted = torch.tensor(chances, dtype=torch.double, device=plain.device).unsqueeze(1)
    chunk, before = _first_above(until, wanted * until[:, -1:])
    tokens = chunk * _CHUNK + torch.arange(_CHUNK, device=plain.device)  # (rows, chunk)
    inside = plain.gather(1, tokens.clamp(max=size - 1)).double() * (tokens < size)
    found, _ = _first_above(inside.cumsum(1), before)
    return tokens.gather(1, found).squeeze(1).clamp(max=size - 1)


def _first_above(sums: Any, wanted: Any) -> tuple[Any, Any]:
    """The first of the rising `sums` (rows, n) above `wanted` (rows, 1), and by how much `wanted`
    is above the sum before it. Rounding must not lead to one that adds nothing."""
    most = torch.nextafter(sums[:, -1:], torch.zeros_like(wanted))
    wanted = torch.minimum(wanted, most).clamp(min=0)
    index = torch.searchsorted(sums, wanted, right=True)
    index = index.clamp(max=sums.shape[1] - 1)  # beyond the last where something is NaN
    before = torch.where(index > 0, sums.gather(1, (index - 1).clamp(min=0)), 0.0)
    return index, wanted - before


def _is_cut(sampling: Sampling) -> bool:
    return (
        sampling.top_p < 1
        or sampling.top_k > 0
        or sampling.min_p > 0
        or sampling.repetition_penalty != 1
    )


def _penalised(sequence: Sequence, logits: Any) -> Any:
    penalty = sequence.sampling.repetition_penalty
    if penalty == 1:
        return logits
    seen = torch.tensor([[*sequence.prompt, *sequence.ids]], device=logits.device)
    return RepetitionPenaltyLogitsProcessor(penalty)(seen, logits.unsqueeze(0))[0]


def _cut_probabilities(sequence: Sequence, logits: Any) -> Any:
    """Probabilities (vocabulary,) after penalty, temperature, top-k, top-p and min-p, in the order
    of `model.generate`."""
    sampling = sequence.sampling
    scores = (_penalised(sequence, logits) / sampling.temperature).unsqueeze(0)
    empty = torch.zeros(1, 0, dtype=torch.long, device=logits.device)
    if sampling.top_k > 0:
        scores = TopKLogitsWarper(sampling.top_k)(empty, scores)
    if sampling.top_p < 1:
        scores = TopPLogitsWarper(sampling.top_p)(empty, scores)
    if sampling.min_p > 0:
        scores = MinPLogitsWarper(sampling.min_p)(empty, scores)
    return scores[0].softmax(-1)
