"""The in-process sampler: one thread that owns the model while sessions are served.

Requests join and leave the batch at every step; equal prompts are computed once. A request's
result depends on its prompt, sampling and seed, and on what else is in the batch only through
rounding.
"""

from __future__ import annotations

import logging
import queue
import random
import threading
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import AbstractContextManager
from typing import Any

import torch
from attrs import define, field, frozen
from transformers import DynamicCache
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from toolbrain_core.errors import SamplerFailure
from toolbrain_core.traces import Sampling

log = logging.getLogger(__name__)


@frozen
class Sampled:
    """`logprobs[i]`: natural log of the probability of `ids[i]` after temperature (at temperature
    1 for greedy decoding), before top-p, top-k and min-p."""

    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: str
    weights_version: int = 0


@define(eq=False)
class _Sequence:
    """One request in flight."""

    prompt: tuple[int, ...]
    sampling: Sampling
    limit: int  # tokens that fit the context after the prompt
    draws: random.Random
    future: Future[Sampled]
    ids: list[int] = field(factory=list)
    logprobs: list[float] = field(factory=list)
    finish_reason: str = ""

    @property
    def length(self) -> int:
        return len(self.prompt) + len(self.ids)


class InProcessSampler:
    """Samples from a model on its own thread.

    `eos_ids` end a sequence; `decode(ids)` gives text, in which stop strings are looked for;
    `context_length` is the longest sequence in tokens. `autocast` is entered on the sampler's
    thread around every forward pass. `max_batch` sequences decode at once.
    """

    def __init__(
        self,
        model: Any,
        *,
        eos_ids: Collection[int],
        decode: Callable[[Sequence[int]], str],
        context_length: int,
        autocast: Callable[[], AbstractContextManager[Any]],
        max_batch: int = 64,
        weights_version: Callable[[], int] = lambda: 0,
    ):
        self.model = model
        self.eos_ids = frozenset(eos_ids)
        self.decode = decode
        self.context_length = context_length
        self.autocast = autocast
        self.max_batch = max_batch
        self.weights_version = weights_version
        self._requests: queue.Queue[_Sequence | None] = queue.Queue()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin to serve. The model must be left alone until `stop()` returns."""
        self._requests = queue.Queue()
        self._thread = threading.Thread(target=self._serve, name="toolbrain-sampler", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End serving, once the model is free; what is in flight fails with `SamplerFailure`."""
        if self._thread is not None:
            self._requests.put(None)
            self._thread.join()
            self._thread = None

    def generate(self, prompt_ids: Sequence[int], sampling: Sampling, seed: int) -> Future[Sampled]:
        """Queue one request. Cancelling the future frees its place.

        Errors: `SamplerFailure` where the sampler is not serving.
        """
        if self._thread is None or not self._thread.is_alive():
            raise SamplerFailure("the sampler is not serving: chat inside `with policy.serving():`")
        future: Future[Sampled] = Future()
        room = self.context_length - len(prompt_ids)
        self._requests.put(
            _Sequence(tuple(prompt_ids), sampling, room, random.Random(seed), future)
        )
        return future

    def _serve(self) -> None:
        batch = _Batch(self.model, self.eos_ids, self.decode)
        try:
            with torch.no_grad(), self.autocast():
                while self._admit(batch):
                    batch.step()
                    self._answer(batch.take_finished())
        except (
            BaseException
        ) as error:  # the thread's boundary: every waiting session must hear of it
            log.exception("the sampler stopped")
            self._fail_all(batch, error)
        else:
            self._fail_all(batch, None)

    def _admit(self, batch: _Batch) -> bool:
        """Take waiting requests into the batch; waits while there is nothing to do. False: stop."""
        batch.drop_cancelled()
        arrived: list[_Sequence] = []
        while len(batch) + len(arrived) < self.max_batch:
            idle = not len(batch) and not arrived
            try:
                # An empty batch waits a moment after the first request, so that attempts which
                # start together are prefilled together.
                wait = None if idle else (0.003 if not len(batch) else 0.0)
                item = self._requests.get(block=wait != 0.0, timeout=wait)
            except queue.Empty:
                break
            if item is None:
                for sequence in arrived:
                    _fail(sequence.future, SamplerFailure("the sampler was stopped"))
                return False
            if item.future.set_running_or_notify_cancel():
                arrived.append(item)
        if arrived:
            batch.add(arrived)
            self._answer(batch.take_finished())
        return True

    def _answer(self, finished: list[_Sequence]) -> None:
        version = self.weights_version()
        for sequence in finished:
            result = Sampled(
                tuple(sequence.ids), tuple(sequence.logprobs), sequence.finish_reason, version
            )
            _resolve(sequence.future, result)

    def _fail_all(self, batch: _Batch, error: BaseException | None) -> None:
        reason = (
            f"the sampler failed: {type(error).__name__}: {error}" if error else "it was stopped"
        )
        for sequence in batch.sequences:
            _fail(sequence.future, SamplerFailure(reason))
        while True:
            try:
                item = self._requests.get_nowait()
            except queue.Empty:
                return
            if item is not None:
                _fail(item.future, SamplerFailure(reason))


def _resolve(future: Future[Sampled], result: Sampled) -> None:
    if not future.done():
        future.set_result(result)


def _fail(future: Future[Sampled], error: Exception) -> None:
    try:
        future.set_exception(error)
    except InvalidStateError:  # cancelled, or answered a moment ago
        log.debug("a request had already ended")


class _Batch:
    """The sequences being decoded, left-padded over one cache of keys and values."""

    def __init__(self, model: Any, eos_ids: frozenset[int], decode: Callable[[Sequence[int]], str]):
        self.model = model
        self.eos_ids = eos_ids
        self.decode = decode
        self.sequences: list[_Sequence] = []
        self.finished: list[_Sequence] = []
        self.cache: DynamicCache | None = None
        self.mask = torch.zeros(0, 0, dtype=torch.long)  # (sequences, cached tokens)

    def __len__(self) -> int:
        return len(self.sequences)

    def add(self, arrived: list[_Sequence]) -> None:
        """Prefill new sequences, draw their first token, and let them join."""
        prompts = sorted({s.prompt for s in arrived}, key=len)
        where = {prompt: index for index, prompt in enumerate(prompts)}
        cache, mask, logits = self._prefill(prompts)
        index = torch.tensor([where[s.prompt] for s in arrived], device=logits.device)
        self._draw(arrived, logits[index])
        alive = [i for i, s in enumerate(arrived) if not s.finish_reason]
        self.finished += [s for s in arrived if s.finish_reason]
        if alive:
            _select(cache, index[alive])
            self._join([arrived[i] for i in alive], cache, mask[index[alive]])

    def step(self) -> None:
        """One forward pass and one token for every sequence."""
        if not self.sequences or self.cache is None:
            return
        device = self.mask.device
        tokens = torch.tensor([[s.ids[-1]] for s in self.sequences], device=device)
        positions = torch.tensor([[s.length - 1] for s in self.sequences], device=device)
        self.mask = torch.cat([self.mask, self.mask.new_ones(len(self), 1)], dim=1)
        output = self.model(
            input_ids=tokens,
            attention_mask=self.mask,
            position_ids=positions,
            cache=self.cache,
            use_cache=True,
            logits_to_keep=1,
        )
        self._draw(self.sequences, output.logits[:, -1])
        self.finished += [s for s in self.sequences if s.finish_reason]
        self._keep([i for i, s in enumerate(self.sequences) if not s.finish_reason])

    def take_finished(self) -> list[_Sequence]:
        finished, self.finished = self.finished, []
        return finished

    def drop_cancelled(self) -> None:
        """Free the places of sequences whose session was closed (their future is done)."""
        self._keep([i for i, s in enumerate(self.sequences) if not s.future.done()])

    def _prefill(self, prompts: list[tuple[int, ...]]) -> tuple[DynamicCache, Any, Any]:
        device = self.model.device
        width = max(map(len, prompts))
        ids = torch.zeros(len(prompts), width, dtype=torch.long, device=device)
        mask = torch.zeros_like(ids)
        for row, prompt in enumerate(prompts):  # left padding: the last column is every last token
            ids[row, width - len(prompt) :] = torch.tensor(prompt, device=device)
            mask[row, width - len(prompt) :] = 1
        cache = DynamicCache()
        output = self.model(
            input_ids=ids,
            attention_mask=mask,
            position_ids=(mask.cumsum(1) - 1).clamp(min=0),
            cache=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        return cache, mask, output.logits[:, -1]

    def _join(self, sequences: list[_Sequence], cache: DynamicCache, mask: Any) -> None:
        if self.cache is None:
            self.sequences, self.cache, self.mask = sequences, cache, mask
            return
        width = max(self.mask.shape[1], mask.shape[1])
        for old, new in zip(self.cache.layers, cache.layers, strict=True):
            old.keys = torch.cat([_widen(old.keys, width), _widen(new.keys, width)])
            old.values = torch.cat([_widen(old.values, width), _widen(new.values, width)])
        pads = torch.nn.functional.pad
        self.mask = torch.cat([pads(m, (width - m.shape[1], 0)) for m in (self.mask, mask)])
        self.sequences = self.sequences + sequences

    def _keep(self, kept: list[int]) -> None:
        if len(kept) == len(self.sequences):
            return
        self.sequences = [self.sequences[i] for i in kept]
        if not kept or self.cache is None:
            self.cache, self.mask = None, self.mask[:0]
            return
        index = torch.tensor(kept, device=self.mask.device)
        self.mask = self.mask[index]
        spare = int(self.mask.shape[1] - self.mask.sum(1).max())  # columns that pad every row
        self.mask = self.mask[:, spare:]
        _select(self.cache, index, spare)

    def _draw(self, sequences: list[_Sequence], logits: Any) -> None:
        """Append one token to each sequence. `logits`: (sequences, vocabulary)."""
        logits = logits.float()
        scale = [s.sampling.temperature or 1.0 for s in sequences]
        scaled = logits / torch.tensor(scale, device=logits.device).unsqueeze(1)
        logprobs = scaled.log_softmax(-1)  # (sequences, vocabulary)
        tokens = self._choose(sequences, logits, logprobs)
        picked = logprobs.gather(1, tokens.unsqueeze(1)).squeeze(1)
        for sequence, token, logprob in zip(
            sequences, tokens.tolist(), picked.tolist(), strict=True
        ):
            sequence.ids.append(token)
            sequence.logprobs.append(logprob)
            sequence.finish_reason = self._finish_reason(sequence)

    def _choose(self, sequences: list[_Sequence], logits: Any, logprobs: Any) -> Any:
        """Token ids (sequences,). Each sequence draws from its own generator, by inverse CDF."""
        chances = torch.tensor([s.draws.random() for s in sequences], dtype=torch.float64)
        plain = logprobs.double().exp()
        for row, sequence in enumerate(sequences):
            if _is_cut(sequence.sampling):
                plain[row] = _cut_probabilities(sequence, logits[row])
        total = plain.cumsum(1)  # (sequences, vocabulary)
        target = chances.to(total.device).unsqueeze(1) * total[:, -1:]
        drawn = torch.searchsorted(total, target, right=True).squeeze(1)
        drawn = drawn.clamp(max=logits.shape[1] - 1)
        for row, sequence in enumerate(sequences):
            if sequence.sampling.temperature == 0:
                drawn[row] = _penalised(sequence, logits[row]).argmax()
        return drawn

    def _finish_reason(self, sequence: _Sequence) -> str:
        sampling = sequence.sampling
        if sequence.ids[-1] in self.eos_ids:
            return "eos"
        if sampling.stop and self._hit_stop(sequence):
            return "stop"
        if len(sequence.ids) >= sampling.max_new_tokens:
            return "length"
        return "context" if len(sequence.ids) >= sequence.limit else ""

    def _hit_stop(self, sequence: _Sequence) -> bool:
        stops = sequence.sampling.stop
        # A character takes up to four byte tokens; the newest token completes the stop string.
        window = 4 * max(map(len, stops)) + 4
        tail = self.decode(sequence.ids[-window:])
        return any(stop in tail for stop in stops)


def _is_cut(sampling: Sampling) -> bool:
    return sampling.temperature > 0 and (
        sampling.top_p < 1
        or sampling.top_k > 0
        or sampling.min_p > 0
        or sampling.repetition_penalty != 1
    )


def _penalised(sequence: _Sequence, logits: Any) -> Any:
    penalty = sequence.sampling.repetition_penalty
    if penalty == 1:
        return logits
    seen = torch.tensor([[*sequence.prompt, *sequence.ids]], device=logits.device)
    return RepetitionPenaltyLogitsProcessor(penalty)(seen, logits.unsqueeze(0))[0]


def _cut_probabilities(sequence: _Sequence, logits: Any) -> Any:
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
    return scores[0].double().softmax(-1)


def _select(cache: DynamicCache, index: Any, skip: int = 0) -> None:
    """Keep the rows of `index`, without the first `skip` positions."""
    for layer in cache.layers:
        layer.keys = layer.keys[index, :, skip:]
        layer.values = layer.values[index, :, skip:]


def _widen(states: Any, width: int) -> Any:
    """Pad (rows, heads, tokens, dim) on the left to `width` tokens."""
    return torch.nn.functional.pad(states, (0, 0, width - states.shape[2], 0))
