"""Demonstrations: what the assistant wrote is trained on, and nothing else."""

from __future__ import annotations

import pytest
from toolbrain_transformers.demonstrations import demonstration_rows
from trl.chat_template_utils import qwen2_5_chat_template

from toolbrain_core.errors import DataError
from toolbrain_core.traces import Demonstration, Rollout, Sampling, Task

TASK = Task("tea-3", "How much is tea?")
CONVERSATION = (
    {"role": "system", "content": "You sell tea."},
    {"role": "user", "content": "How much is tea?"},
    {"role": "assistant", "content": "Let me look."},
    {"role": "user", "content": "Observation: 12"},
    {"role": "assistant", "content": "Tea is 12."},
)


def trained_text(policy, row):
    return policy.decode([i for i, trained in zip(row.ids, row.trained, strict=True) if trained])


def test_only_what_the_assistant_wrote_is_trained(policy):
    (row,) = demonstration_rows(policy, Demonstration(TASK, CONVERSATION))
    assert trained_text(policy, row) == "Let me look.<|im_end|>Tea is 12.<|im_end|>"
    assert policy.decode(row.ids) + "\n" == policy.template.render(
        CONVERSATION, add_generation_prompt=False
    )


def test_ids_are_those_that_a_session_would_have_sent(policy, key, user):
    demonstration = Demonstration(TASK, CONVERSATION[1:3])
    (row,) = demonstration_rows(policy, demonstration)
    session = policy.session(key(), Sampling(max_new_tokens=1))
    with policy.serving():
        session.chat(user("How much is tea?"))
    prompt = session.transcript.turns[0].prompt_ids
    assert row.ids[: len(prompt)] == prompt
    assert row.trained.index(True) == len(prompt)


def test_turns_with_prompts_of_their_own_are_rows_of_their_own(policy):
    turns = [
        {"messages": [{"role": "user", "content": "one"}], "text": "first"},
        {"messages": [{"role": "user", "content": "two"}], "text": "second"},
    ]
    rows = demonstration_rows(policy, Demonstration(TASK, (), metadata={"turns": turns}))
    texts = [trained_text(policy, row) for row in rows]
    assert texts == ["first<|im_end|>", "second<|im_end|>"]


def test_tool_calls_are_trained_and_their_results_are_not(make_policy, with_template):
    policy = make_policy(processor=with_template(qwen2_5_chat_template))
    function = {"name": "price", "arguments": {"item": "tea"}}
    messages = (
        {"role": "user", "content": "How much is tea?"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"type": "function", "function": function}],
        },
        {"role": "tool", "content": "12"},
        {"role": "assistant", "content": "Tea is 12."},
    )
    (row,) = demonstration_rows(policy, Demonstration(TASK, messages))
    trained = trained_text(policy, row)
    assert '{"name": "price", "arguments": {"item": "tea"}}' in trained
    assert trained.endswith("Tea is 12.<|im_end|>")
    assert "tool_response" not in trained
    assert "<tool_response>\n12" in policy.decode(row.ids)


def test_a_rollouts_rows_are_its_recorded_ids(policy, key, user):
    session = policy.session(key(), Sampling(max_new_tokens=6))
    with policy.serving():
        session.chat(user("How much is tea?"))
    trace = session.transcript.trace()
    assert demonstration_rows(policy, Rollout(TASK, trace)) == policy.rows(trace)


def test_a_demonstration_without_an_answer_is_named(policy):
    with pytest.raises(DataError, match=r"'tea-3' has no assistant text"):
        demonstration_rows(policy, Demonstration(TASK, CONVERSATION[:2]))


def test_a_row_beyond_the_context_is_named(make_policy):
    policy = make_policy(max_context=30)
    with pytest.raises(DataError, match=r"'tea-3' has a row of \d+ tokens, beyond .* 30"):
        demonstration_rows(policy, Demonstration(TASK, CONVERSATION))
