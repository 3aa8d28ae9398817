"""The agent's own generation options, read as `model.generate` reads them."""

from __future__ import annotations

import pytest

from toolbrain_core.errors import NotServed
from toolbrain_core.traces import Sampling


def own_sampling(make_policy, make_model, defaults, **generation_config):
    model = make_model()
    model.generation_config.update(**generation_config)
    return make_policy(model, defaults=defaults).own_sampling()


@pytest.mark.parametrize(
    ("generation_config", "defaults", "expected"),
    [
        ({}, {"max_new_tokens": 7}, Sampling(temperature=0.0, max_new_tokens=7)),
        ({}, {"max_tokens": 9}, Sampling(temperature=0.0, max_new_tokens=9)),
        (
            {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "top_k": 20},
            {"max_new_tokens": 7, "temperature": 0.2},
            Sampling(temperature=0.2, top_p=0.9, top_k=20, max_new_tokens=7),
        ),
        (
            {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "top_k": 20},
            {"max_new_tokens": 7, "do_sample": False},
            Sampling(temperature=0.0, max_new_tokens=7),
        ),
        (
            {"repetition_penalty": 1.2, "max_new_tokens": 33},
            {"do_sample": True, "top_k": 0, "min_p": 0.05},
            Sampling(1.0, min_p=0.05, repetition_penalty=1.2, max_new_tokens=33),
        ),
        ({}, {"max_new_tokens": 7, "do_sample": True}, Sampling(1.0, top_k=50, max_new_tokens=7)),
        (
            {},
            {"max_new_tokens": 7, "stop_strings": "END"},
            Sampling(0.0, max_new_tokens=7, stop=("END",)),
        ),
        (
            {},
            {"max_new_tokens": 7, "stop_strings": ["a", "bc"], "use_cache": True, "num_beams": 1},
            Sampling(0.0, max_new_tokens=7, stop=("a", "bc")),
        ),
    ],
)
def test_the_agents_options_come_before_the_models(
    make_policy, make_model, generation_config, defaults, expected
):
    assert own_sampling(make_policy, make_model, defaults, **generation_config) == expected


@pytest.mark.parametrize("option", ["contrastive_strength", "logits_processor"])
def test_an_unknown_option_is_named(make_policy, option):
    with pytest.raises(NotServed, match=rf"{option}.*Served: .*temperature"):
        make_policy(defaults={"max_new_tokens": 7, option: 3})


@pytest.mark.parametrize(
    "options", [{"num_beams": 4}, {"no_repeat_ngram_size": 3}, {"typical_p": 0.5}]
)
def test_what_changes_the_draw_and_is_not_served_is_named(make_policy, make_model, options):
    (name,) = options
    with pytest.raises(NotServed, match=name):
        make_policy(defaults={"max_new_tokens": 7, **options})
    with pytest.raises(NotServed, match=name):
        own_sampling(make_policy, make_model, {"max_new_tokens": 7}, **options)


def test_every_end_token_of_the_model_ends_a_turn(make_policy, make_model, key, user):
    model = make_model()
    policy = make_policy(model)
    with policy.serving():
        session = policy.session(key(), Sampling(max_new_tokens=8))
        session.chat(user("hi"))
    third = session.transcript.turns[0].completion_ids[2]
    also = make_model()
    also.generation_config.eos_token_id = [2, third]
    policy = make_policy(also)
    with policy.serving():
        session = policy.session(key(), Sampling(max_new_tokens=8))
        session.chat(user("hi"))
    (turn,) = session.transcript.turns
    assert turn.finish_reason == "eos"
    assert turn.completion_ids[-1] == third
    assert len(turn.completion_ids) == 3
