"""Sampling over the tree of cached keys and values, against the model by itself."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from toolbrain_transformers.policy import TransformersPolicy

from toolbrain_core.roles import ModelRef, Sampled
from toolbrain_core.traces import Sampling

NEW = 12


@pytest.fixture(scope="module")
def model(make_small: Callable[..., Any]) -> Any:
    return make_small(max_position_embeddings=1024, initializer_range=0.2)


@pytest.fixture
def sampling(model: Any, tokenizer: Any) -> Callable[..., Any]:
    """A sampler that knows no end of sequence, while it serves. `options` are the policy's."""

    @contextmanager
    def served(**options: Any) -> Iterator[Any]:
        ref = ModelRef(kind="transformers", model=model, processor=tokenizer, name="tiny")
        policy = TransformersPolicy(ref, lora=None, tree="require", **options)
        policy.eos_ids = frozenset()
        with policy.serving():
            yield policy.sampler

    return served


def prompts() -> list[tuple[int, ...]]:
    """50 of mixed lengths: a part that all share, parts that some share, duplicates, prefixes of
    one another, and some that share nothing."""
    draw = random.Random(0)

    def some(count: int) -> tuple[int, ...]:
        return tuple(draw.randrange(96) for _ in range(count))

    shared = some(130)
    parts = [some(n) for n in (3, 20, 110, 150)]
    made = [shared + part + some(n) for part in parts for n in (1, 5, 40, 100, 300)]
    made += [shared + part for part in parts for _ in range(3)]
    made += [some(n) for n in (1, 2, 17, 100, 140, 290)]
    made += [shared, shared[:60], shared[:125], made[0][:-1]]
    return made + draw.choices(made, k=50 - len(made))


def greedy_alone(model: Any, prompt: tuple[int, ...]) -> list[int]:
    ids = torch.tensor([prompt])
    output = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),  # else it is guessed from the padding token's id
        max_new_tokens=NEW,
        do_sample=False,
        eos_token_id=None,
    )
    return [int(token) for token in output[0, len(prompt) :]]


def fresh_logprobs(model: Any, prompt: tuple[int, ...], ids: tuple[int, ...]) -> Any:
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([[*prompt, *ids]])).logits[0]
    return logits.log_softmax(-1)[len(prompt) - 1 : -1].gather(1, torch.tensor([ids]).T)[:, 0]


def agree(model: Any, prompt: tuple[int, ...], sampled: tuple[int, ...]) -> bool:
    """Whether greedy ids are those of `generate`, up to where the two best logits are as good as
    equal."""
    alone = greedy_alone(model, prompt)
    differ = [i for i, (a, b) in enumerate(zip(sampled, alone, strict=True)) if a != b]
    if not differ:
        return True
    with torch.no_grad():
        ids = torch.tensor([[*prompt, *alone[: differ[0]]]])
        best = model(input_ids=ids).logits[0, -1].topk(2).values
    return float(best[0] - best[1]) < 1e-4


def test_greedy_ids_of_fifty_prompts_at_once_are_those_of_generate(
    model: Any, sampling: Any
) -> None:
    wanted = Sampling(temperature=0.0, max_new_tokens=NEW)
    with sampling() as sampler:
        asked = [sampler.generate(prompt, wanted, seed=0) for prompt in prompts()]
        answers = [future.result(timeout=120) for future in asked]
    assert len(answers) == 50
    for prompt, answer in zip(prompts(), answers, strict=True):
        assert agree(model, prompt, answer.ids)
        fresh = fresh_logprobs(model, prompt, answer.ids)
        torch.testing.assert_close(torch.tensor(answer.logprobs), fresh, atol=1e-4, rtol=0)


@pytest.mark.parametrize("max_cache_bytes", [1 << 30, 0])
def test_log_probabilities_of_conversations_that_branch(
    model: Any, sampling: Any, max_cache_bytes: int
) -> None:
    """Six attempts at each of two tasks, four turns, with what tools said in between."""
    draw = random.Random(1)
    said = [tuple(draw.randrange(96) for _ in range(n)) for n in (7, 120, 30)]
    shared = tuple(draw.randrange(96) for _ in range(140))
    tasks = [shared + tuple(draw.randrange(96) for _ in range(n)) for n in (9, 105)]
    histories = [(task, seed) for task in tasks for seed in range(6)]
    wanted = Sampling(temperature=1.0, max_new_tokens=NEW)
    compared = 0
    with sampling(max_cache_bytes=max_cache_bytes) as sampler:
        for turn in range(4):
            asked: list[Future[Sampled]] = [
                sampler.generate(prompt, wanted, seed=seed + 10 * turn)
                for prompt, seed in histories
            ]
            answers = [future.result(timeout=120) for future in asked]
            for (prompt, _), answer in zip(histories, answers, strict=True):
                fresh = fresh_logprobs(model, prompt, answer.ids)
                torch.testing.assert_close(torch.tensor(answer.logprobs), fresh, atol=1e-4, rtol=0)
                compared += len(answer.ids)
            histories = [
                (prompt + answer.ids + (said[turn] if turn < 3 else ()), seed)
                for (prompt, seed), answer in zip(histories, answers, strict=True)
            ]
    assert compared == 12 * 4 * NEW


@pytest.fixture
def read(model: Any) -> Iterator[list[int]]:
    """Tokens that the model read, one number for each forward pass."""
    counts: list[int] = []
    handle = model.get_input_embeddings().register_forward_hook(
        lambda _module, args, _output: counts.append(args[0].numel())
    )
    yield counts
    handle.remove()


def test_a_next_turn_goes_on_where_the_last_one_stopped(sampling: Any, read: list[int]) -> None:
    prompt = tuple(range(90)) * 2
    wanted = Sampling(temperature=0.0, max_new_tokens=NEW)
    with sampling() as sampler:
        for turn in range(4):
            read.clear()
            answer = sampler.generate(prompt, wanted, seed=0).result(timeout=120)
            if turn:  # the last token sampled before and five new ones
                assert read[0] == 6
            prompt = prompt + answer.ids + (1, 2, 3, 4, 5)


def test_conversations_that_begin_alike_are_all_kept(sampling: Any, read: list[int]) -> None:
    """However short what they share is."""
    tails = [tuple((7 * i + n) % 96 for i in range(20)) for n in range(3)]
    prompts = [(1, 2, 3, *tail) for tail in tails]
    wanted = Sampling(temperature=0.0, max_new_tokens=NEW)
    with sampling() as sampler:
        prompts = [p + sampler.generate(p, wanted, seed=0).result(120).ids + (5,) for p in prompts]
        for prompt in prompts:
            read.clear()
            sampler.generate(prompt, wanted, seed=0).result(timeout=120)
            assert read[0] == 2  # the last token sampled before and the new one
