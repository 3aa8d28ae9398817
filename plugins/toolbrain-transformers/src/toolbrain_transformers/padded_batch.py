"""Decoding over one left-padded cache: for models that the prefix tree cannot serve."""

from __future__ import annotations

from typing import Any

import torch
from transformers import DynamicCache

from .drawing import Drawer, Sequence


class PaddedBatch:
    """Sequences left-padded over one cache of keys and values. Equal prompts are prefilled once."""

    def __init__(self, model: Any, drawer: Drawer):
        self.model = model
        self.drawer = drawer
        self.sequences: list[Sequence] = []
        self.cache: DynamicCache | None = None
        self.mask = torch.zeros(0, 0, dtype=torch.long, device=model.device)  # (sequences, cached)

    def add(self, arrived: list[Sequence]) -> list[Sequence]:
        """See `Batch.add`."""
        prompts = sorted({s.prompt for s in arrived}, key=len)
        where = {prompt: index for index, prompt in enumerate(prompts)}
        cache, mask, logits = self._prefill(prompts)
        index = torch.tensor([where[s.prompt] for s in arrived], device=logits.device)
        self.drawer.draw(arrived, logits[index])
        alive = [i for i, s in enumerate(arrived) if not s.finish_reason]
        if alive:
            _select(cache, index[alive])
            self._join([arrived[i] for i in alive], cache, mask[index[alive]])
        return [s for s in arrived if s.finish_reason]

    def step(self) -> list[Sequence]:
        """See `Batch.step`."""
        device = self.mask.device
        self.mask = torch.cat([self.mask, self.mask.new_ones(len(self.sequences), 1)], dim=1)
        output = self.model(
            input_ids=torch.tensor([[s.ids[-1]] for s in self.sequences], device=device),
            attention_mask=self.mask,
            position_ids=torch.tensor([[s.length - 1] for s in self.sequences], device=device),
            cache=self.cache,
            use_cache=True,
            logits_to_keep=1,
        )
        self.drawer.draw(self.sequences, output.logits[:, -1])
        ended = [s for s in self.sequences if s.finish_reason]
        self._keep([i for i, s in enumerate(self.sequences) if not s.finish_reason])
        return ended

    def drop_cancelled(self) -> None:
        """See `Batch.drop_cancelled`."""
        self._keep([i for i, s in enumerate(self.sequences) if not s.future.done()])

    def release(self) -> None:
        """See `Batch.release`."""
        self.sequences, self.cache = [], None

    def _prefill(self, prompts: list[tuple[int, ...]]) -> tuple[DynamicCache, Any, Any]:
        device = self.model.device
        width = max(map(len, prompts))
        ids = torch.zeros(len(prompts), width, dtype=torch.long, device=device)
        mask = torch.zeros_like(ids)
        for row, prompt in enumerate(prompts):  # on the left, so that every last token is in line
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

    def _join(self, sequences: list[Sequence], cache: DynamicCache, mask: Any) -> None:
        if self.cache is None:
            self.sequences, self.cache, self.mask = sequences, cache, mask
            return
        width = max(self.mask.shape[1], mask.shape[1])
        for old, new in zip(self.cache.layers, cache.layers, strict=True):
            old.keys = torch.cat([_widen(old.keys, width), _widen(new.keys, width)])
            old.values = torch.cat([_widen(old.values, width), _widen(new.values, width)])
        pad = torch.nn.functional.pad
        self.mask = torch.cat([pad(m, (width - m.shape[1], 0)) for m in (self.mask, mask)])
        self.sequences = self.sequences + sequences

    def _keep(self, kept: list[int]) -> None:
        if len(kept) == len(self.sequences):
            return
        self.sequences = [self.sequences[i] for i in kept]
        if not kept or self.cache is None:
            self.cache, self.mask = None, self.mask[:0]
            return
        index = torch.tensor(kept, device=self.mask.device)
        mask = self.mask[index]
        spare = int(mask.shape[1] - mask.sum(1).max())  # columns that pad every row
        self.mask = mask[:, spare:]
        _select(self.cache, index, spare)


def _select(cache: DynamicCache, index: Any, skip: int = 0) -> None:
    """Keep the rows of `index`, without the first `skip` positions."""
    for layer in cache.layers:
        layer.keys = layer.keys[index, :, skip:]
        layer.values = layer.values[index, :, skip:]


def _widen(states: Any, width: int) -> Any:
    """Pad (rows, heads, tokens, dim) on the left to `width` tokens."""
    return torch.nn.functional.pad(states, (0, 0, width - states.shape[2], 0))
