"""What the policy computes in, and what becomes of the model's weights."""

from __future__ import annotations

import copy
import logging
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from toolbrain_core.errors import ConfigurationError
from toolbrain_core.traces import Sampling

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16


@pytest.fixture
def hardware(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Says what PyTorch finds out about the CPU."""

    def found(bf16: bool) -> None:
        monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: bf16)
        monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)

    return found


def trained_dtypes(policy: Any) -> set[torch.dtype]:
    return {p.dtype for p in policy.model.parameters() if p.requires_grad}


def words(policy: Any) -> tuple[str, str]:
    facts = policy.describe()
    return facts["dtype"], facts["compute_dtype"]


@pytest.mark.parametrize(
    ("loaded", "asked", "bf16", "expected"),
    [
        (FP32, "auto", True, BF16),
        (FP32, "auto", False, FP32),
        (BF16, "auto", False, BF16),
        (FP16, "auto", True, FP16),
        (FP32, "bf16", False, BF16),
        (FP32, "fp32", True, FP32),
        (BF16, "fp32", True, FP32),
    ],
)
def test_the_base_has_the_wanted_dtype_and_lora_is_fp32(
    make_policy, make_model, hardware, loaded, asked, bf16, expected
):
    hardware(bf16)
    model = make_model().to(loaded)
    policy = make_policy(model, dtype=asked)
    base = [p for name, p in policy.model.named_parameters() if ".lora_" not in name]
    assert policy.ref.model is model
    assert {p.dtype for p in base} == {expected} == {model.dtype}
    assert trained_dtypes(policy) == {FP32}
    assert words(policy) == {
        FP32: ("float32", "fp32"),
        BF16: ("bfloat16", "bf16"),
        FP16: ("float16", "float16"),
    }.get(expected)


def test_auto_says_in_the_log_that_it_rounded_the_weights_and_how_to_keep_them(
    make_policy, make_model, hardware, caplog
):
    hardware(True)
    model = make_model()
    with caplog.at_level(logging.INFO):
        policy = make_policy(model, dtype="auto")
        make_policy(make_model(), dtype="fp32")
    [said] = [r for r in caplog.records if "weights" in r.getMessage()]
    assert said.levelno == logging.WARNING
    assert "loaded in float32, are now bfloat16" in said.getMessage()
    assert "dtype='fp32' keeps them" in said.getMessage()
    assert policy.describe()["precision"] in said.getMessage()


def test_a_model_put_into_bf16_is_the_one_that_is_loaded_in_bf16(
    make_small, make_policy, hardware, tmp_path
):
    """Bit for bit, rotary positions included."""
    hardware(True)
    make_small().save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=BF16).eval()
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    make_policy(model, dtype="auto", tree="off")
    ids = torch.arange(90).unsqueeze(0)
    with torch.no_grad():
        assert torch.equal(model(input_ids=ids).logits, loaded(input_ids=ids).logits)
    ours, theirs = (dict(m.named_buffers()) for m in (model, loaded))
    rotary = [name for name in theirs if "inv_freq" in name]
    assert rotary
    assert all(torch.equal(ours[name], theirs[name]) for name in rotary)


@pytest.mark.parametrize(("stored", "expected"), [(BF16, FP32), (FP32, BF16)])
def test_auto_keeps_fp32_that_was_asked_for_when_the_model_was_loaded(
    make_policy, make_model, hardware, tmp_path, stored, expected
):
    """It can be told where the checkpoint is in another dtype, which transformers would take."""
    hardware(True)
    make_model().to(stored).save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=FP32)
    policy = make_policy(model, dtype="auto")
    assert model.dtype == expected
    assert ("on purpose" in policy.describe()["precision"]) == (expected == FP32)


def test_to_fp32_is_exact(make_policy, make_model):
    model = make_model().to(BF16)
    before = copy.deepcopy(model.state_dict())
    make_policy(model, dtype="fp32")
    for name, weight in before.items():
        after = dict(model.named_parameters(remove_duplicate=False))
        found = after.get(name, after.get(name.replace(".weight", ".base_layer.weight")))
        assert found.dtype == FP32
        assert torch.equal(found, weight.float())


def test_tied_weights_stay_tied(make_policy, make_model):
    model = make_model(tie_word_embeddings=True)
    make_policy(model, dtype="bf16")
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.lm_head.weight.dtype == BF16


@pytest.mark.parametrize("asked", ["auto", "fp32", "bf16"])
def test_weights_that_are_all_trained_are_fp32(make_policy, make_model, hardware, asked):
    hardware(True)
    policy = make_policy(make_model().to(BF16), lora=None, dtype=asked)
    assert trained_dtypes(policy) == {FP32}
    assert words(policy) == ("float32", "bf16" if asked == "bf16" else "fp32")


def test_a_word_that_means_nothing_is_refused_with_those_that_do(make_policy):
    with pytest.raises(ConfigurationError, match=r"dtype='float16'.*'auto', 'fp32', 'bf16'"):
        make_policy(dtype="float16")


@pytest.mark.parametrize("lora", [None, {"r": 4}])
@pytest.mark.parametrize("tree", ["require", "off"])
def test_sampler_and_trainer_compute_in_bf16_alike(make_policy, key, user, lora, tree):
    policy = make_policy(lora=lora, dtype="bf16", tree=tree)
    computed: list[torch.dtype] = []
    policy.ref.model.model.layers[0].mlp.down_proj.register_forward_hook(
        lambda _module, _args, output: computed.append(output.dtype)
    )
    session = policy.session(key(), Sampling(max_new_tokens=8))
    with policy.serving():
        session.chat(user("hello"))
    assert set(computed) == {BF16}
    computed.clear()
    rows = policy.rows_of_turns(session.transcript.turns)
    with policy.training() as model, policy.autocast():
        scores = policy.forward_of(rows).score(model)
        scores.logprobs.sum().backward()
        assert {p.grad.dtype for p in model.parameters() if p.grad is not None} == {FP32}
    assert set(computed) == {BF16}
    recorded = torch.tensor(session.transcript.turns[0].logprobs)
    assert (scores.logprobs.detach() - recorded).abs().max() < 0.05
