"""Real parts: tiny random models with SmolLM2's tokenizer, behind a real policy."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from toolbrain_transformers.policy import TransformersPolicy
from toolbrain_transformers.testing import tiny_model
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from toolbrain_core.roles import AttemptKey, ChatReply, ChatRequest, ModelRef

torch.set_num_threads(1)

GEMMA_LAYERS = ["sliding_attention", "full_attention", "sliding_attention"]


@pytest.fixture(scope="module", params=["gemma3", "llama", "mistral", "qwen3"])
def make_small(request: pytest.FixtureRequest) -> Callable[..., Any]:
    """A small random model of each architecture that the tree serves; options are its config's.

    Mistral attends within a window, Gemma-3 in all layers but the second.
    """
    classes: dict[str, tuple[Any, Any, dict[str, Any]]] = {
        "gemma3": (Gemma3ForCausalLM, Gemma3TextConfig, {"layer_types": GEMMA_LAYERS}),
        "llama": (LlamaForCausalLM, LlamaConfig, {}),
        "mistral": (MistralForCausalLM, MistralConfig, {}),
        "qwen3": (Qwen3ForCausalLM, Qwen3Config, {}),
    }
    model_class, config_class, own = classes[request.param]
    if request.param in ("gemma3", "mistral"):
        own["sliding_window"] = 7

    def make(**options: Any) -> Any:
        torch.manual_seed(0)
        config = config_class(
            vocab_size=96,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,
            **own,
            **options,
        )
        return model_class(config).eval()

    return make


@pytest.fixture
def with_template(tokenizer: Any) -> Callable[[str | None], Any]:
    """A copy of the tokenizer with another chat template."""

    def changed(template: str | None) -> Any:
        own = copy.deepcopy(tokenizer)
        own.chat_template = template
        return own

    return changed


@pytest.fixture(scope="session")
def make_model(tokenizer: Any) -> Callable[..., Any]:
    """A tiny random Llama with its probability spread wide. Options are `tiny_model`'s."""
    defaults = {"spread": 1.0, "eos_logit": 0.0, "initializer_range": 0.2}

    def make(**options: Any) -> Any:
        return tiny_model(tokenizer, **{**defaults, **options})

    return make


@pytest.fixture(scope="session")
def make_policy(make_model: Callable[..., Any], tokenizer: Any) -> Callable[..., Any]:
    """A policy on a fresh tiny model, or on `model`, in fp32 on every machine unless `dtype` says
    otherwise. Further options are the policy's."""

    def make(
        model: Any = None,
        processor: Any = None,
        defaults: dict[str, Any] | None = None,
        template_options: dict[str, Any] | None = None,
        **options: Any,
    ) -> TransformersPolicy:
        ref = ModelRef(
            kind="transformers",
            model=make_model() if model is None else model,
            processor=processor or tokenizer,
            defaults=defaults or {"max_new_tokens": 8},
            template_options=template_options or {},
            name="tiny-llama",
        )
        return TransformersPolicy(ref, **{"dtype": "fp32", **options})

    return make


@pytest.fixture(scope="session")
def policy(make_policy: Callable[..., Any]) -> Any:
    """A policy that tests only sample from."""
    return make_policy()


@pytest.fixture(scope="session")
def key() -> Callable[..., AttemptKey]:
    return lambda attempt=0, seed=0: AttemptKey("run", 0, "task", attempt, seed)


@pytest.fixture(scope="session")
def user() -> Callable[..., ChatRequest]:
    """A request of one user message; further options are the request's."""

    def request(text: str, **options: Any) -> ChatRequest:
        return ChatRequest(({"role": "user", "content": text},), **options)

    return request


@pytest.fixture(scope="session")
def follow_up() -> Callable[..., ChatRequest]:
    """The request that goes on from an answered one."""

    def request(before: ChatRequest, reply: ChatReply, text: str, **options: Any) -> ChatRequest:
        answered = {"role": "assistant", "content": reply.text}
        messages = (*before.messages, answered, {"role": "user", "content": text})
        return ChatRequest(messages, **options)

    return request


@pytest.fixture(scope="session")
def fresh_logprobs() -> Callable[..., Any]:
    """Log-probabilities of a turn's sampled tokens by one plain forward pass."""

    def score(model: Any, turn: Any) -> torch.Tensor:
        ids = torch.tensor([[*turn.prompt_ids, *turn.completion_ids]])
        with torch.no_grad():
            logits = model(input_ids=ids).logits[0].double()  # (tokens, vocabulary)
        logprobs = (logits / (turn.sampling.temperature or 1.0)).log_softmax(-1)
        before = logprobs[len(turn.prompt_ids) - 1 : -1]
        return before.gather(1, ids[0, len(turn.prompt_ids) :, None])[:, 0].float()

    return score


@pytest.fixture(scope="session")
def teach() -> Callable[..., None]:
    """Train a tiny model until it writes `answer` after `prompt` (both ids), decoded greedily."""

    def train(model: Any, prompt: list[int], answer: list[int]) -> None:
        ids, targets = torch.tensor([[*prompt, *answer]]), torch.tensor(answer)
        optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
        for _ in range(60):
            logits = model(input_ids=ids, logits_to_keep=len(answer) + 1).logits[0, :-1]
            loss = torch.nn.functional.cross_entropy(logits, targets)
            if loss < 0.02:
                break
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        assert loss < 0.1, f"the tiny model did not learn its line: loss {loss}"

    return train
