"""Log-probabilities of recorded tokens: the one place where training looks at the model.

Policy, old policy and reference all go through a `Forward`, made once for a piece of rows: over
the rows' prefix tree, every distinct token once, or over padded rows for models that the tree
cannot serve. Both run the model's own forward; its output head sees only the states that are
wanted, some at a time, so that there is never a (trained tokens, vocabulary) tensor.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from attrs import frozen
from torch.utils.checkpoint import checkpoint

from toolbrain_core.errors import NotServed
from toolbrain_core.roles import Row

from .prefix_tree import PrefixTree
from .tree_attention import TrainingTree, dummy_mask

#: Tokens whose distributions are computed at once.
_CHUNK = 256


@frozen
class Scores:
    """One value per trained token, row by row: both (trained tokens,)."""

    logprobs: Any
    entropies: Any


class Forward(Protocol):
    """One forward pass over fixed rows."""

    def score(
        self, model: Any, temperature: float = 1.0, entropy_gradient: bool = False
    ) -> Scores: ...


def forward_of(rows: Sequence[Row], device: Any, tree: bool, pad_id: int = 0) -> Forward:
    """The forward pass of these rows; each has at least one trained token, never its first."""
    return TreeForward.of(rows, device) if tree else PaddedForward.of(rows, device, pad_id)


def cost_of(rows: Sequence[Row], tree: bool) -> int:
    """Tokens in the forward pass of these rows: distinct ones, or padded ones."""
    if not rows:
        return 0
    inputs = [_inputs(row) for row in rows]
    return len(PrefixTree.of(inputs)) if tree else len(rows) * max(map(len, inputs))


def _inputs(row: Row) -> tuple[int, ...]:
    """What the model must read: all before the last trained token."""
    last = max(index for index, trained in enumerate(row.trained) if trained)
    return row.ids[:last]


@frozen(eq=False)
class TreeForward:
    """Rows as one flat prefix tree. `before` (trained tokens,) is the flat index of the token
    before each trained one, `targets` its id."""

    ids: Any  # (1, distinct tokens)
    positions: Any  # (1, distinct tokens)
    context: TrainingTree
    before: Any
    targets: Any

    @classmethod
    def of(cls, rows: Sequence[Row], device: Any) -> TreeForward:
        tree = PrefixTree.of([_inputs(row) for row in rows])
        before: list[int] = []
        targets: list[int] = []
        for number, row in enumerate(rows):
            places = tree.places(number)
            wanted = [index for index, trained in enumerate(row.trained) if trained]
            before += [places[index - 1] for index in wanted]
            targets += [row.ids[index] for index in wanted]
        return cls(
            torch.tensor([tree.ids], device=device),
            torch.tensor([tree.positions], device=device),
            TrainingTree(tree),
            torch.tensor(before, device=device),
            torch.tensor(targets, device=device),
        )

    def score(self, model: Any, temperature: float = 1.0, entropy_gradient: bool = False) -> Scores:
        """See `Forward`. The model's attention must be `tree_attending`."""
        inputs = {
            "input_ids": self.ids,
            "position_ids": self.positions,
            "attention_mask": dummy_mask(self.ids.shape[1], self.ids.device),
            "toolbrain_tree": self.context,
        }
        states, head = _states_and_head(model, inputs)
        wanted = states[0, self.before]
        return _scores(head, wanted, self.targets, temperature, entropy_gradient)


@frozen(eq=False)
class PaddedForward:
    """Rows padded on the right. `before` (rows, tokens) marks the token before each trained one."""

    ids: Any  # (rows, tokens)
    mask: Any  # (rows, tokens)
    before: Any
    targets: Any

    @classmethod
    def of(cls, rows: Sequence[Row], device: Any, pad_id: int) -> PaddedForward:
        inputs = [_inputs(row) for row in rows]
        width = max(map(len, inputs))

        def padded(columns: list[list[Any]], value: Any) -> Any:
            full = [column + [value] * (width - len(column)) for column in columns]
            return torch.tensor(full, device=device)

        before = [list(row.trained[1 : len(i) + 1]) for row, i in zip(rows, inputs, strict=True)]
        targets = [t for row in rows for t, w in zip(row.ids, row.trained, strict=True) if w]
        return cls(
            padded([list(i) for i in inputs], pad_id),
            padded([[1] * len(i) for i in inputs], 0),
            padded(before, False),
            torch.tensor(targets, device=device),
        )

    def score(self, model: Any, temperature: float = 1.0, entropy_gradient: bool = False) -> Scores:
        """See `Forward`."""
        inputs = {
            "input_ids": self.ids,
            "attention_mask": self.mask,
            "position_ids": (self.mask.cumsum(1) - 1).clamp(min=0),
        }
        states, head = _states_and_head(model, inputs)
        return _scores(head, states[self.before], self.targets, temperature, entropy_gradient)


#: Logits (tokens, vocabulary) of last hidden states (tokens, width).
Head = Callable[[Any], Any]


def _scores(
    head: Head, states: Any, targets: Any, temperature: float, entropy_gradient: bool
) -> Scores:
    """By chunks of tokens, which the backward pass computes again."""
    pieces = [
        checkpoint(_chunk_scores, head, *chunk, temperature, entropy_gradient, use_reentrant=False)
        for chunk in zip(states.split(_CHUNK), targets.split(_CHUNK), strict=True)
    ]
    logprobs, entropies = zip(*pieces, strict=True)
    return Scores(torch.cat(logprobs), torch.cat(entropies))


def _chunk_scores(
    head: Head, states: Any, targets: Any, temperature: float, entropy_gradient: bool
) -> tuple[Any, Any]:
    logits = head(states)
    exact = logits.to(torch.promote_types(logits.dtype, torch.float32))
    logprobs = (exact / temperature).log_softmax(-1)  # (tokens, vocabulary)
    spread = logprobs if entropy_gradient else logprobs.detach()
    entropies = -(spread.exp() * spread).sum(-1)
    return logprobs.gather(1, targets.unsqueeze(1)).squeeze(1), entropies


def _states_and_head(model: Any, inputs: dict[str, Any]) -> tuple[Any, Head]:
    """The last hidden states (rows, tokens, width), and what the model makes of such states: its
    output head with whatever scales or caps its logits.

    The model runs once with a decoder that hands nothing to the head, and then, for each call of
    the head, with one that has been replaced by its result.
    """
    inner = unwrapped(model)
    decoder = inner.base_model
    if decoder is inner:
        raise NotServed(f"{type(inner).__name__} has no decoder apart from its output head")
    outputs: list[Any] = []

    def keep(_module: Any, _args: Any, output: Any) -> Any:
        outputs.append(output)
        return _with_states(output, output[0][:, :0])

    handle = decoder.register_forward_hook(keep)
    try:
        model(**inputs, use_cache=False, **_text_only(model, inputs["input_ids"]))
    finally:
        handle.remove()
    [output] = outputs

    def head(states: Any) -> Any:
        given = _with_states(output, states.unsqueeze(0))
        with _replaced_forward(decoder, lambda *_, **__: given):
            return inner(input_ids=inputs["input_ids"][:1], use_cache=False).logits[0]

    return output[0], head


def _with_states(output: Any, states: Any) -> Any:
    """A decoder's output with other last hidden states."""
    if isinstance(output, tuple):
        return (states, *output[1:])
    return type(output)(**{**output, "last_hidden_state": states})


@contextmanager
def _replaced_forward(module: Any, forward: Callable[..., Any]) -> Iterator[None]:
    before = vars(module).get("forward")  # some libraries put one there
    module.forward = forward
    try:
        yield
    finally:
        del module.forward
        if before is not None:
            module.forward = before


def unwrapped(model: Any) -> Any:
    """The Hugging Face model inside a DDP and a PEFT wrapper."""
    inner = model.module if isinstance(model, torch.nn.parallel.DistributedDataParallel) else model
    return inner.get_base_model() if hasattr(inner, "get_base_model") else inner


def _text_only(model: Any, ids: Any) -> dict[str, Any]:
    """Image-text models ask in training which tokens are images: none."""
    inner = unwrapped(model)
    if getattr(inner.config, "vision_config", None) is None:
        return {}
    names = inspect.signature(inner.forward).parameters
    return {
        name: torch.zeros_like(ids)
        for name in ("token_type_ids", "mm_token_type_ids")
        if name in names
    }
