"""The policy: adapters, saving, loading, merging, and what training leaves behind."""

from __future__ import annotations

import copy
import json
from typing import Any

import peft
import pytest
import torch
from attrs import evolve
from peft import AutoPeftModelForCausalLM, PeftModel
from toolbrain_transformers.policy import Lora, TransformersPolicy
from toolbrain_transformers.sampler import InProcessSampler
from toolbrain_transformers.testing import tiny_config
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    CLIPImageProcessor,
    CLIPVisionConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
)
from trl.chat_template_utils import smolvlm_chat_template

from toolbrain_core.errors import ConfigurationError, DataError, NotServed, ToolBrainError
from toolbrain_core.roles import ChatRequest, ModelRef
from toolbrain_core.traces import Sampling

IDS = torch.tensor([[5, 77, 900, 12, 4000, 31]])


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=IDS).logits


def stir(policy: Any, scale: float = 0.05) -> None:
    """Change every trained weight, as a training would."""
    torch.manual_seed(1)
    with policy.training() as model, torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * scale)


def assert_saved_whole(folder: Any, names: set[str]) -> None:
    assert names <= {entry.name for entry in folder.iterdir()}
    assert [entry.name for entry in folder.parent.iterdir()] == [folder.name]


# Adapters --------------------------------------------------------------------------------------


def test_the_adapter_is_on_every_linear_layer_but_the_head_and_starts_as_the_base(
    make_policy, make_model
):
    model = make_model()
    before = logits(model)
    policy = make_policy(model)
    adapted = {name.rsplit(".lora_A", 1)[0] for name, _ in _trained(policy) if ".lora_A" in name}
    layers = {name for name, m in make_model().named_modules() if isinstance(m, torch.nn.Linear)}
    assert {name.removeprefix("base_model.model.") for name in adapted} == layers - {"lm_head"}
    assert torch.equal(logits(policy.model), before)
    assert policy.is_fresh
    stir(policy)
    assert not policy.is_fresh
    assert (policy.lora.r, policy.lora.alpha) == (16, 32)


def _trained(policy: Any) -> list[tuple[str, Any]]:
    return [(n, p) for n, p in policy.model.named_parameters() if p.requires_grad]


def test_the_agents_model_serves_with_the_trained_weights(make_policy, make_model):
    model = make_model()
    policy = make_policy(model)
    before = logits(model)
    stir(policy)
    assert not torch.allclose(logits(model), before)
    assert torch.equal(logits(model), logits(policy.model))


def test_the_seed_draws_the_adapter_and_leaves_the_users_generator_alone(make_policy):
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    one = make_policy(seed=5)
    assert torch.equal(torch.rand(1), expected)
    two, other = (make_policy(seed=seed) for seed in (5, 6))
    first = [_trained(policy)[0][1] for policy in (one, two, other)]
    assert torch.equal(first[0], first[1])
    assert not torch.equal(first[0], first[2])


def test_a_model_that_carries_an_adapter_is_refused(make_policy, make_model):
    model = make_model()
    make_policy(model)
    with pytest.raises(NotServed, match="already carries an adapter"):
        make_policy(model)
    given = peft.get_peft_model(make_model(), peft.LoraConfig(target_modules="all-linear"))
    with pytest.raises(NotServed, match="already carries an adapter"):
        make_policy(given)


def test_a_sampler_that_refuses_leaves_the_model_as_it_was(make_policy, make_model):
    class Refusing(InProcessSampler):
        def check(self, policy: Any) -> None:
            raise NotServed("not this one")

    model = make_model()
    before = logits(model)
    with pytest.raises(NotServed, match="not this one"):
        make_policy(model, sampler=Refusing())
    assert torch.equal(logits(make_policy(model).model), before)


def test_without_an_adapter_every_weight_is_trained(make_policy, make_model, tmp_path):
    model = make_model()
    model.requires_grad_(False)
    policy = make_policy(model, lora=None)
    assert policy.model is model
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert not policy.is_adapted
    assert not policy.is_fresh
    stir(policy)
    policy.save(tmp_path / "saved")
    assert torch.allclose(
        logits(AutoModelForCausalLM.from_pretrained(tmp_path / "saved")), logits(model), atol=1e-5
    )
    assert policy.describe()["lora"] is None
    with pytest.raises(NotServed, match="lora=None"):
        policy.load(tmp_path / "saved")


# Saving ----------------------------------------------------------------------------------------


def test_a_saved_adapter_is_a_standard_one(make_policy, make_model, tokenizer, tmp_path):
    make_model().save_pretrained(tmp_path / "base")
    policy = make_policy(AutoModelForCausalLM.from_pretrained(tmp_path / "base"))
    stir(policy)
    policy.save(tmp_path / "to" / "saved")
    files = {"adapter_config.json", "adapter_model.safetensors", "tokenizer.json"}
    assert_saved_whole(tmp_path / "to" / "saved", {*files, "toolbrain.json"})
    expected = logits(policy.model)
    assert torch.allclose(
        logits(PeftModel.from_pretrained(make_model(), tmp_path / "to" / "saved")),
        expected,
        atol=1e-5,
    )
    automatic = AutoPeftModelForCausalLM.from_pretrained(tmp_path / "to" / "saved")
    assert torch.allclose(logits(automatic), expected, atol=1e-5)
    again = AutoTokenizer.from_pretrained(tmp_path / "to" / "saved")
    assert again.chat_template == tokenizer.chat_template
    facts = json.loads((tmp_path / "to" / "saved" / "toolbrain.json").read_text())
    assert facts["policy"]["lora"] == {"r": 16, "alpha": 32, "target_modules": "all-linear"}


def test_load_takes_the_saved_weights_and_bumps_the_version(make_policy, tmp_path):
    policy, other = make_policy(), make_policy(seed=9)
    stir(policy)
    policy.save(tmp_path / "saved")
    version = other.weights_version
    other.load(tmp_path / "saved")
    assert torch.equal(logits(other.model), logits(policy.model))
    assert other.weights_version == version + 1


def test_a_policy_can_start_from_a_saved_adapter_and_train_it(make_policy, make_model, tmp_path):
    policy = make_policy(lora=Lora(r=4, alpha=8))
    stir(policy)
    policy.save(tmp_path / "saved")
    started = make_policy(adapter=tmp_path / "saved")
    assert torch.allclose(logits(started.model), logits(policy.model), atol=1e-6)
    assert [n for n, _ in _trained(started)] == [n for n, _ in _trained(policy)]
    assert not started.is_fresh
    assert started.describe()["lora"]["r"] == 4


def test_an_adapter_of_another_rank_is_refused_and_changes_nothing(make_policy, tmp_path):
    make_policy(lora={"r": 4, "alpha": 32}).save(tmp_path / "saved")
    policy = make_policy()
    before = logits(policy.model)
    with pytest.raises(DataError, match=r"r=4.*r=16.*Brain.load"):
        policy.load(tmp_path / "saved")
    assert torch.equal(logits(policy.model), before)


def test_an_adapter_of_other_layers_is_refused(make_policy, tmp_path):
    make_policy(lora=Lora(target_modules=("q_proj",))).save(tmp_path / "saved")
    with pytest.raises(DataError, match="does not fit"):
        make_policy().load(tmp_path / "saved")


def test_a_directory_without_adapter_is_refused(make_policy, tmp_path):
    with pytest.raises(DataError, match=r"adapter_config\.json"):
        make_policy().load(tmp_path)
    with pytest.raises(DataError, match=r"adapter_config\.json"):
        make_policy(adapter=tmp_path)


@pytest.mark.parametrize("options", [{}, {"lora": None}], ids=["adapter", "all weights"])
def test_a_merged_model_is_a_plain_one_and_the_policy_stays(make_policy, tmp_path, options):
    policy = make_policy(**options)
    stir(policy)
    expected = logits(policy.model)
    policy.merge(tmp_path / "merged")
    assert_saved_whole(tmp_path / "merged", {"model.safetensors", "tokenizer.json"})
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert not hasattr(merged, "peft_config")
    assert (logits(merged) - expected).abs().max() < 1e-4
    assert torch.equal(logits(policy.model), expected)


@pytest.mark.parametrize("how", ["save", "merge"])
def test_a_save_that_fails_leaves_nothing_behind(make_policy, tokenizer, tmp_path, how):
    broken = copy.deepcopy(tokenizer)

    def full_disk(folder: Any, **options: Any) -> None:
        raise OSError("No space left on device")

    policy = make_policy(processor=broken)
    policy.save(tmp_path / "earlier")
    earlier = (tmp_path / "earlier" / "adapter_model.safetensors").read_bytes()
    stir(policy)
    broken.save_pretrained = full_disk
    for name in ("new", "earlier"):
        with pytest.raises(ToolBrainError, match=r"cannot save to .*No space"):
            getattr(policy, how)(tmp_path / name)
    assert [entry.name for entry in tmp_path.iterdir()] == ["earlier"]
    assert (tmp_path / "earlier" / "adapter_model.safetensors").read_bytes() == earlier


def test_saving_again_takes_the_place_of_the_earlier_save(make_policy, tmp_path):
    policy, reader = make_policy(), make_policy(seed=9)
    policy.save(tmp_path / "saved")
    stir(policy)
    policy.save(tmp_path / "saved")
    reader.load(tmp_path / "saved")
    assert torch.equal(logits(reader.model), logits(policy.model))
    assert_saved_whole(tmp_path / "saved", {"toolbrain.json"})


def test_what_is_not_a_save_is_never_overwritten(make_policy, tmp_path):
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter.txt").write_text("years of work")
    (tmp_path / "file").write_text("a file")
    with pytest.raises(ConfigurationError, match="holds other files"):
        make_policy().save(tmp_path / "thesis")
    with pytest.raises(ConfigurationError, match="is a file"):
        make_policy().merge(tmp_path / "file")
    assert (tmp_path / "thesis" / "chapter.txt").read_text() == "years of work"


@pytest.mark.parametrize("how", ["save", "merge"])
def test_a_base_model_is_never_overwritten(make_policy, make_model, tmp_path, how):
    make_model().save_pretrained(tmp_path / "base")
    before = {entry.name: entry.read_bytes() for entry in (tmp_path / "base").iterdir()}
    with pytest.raises(ConfigurationError, match=r"holds other files.*config\.json"):
        getattr(make_policy(), how)(tmp_path / "base")
    assert {e.name: e.read_bytes() for e in (tmp_path / "base").iterdir()} == before


# Training --------------------------------------------------------------------------------------


@pytest.mark.parametrize("fails", [False, True])
def test_training_leaves_the_model_as_it_was_but_for_its_weights(
    make_policy, make_model, with_template, tokenizer, fails
):
    model = make_model()
    own = with_template(tokenizer.chat_template)
    policy = make_policy(model, own)
    before = (model.config.pad_token_id, model.generation_config.pad_token_id)
    forward = model.forward.__func__

    def train() -> None:
        with policy.training() as trained:
            trained.train()
            trained.gradient_checkpointing_enable()
            model.forward = lambda *args, **kwargs: None
            model.config.pad_token_id = model.generation_config.pad_token_id = 7
            own.pad_token, own.padding_side = "<|endoftext|>", "left"
            adapted = next(p for p in trained.parameters() if p.requires_grad)
            adapted.grad = torch.zeros_like(adapted)
            if fails:
                raise RuntimeError("the trainer stopped")

    if fails:
        with pytest.raises(RuntimeError, match="the trainer stopped"):
            train()
    else:
        train()
    assert model.forward.__func__ is forward
    assert (model.config.pad_token_id, model.generation_config.pad_token_id) == before
    assert (own.pad_token, own.padding_side) == (tokenizer.pad_token, tokenizer.padding_side)
    assert not policy.model.training
    assert not any(module.training for module in policy.model.modules())
    assert not model.is_gradient_checkpointing
    assert all(parameter.grad is None for parameter in policy.model.parameters())
    assert policy.weights_version == 1


def test_the_version_rises_with_each_serving_in_which_a_trainer_may_have_changed_the_weights(
    make_policy,
):
    policy, seen = make_policy(), []
    for _ in range(2):
        with policy.serving():
            seen.append(policy.weights_version)
    with policy.training():
        for _ in range(2):
            with policy.serving(), policy.serving():
                seen.append(policy.weights_version)
    with policy.serving():
        seen.append(policy.weights_version)
    assert seen == [0, 0, 1, 2, 3]


def test_masks_go_by_length_where_pad_is_eos(
    make_policy, make_model, tokenizer, key, fresh_logprobs
):
    assert tokenizer.pad_token_id == tokenizer.eos_token_id
    policy = make_policy(make_model(spread=2.0))
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}] * 3
    long = ChatRequest((*turns, turns[0]))  # a prompt with many end-of-sequence tokens
    session = policy.session(key(), Sampling(max_new_tokens=8))
    with policy.serving():
        session.chat(long)
    (turn,) = session.transcript.turns
    assert turn.prompt_ids.count(tokenizer.pad_token_id) >= 7
    fresh = fresh_logprobs(policy.model, turn)
    assert (fresh - torch.tensor(turn.logprobs)).abs().max() < 1e-4


def test_serving_nests_and_starts_again(policy, key, user):
    for _ in range(2):
        with policy.serving():
            with policy.serving():
                policy.session(key(), Sampling(max_new_tokens=1)).chat(user("hello"))
            policy.session(key(), Sampling(max_new_tokens=1)).chat(user("hello"))


# Image-text models, used for text ---------------------------------------------------------------


@pytest.fixture
def image_text_ref(tokenizer: Any) -> ModelRef:
    own = copy.deepcopy(tokenizer)
    own.add_special_tokens({"additional_special_tokens": ["<image>"]})
    text = tiny_config(own, max_position_embeddings=512, initializer_range=0.2)
    vision = CLIPVisionConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=2,
        image_size=28,
        patch_size=14,
        projection_dim=32,
    )
    torch.manual_seed(0)
    image = own.convert_tokens_to_ids("<image>")
    config = LlavaConfig(vision_config=vision, text_config=text, image_token_index=image)
    model = LlavaForConditionalGeneration(config)
    processor = LlavaProcessor(
        image_processor=CLIPImageProcessor(),
        tokenizer=own,
        patch_size=14,
        vision_feature_select_strategy="default",
        chat_template=smolvlm_chat_template,
    )
    return ModelRef("transformers", model.eval(), processor, {"max_new_tokens": 8}, name="llava")


def test_an_image_text_model_answers_text(image_text_ref, key, user, follow_up, fresh_logprobs):
    policy = TransformersPolicy(image_text_ref, dtype="fp32")
    session = policy.session(key(), Sampling(max_new_tokens=8))
    with policy.serving():
        request = user("hello")
        reply = session.chat(request)
        # The template writes a space after "Assistant:", as the model itself just did.
        assert reply.text.startswith(" ")
        session.chat(follow_up(request, evolve(reply, text=reply.text.strip()), "go on"))
    first, second = session.transcript.turns
    assert "User: hello" in policy.decode(first.prompt_ids)
    assert second.row_break is None
    for turn in (first, second):
        fresh = fresh_logprobs(policy.model, turn)
        assert (fresh - torch.tensor(turn.logprobs)).abs().max() < 1e-4


def test_only_the_language_model_of_an_image_text_model_is_adapted(image_text_ref, tmp_path):
    policy = TransformersPolicy(image_text_ref)
    names = [name for name, _ in _trained(policy)]
    assert names
    assert all(".language_model." in name for name in names)
    stir(policy)
    policy.save(tmp_path / "saved")
    assert_saved_whole(tmp_path / "saved", {"adapter_config.json", "processor_config.json"})


def test_without_an_adapter_the_language_model_of_an_image_text_model_is_trained_only(
    image_text_ref,
):
    policy = TransformersPolicy(image_text_ref, lora=None)
    weights = dict(policy.model.named_parameters())
    trained = {name for name, _ in _trained(policy)}
    assert trained == {n for n in weights if "language_model." in n or n.startswith("lm_head")}
    assert {name.split(".")[1] for name in weights.keys() - trained} == {
        "vision_tower",
        "multi_modal_projector",
    }
