"""The in-process sampler: one thread that owns the model while sessions are served.

Requests join and leave the batch at every step. A request's result depends on its prompt, sampling
and seed, and on what else is in the batch only through rounding.
"""

from __future__ import annotations

import logging
import queue
import random
import threading
from collections.abc import Sequence
from concurrent.futures import Future, InvalidStateError
from typing import TYPE_CHECKING, Any

import torch

from toolbrain_core.errors import SamplerFailure
from toolbrain_core.roles import Sampled
from toolbrain_core.traces import Sampling

from . import drawing
from .drawing import Batch
from .memory import trim_heap
from .openmp import release_workers

if TYPE_CHECKING:
    from .policy import TransformersPolicy

log = logging.getLogger(__name__)

#: Seconds that an empty batch waits for more requests after the first, so that attempts which
#: start together are prefilled together.
_GATHER = 0.003


class InProcessSampler:
    """Samples on a thread of its own, with the policy's own weights.

    The policy's `new_batch()` is called on that thread when serving begins, inside its
    `sampling_context()`, which holds for as long as it serves (autocast, attention);
    `policy.max_batch` sequences decode at once.
    """

    def __init__(self) -> None:
        self.failure: SamplerFailure | None = None
        self._policy: Any = None
        self._requests: queue.Queue[drawing.Sequence | None] = queue.Queue()
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

    def check(self, policy: TransformersPolicy) -> None:
        """Every policy can be served."""

    def update_weights(self, policy: TransformersPolicy) -> None:
        """Nothing has to move: the weights are the policy's."""
        self._policy = policy

    def start(self) -> None:
        """Begin to serve. The model must be left alone until `stop()` returns."""
        self.failure = None
        self._requests, self._stopping = queue.Queue(), threading.Event()
        release_workers()
        trim_heap()  # what training freed
        self._thread = threading.Thread(target=self._serve, name="toolbrain-sampler", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End serving, once the model is free; what is in flight fails with `SamplerFailure`."""
        if self._thread is not None:
            self._stopping.set()
            self._requests.put(None)  # wakes a sampler that waits for requests
            self._thread.join()
            self._thread = None
            trim_heap()  # what sampling freed

    def generate(self, prompt_ids: Sequence[int], sampling: Sampling, seed: int) -> Future[Sampled]:
        """Queue one request. Cancelling the future frees its place.

        Errors: `SamplerFailure` where the sampler is not serving.
        """
        if self._thread is None or not self._thread.is_alive():
            raise SamplerFailure("the sampler is not serving: chat inside `with policy.serving():`")
        future: Future[Sampled] = Future()
        room = self._policy.context_length - len(prompt_ids)
        self._requests.put(
            drawing.Sequence(tuple(prompt_ids), sampling, room, random.Random(seed), future)
        )
        return future

    def _serve(self) -> None:
        batch: Batch | None = None
        requests, stopping = self._requests, self._stopping
        try:
            with torch.no_grad(), self._policy.sampling_context():
                batch = self._policy.new_batch()
                while self._admit(batch, requests) and not stopping.is_set():
                    if batch.sequences:
                        self._answer(batch.step())
        except BaseException as error:  # the thread's boundary: whoever waits must hear of it
            log.exception("the sampler stopped")
            self.failure = SamplerFailure(f"the sampler failed: {type(error).__name__}: {error}")
            _fail_all(batch, requests, str(self.failure))
        else:
            _fail_all(batch, requests, "the sampler was stopped")
        finally:
            if batch is not None:
                batch.release()

    def _admit(self, batch: Batch, requests: queue.Queue[drawing.Sequence | None]) -> bool:
        """Take waiting requests in; waits while there is nothing to do. False: stop serving."""
        batch.drop_cancelled()
        arrived: list[drawing.Sequence] = []
        while len(batch.sequences) + len(arrived) < self._policy.max_batch:
            wait = 0.0 if batch.sequences else (_GATHER if arrived else None)
            try:
                item = requests.get(block=wait != 0.0, timeout=wait)
            except queue.Empty:
                break
            if item is None:
                for sequence in arrived:
                    _fail(sequence.future, "the sampler was stopped")
                return False
            if not item.future.cancelled():
                arrived.append(item)
        if arrived:
            try:
                self._answer(batch.add(arrived))
            except BaseException as error:
                for sequence in arrived:
                    _fail(sequence.future, f"the sampler failed: {type(error).__name__}: {error}")
                raise
        return True

    def _answer(self, ended: list[drawing.Sequence]) -> None:
        version = self._policy.weights_version
        for sequence in ended:
            result = Sampled(
                tuple(sequence.ids), tuple(sequence.logprobs), sequence.finish_reason, version
            )
            try:
                sequence.future.set_result(result)
            except InvalidStateError:  # cancelled a moment ago
                log.debug("a request was cancelled when it ended")


def _fail_all(
    batch: Batch | None, requests: queue.Queue[drawing.Sequence | None], reason: str
) -> None:
    for sequence in batch.sequences if batch else ():
        _fail(sequence.future, reason)
    while True:
        try:
            item = requests.get_nowait()
        except queue.Empty:
            return
        if item is not None:
            _fail(item.future, reason)


def _fail(future: Future[Sampled], reason: str) -> None:
    try:
        future.set_exception(SamplerFailure(reason))
    except InvalidStateError:  # cancelled, or answered a moment ago
        log.debug("a request had already ended")
