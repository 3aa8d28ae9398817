"""Chat templates: what reaches them, and what is said about them."""

from __future__ import annotations

import pytest
from trl.chat_template_utils import qwen3_chat_template

from toolbrain_core.errors import NotServed
from toolbrain_core.traces import Sampling

THINKING = (
    "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}"
    "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}"
)
STRICT = (
    "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools here') }}"
    "{% endif %}{{ m.content }}{% endfor %}"
)
WITH_TOOLS = (
    "{% for tool in tools or [] %}{{ tool.function.name }};{% endfor %}"
    "{% for m in messages %}{{ m.content }}{% endfor %}"
)


def test_a_tokenizer_without_template_is_refused_before_anything_runs(make_policy, with_template):
    with pytest.raises(NotServed, match=r"tiny-llama has no chat template.*set"):
        make_policy(processor=with_template(None))


def test_template_options_of_the_agent_reach_the_template(make_policy, with_template):
    policy = make_policy(
        processor=with_template(THINKING), template_options={"enable_thinking": False}
    )
    message = [{"role": "user", "content": "hi"}]
    assert policy.template.render(message).endswith("<think></think>")
    assert policy.template.render(message, options={"enable_thinking": True}) == "[user] hi\n"


def test_template_options_of_a_request_reach_the_prompt(make_policy, with_template, key, user):
    policy = make_policy(processor=with_template(THINKING))
    session = policy.session(key(), Sampling(max_new_tokens=2))
    with policy.serving():
        session.chat(user("hi", template_options={"enable_thinking": False}))
        session.chat(user("hi"))
    closed, plain = session.transcript.turns
    assert policy.decode(closed.prompt_ids) == "[user] hi\n<think></think>"
    assert policy.decode(plain.prompt_ids) == "[user] hi\n"


def test_tools_reach_the_template(make_policy, with_template):
    policy = make_policy(processor=with_template(WITH_TOOLS))
    tools = [{"type": "function", "function": {"name": "price", "parameters": {}}}]
    assert policy.template.render([{"role": "user", "content": "hi"}], tools) == "price;hi"


def test_messages_that_the_template_refuses_are_named(make_policy, with_template):
    policy = make_policy(processor=with_template(STRICT))
    messages = [{"role": "user", "content": "hi"}, {"role": "tool", "content": "12"}]
    with pytest.raises(NotServed, match=r"tiny-llama refuses.*user, tool.*no tools here"):
        policy.template.render(messages)


def test_a_template_that_drops_reasoning_is_named_in_preflight(make_policy, with_template):
    notes = make_policy(processor=with_template(qwen3_chat_template)).preflight()
    assert any("drops earlier reasoning" in note and "one row per turn" in note for note in notes)


def test_preflight_has_nothing_to_say_of_a_sound_model(policy):
    assert list(policy.preflight()) == []


def test_preflight_names_a_tokenizer_that_outgrew_the_model(make_policy, with_template, tokenizer):
    larger = with_template(tokenizer.chat_template)
    larger.add_tokens(["<extra>"])
    problems = make_policy(processor=larger).preflight()
    assert any("resize_token_embeddings" in problem for problem in problems)


def test_preflight_names_weights_that_are_not_finite(make_policy, make_model):
    model = make_model()
    model.lm_head.weight.data[5] = float("nan")
    problems = make_policy(model).preflight()
    assert any("not finite" in problem for problem in problems)


def test_preflight_names_a_model_that_never_ends(make_policy, make_model, with_template, tokenizer):
    endless = with_template(tokenizer.chat_template)
    endless.eos_token = None
    model = make_model(eos_token_id=None)
    model.generation_config.eos_token_id = None
    problems = make_policy(model, endless).preflight()
    assert any("end-of-sequence" in problem for problem in problems)
