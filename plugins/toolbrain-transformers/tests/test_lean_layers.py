"""Layers run together must compute what they compute apart."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from typing import Any

import peft
import pytest
import torch
from toolbrain_transformers.lean_layers import lean_layers
from transformers import Gemma3ForCausalLM, Gemma3TextConfig, Qwen2Config, Qwen2ForCausalLM

IDS = torch.tensor([[5, 9, 2, 7, 7, 1], [3, 3, 8, 1, 0, 4]])
SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}


@pytest.fixture(params=["qwen2, with biases", "gemma3"])
def base(request: Any) -> Any:
    torch.manual_seed(0)
    if request.param == "gemma3":
        return Gemma3ForCausalLM(Gemma3TextConfig(**SIZES)).eval()
    model = Qwen2ForCausalLM(Qwen2Config(**SIZES)).eval()
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            parameter.data.normal_()
    return model


def adapted(base: Any, target_modules: Any = "all-linear", **config: Any) -> Any:
    model = peft.get_peft_model(base, peft.LoraConfig(r=4, target_modules=target_modules, **config))
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data.normal_(0, 0.3)
    return model


def outcome(model: Any, inner: Any, lean: bool) -> tuple[Any, Any]:
    """Logits, and the gradients of what is trained."""
    model.zero_grad(set_to_none=True)
    with lean_layers(inner, fixed=False) if lean else nullcontext():
        logits = model(input_ids=IDS).logits
        logits.square().mean().backward()
    return logits.detach(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("target_modules", ["all-linear", ["q_proj", "v_proj", "down_proj"]])
def test_logits_and_gradients_with_lora(base: Any, target_modules: Any) -> None:
    model = adapted(base, target_modules)
    plain, lean = outcome(model, base, lean=False), outcome(model, base, lean=True)
    torch.testing.assert_close(lean[0], plain[0])
    assert plain[1].keys() == lean[1].keys()
    for name in plain[1]:
        torch.testing.assert_close(lean[1][name], plain[1][name])


def test_logits_and_gradients_of_all_weights(base: Any) -> None:
    plain, lean = outcome(base, base, lean=False), outcome(base, base, lean=True)
    torch.testing.assert_close(lean[0], plain[0])
    for name in plain[1]:
        torch.testing.assert_close(lean[1][name], plain[1][name])


def test_an_adapter_is_switched_off_and_exchanged_inside(base: Any) -> None:
    model = adapted(base)
    model.add_adapter("second", peft.LoraConfig(r=2, target_modules="all-linear"))
    for name, parameter in model.named_parameters():
        if "lora_B.second" in name:
            parameter.data.normal_(0, 0.3)
    with model.disable_adapter():
        off = model(input_ids=IDS).logits
    model.set_adapter("second")
    second = model(input_ids=IDS).logits
    with lean_layers(base, fixed=False):
        torch.testing.assert_close(model(input_ids=IDS).logits, second)
        with model.disable_adapter():
            torch.testing.assert_close(model(input_ids=IDS).logits, off)


def test_trained_weights_are_followed(base: Any) -> None:
    """Weights laid side by side are the model's own: what trains them, changes the sampler."""
    model = adapted(base)
    with torch.no_grad():
        with lean_layers(base, fixed=True):
            model(input_ids=IDS)
        for parameter in model.parameters():
            parameter.mul_(1.1)
        with lean_layers(base, fixed=True):
            lean = model(input_ids=IDS).logits
        torch.testing.assert_close(lean, model(input_ids=IDS).logits)


def test_the_model_is_saved_and_copied_as_before(base: Any, tmp_path: Any) -> None:
    with torch.no_grad():
        before = base(input_ids=IDS).logits
        with lean_layers(base, fixed=True):
            base(input_ids=IDS)
        base.save_pretrained(tmp_path)
        again = type(base).from_pretrained(tmp_path)
        torch.testing.assert_close(again(input_ids=IDS).logits, before)
        torch.testing.assert_close(copy.deepcopy(base)(input_ids=IDS).logits, before)
    assert not any("forward" in module.__dict__ for module in base.modules())


def test_layers_that_somebody_watches_run_as_ever(base: Any) -> None:
    model = adapted(base)
    seen: list[int] = []
    watched = base.model.layers[0].mlp.gate_proj.base_layer
    watched.register_forward_hook(lambda *_: seen.append(1))
    with torch.no_grad(), lean_layers(base, fixed=True):
        model(input_ids=IDS)
    assert seen == [1]


@pytest.mark.parametrize("special", [{"use_dora": True}, {"lora_dropout": 0.5}])
def test_dora_and_dropout_run_as_ever(base: Any, special: dict[str, Any]) -> None:
    model = adapted(base, **special).eval()
    with torch.no_grad():
        plain = model(input_ids=IDS).logits
        with lean_layers(base, fixed=True):
            torch.testing.assert_close(model(input_ids=IDS).logits, plain)
