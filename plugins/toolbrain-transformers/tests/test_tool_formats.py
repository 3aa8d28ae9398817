"""Tool formats: tools into prompts, calls out of answers, whatever a model writes."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from toolbrain_transformers.tool_formats import ToolFormat, with_tools_in_prompt
from trl.chat_template_utils import (
    lfm2_2_5_chat_template,
    llama3_2_chat_template,
    qwen2_5_chat_template,
    qwen3_5_nothink_chat_template,
    qwen3_chat_template,
)

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "price",
            "description": "Price of an item.",
            "parameters": {
                "type": "object",
                "properties": {"item": {"type": "string"}, "count": {"type": "integer"}},
            },
        },
    }
]
QUESTION = [{"role": "user", "content": "How much is tea?"}]
PROMPT = "<|im_start|>user\nHow much is tea?<|im_end|>\n<|im_start|>assistant\n"


def called(answer: Any) -> list[tuple[str, Any]]:
    return [
        (call["function"]["name"], json.loads(call["function"]["arguments"]))
        for call in answer.calls
    ]


@pytest.fixture(params=["unknown", "qwen"])
def tool_format(request: Any, tokenizer: Any, with_template: Any) -> ToolFormat:
    """A format that only we read, and one that TRL knows."""
    if request.param == "unknown":
        return ToolFormat.of(tokenizer)
    return ToolFormat.of(with_template(qwen2_5_chat_template))


@pytest.fixture
def plain(tokenizer: Any) -> ToolFormat:
    return ToolFormat.of(tokenizer)


def test_formats_are_known_by_their_template_and_the_users_tokenizer_is_left_alone(
    tokenizer, with_template
):
    qwen = with_template(qwen2_5_chat_template)
    assert ToolFormat.of(qwen).is_known
    assert ToolFormat.of(qwen).takes_tools
    assert not ToolFormat.of(tokenizer).is_known
    assert not ToolFormat.of(tokenizer).takes_tools
    assert qwen.response_template is None
    assert qwen.chat_template == qwen2_5_chat_template


@pytest.mark.parametrize(
    "arguments",
    [
        {"item": "tea", "count": 2},
        {"a": None, "b": True, "c": -1.5e3, "d": 0},
        {"text": "Grüße, 東京 \u2028 🍵", "code": 'print("</b>")\n\t{}'},
        {"nested": {"list": [1, [2, {"x": []}]], "empty": {}}},
        {},
    ],
)
def test_arguments_survive(tool_format, arguments):
    block = json.dumps({"name": "price", "arguments": arguments}, ensure_ascii=False)
    answer = tool_format.parse(f"<tool_call>\n{block}\n</tool_call><|im_end|>", TOOLS, PROMPT)
    assert called(answer) == [("price", arguments)]
    assert (answer.text, answer.invalid) == ("", ())


def test_several_calls_and_the_text_around_them(tool_format):
    answer = tool_format.parse(
        'Let me look. <tool_call>{"name": "price", "arguments": {"item": "tea"}}</tool_call>\n'
        '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call> Done.<|im_end|>',
        TOOLS,
        PROMPT,
        call_id="call_7",
    )
    assert called(answer) == [("price", {"item": "tea"}), ("add", {"a": 1})]
    assert [call["id"] for call in answer.calls] == ["call_7_0", "call_7_1"]
    assert {call["type"] for call in answer.calls} == {"function"}
    assert answer.text.split() == ["Let", "me", "look.", "Done."]


def test_ids_are_read_as_text_is(tool_format, tokenizer):
    text = '<tool_call>{"name": "price", "arguments": {"item": "tea"}}</tool_call><|im_end|>'
    ids = tokenizer(text)["input_ids"]
    prompt = tokenizer(PROMPT)["input_ids"]
    assert tool_format.parse(ids, TOOLS, prompt) == tool_format.parse(text, TOOLS, PROMPT)
    assert called(tool_format.parse(tuple(ids))) == [("price", {"item": "tea"})]


def test_a_broken_call_spoils_no_other(tool_format):
    answer = tool_format.parse(
        '<tool_call>{"name": "price", "arguments": {"item": "tea"}}</tool_call>'
        '<tool_call>{"name": "price", "arguments": {"item": }}</tool_call>'
        '<tool_call>{"name": "price", "arguments": {"item": "mug"}}</tool_call>',
        TOOLS,
        PROMPT,
    )
    assert called(answer) == [("price", {"item": "tea"}), ("price", {"item": "mug"})]
    (broken,) = answer.invalid
    assert broken.text == '<tool_call>{"name": "price", "arguments": {"item": }}</tool_call>'
    assert "not JSON" in broken.reason


@pytest.mark.parametrize(
    ("written", "reason"),
    [
        ('{"name": "price"', "not JSON"),
        ('{"nme": "price", "arguments": {}}', "with a name"),
        ('{"name": 3, "arguments": {}}', "with a name"),
        ('{"name": "price", "arguments": [1]}', "'price' are no JSON object"),
        ('{"name": "price", "arguments": "tea"}', "Expecting value"),
        ('{"name": "price", "arguments": {"x": NaN}}', "NaN is no JSON number"),
        ('{"name": "price", "arguments": {"x": "\\ud800"}}', "surrogate"),
        ('{"name": "price", "arguments": {}} {"name": "add"}', "one JSON value"),
        ("[1, 2]", "with a name"),
        ("[" * 100_000, "not JSON"),
    ],
)
def test_what_is_no_call_is_invalid_with_its_reason(tool_format, written, reason):
    answer = tool_format.parse(f"<tool_call>{written}</tool_call>", TOOLS, PROMPT)
    assert answer.calls == ()
    assert all(reason in item.reason for item in answer.invalid)
    assert answer.invalid


@pytest.mark.parametrize(
    ("block", "expected"),
    [
        ('{"name": "price", "parameters": {"item": "tea"}}', {"item": "tea"}),
        ('{"name": "price", "arguments": "{\\"item\\": \\"tea\\"}"}', {"item": "tea"}),
        ('{"name": "price"}', {}),
        ('{"name": "price", "arguments": null}', {}),
        ('{"type": "function", "function": {"name": "price", "arguments": {"a": 1}}}', {"a": 1}),
        ('[{"name": "price", "arguments": {"a": 1}}]', {"a": 1}),
    ],
)
def test_near_relatives_of_the_format_are_read(tool_format, block, expected):
    answer = tool_format.parse(f"<tool_call>\n{block}\n</tool_call>", TOOLS, PROMPT)
    assert called(answer) == [("price", expected)]


def test_a_block_that_a_stop_string_cut_at_its_end_is_read(tool_format):
    answer = tool_format.parse('<tool_call>{"name": "price", "arguments": {}}', TOOLS, PROMPT)
    assert called(answer) == [("price", {})]


def test_bare_json_is_read_where_the_template_has_no_format(plain):
    answer = plain.parse(
        'I call\n```json\n{"name": "price", "arguments": {"item": "tea"}}\n```\nand '
        '[{"name": "add", "parameters": {"a": 1}}, {"name": "add", "arguments": {"a": 2}}]'
    )
    assert called(answer) == [("price", {"item": "tea"}), ("add", {"a": 1}), ("add", {"a": 2})]
    assert answer.text.split() == ["I", "call", "and"]
    assert answer.invalid == ()


def test_bare_json_that_is_no_call_stays_text(plain):
    text = 'The record is {"name": "Ann", "age": 3}, the set {1, 2}, the list [{"a": {}}] {"'
    answer = plain.parse(text)
    assert (answer.text, answer.calls, answer.invalid) == (text, (), ())


def test_broken_bare_calls_are_invalid_and_the_next_one_counts(plain):
    answer = plain.parse(
        '{"name": "price", "arguments": {"item": tea}} {"name": "add", "arguments": {"a": 1}}'
    )
    assert called(answer) == [("add", {"a": 1})]
    (broken,) = answer.invalid
    assert broken.text.startswith('{"name": "price"')
    assert "not JSON" in broken.reason


def test_a_call_that_was_only_thought_of_is_none(with_template):
    thinker = ToolFormat.of(with_template(qwen3_chat_template))
    call = '<tool_call>{"name": "price", "arguments": {"item": "tea"}}</tool_call>'
    other = call.replace("tea", "mug")
    opened_by_itself = thinker.parse(f"<think>{call}?</think>\n\nSo: {other}", TOOLS, PROMPT)
    opened_by_prompt = thinker.parse(f"{call}?</think>\n\nSo: {other}", TOOLS, PROMPT + "<think>\n")
    for answer in (opened_by_itself, opened_by_prompt):
        assert called(answer) == [("price", {"item": "mug"})]
        assert answer.text == "So:"
    assert thinker.parse(f"<think>{call}", TOOLS, PROMPT).calls == ()


@pytest.mark.parametrize(
    ("template", "prompt", "written"),
    [
        (
            qwen3_5_nothink_chat_template,
            PROMPT,
            "<tool_call>\n<function=price>\n<parameter=item>\ntea\n</parameter>\n"
            "<parameter=count>\n7\n</parameter>\n</function>\n</tool_call><|im_end|>",
        ),
        (
            llama3_2_chat_template,
            "<|start_header_id|>assistant<|end_header_id|>\n\n",
            '{"name": "price", "parameters": {"item": "tea", "count": 7}}<|eot_id|>',
        ),
        (
            lfm2_2_5_chat_template,
            PROMPT,
            "<|tool_call_start|>[price(item='tea', count=7)]<|tool_call_end|><|im_end|>",
        ),
    ],
    ids=["qwen3.5", "llama3", "lfm2"],
)
def test_formats_that_are_not_json_blocks_are_read_by_trls_templates(
    with_template, template, prompt, written
):
    known = ToolFormat.of(with_template(template))
    answer = known.parse(written, TOOLS, prompt)
    assert called(answer) == [("price", {"item": "tea", "count": 7})]
    assert answer.invalid == ()


def test_a_broken_call_of_a_known_format_is_invalid_with_its_reason(with_template):
    known = ToolFormat.of(with_template(qwen2_5_chat_template))
    answer = known.parse("<tool_call>price of tea</tool_call>", TOOLS, PROMPT)
    assert answer.calls == ()
    assert "JSON" in answer.invalid[0].reason


@pytest.mark.parametrize("text", ["", "Tea is 12.", "<|im_end|>", "Tea is 12.<|im_end|>"])
def test_an_answer_without_calls_is_its_text(tool_format, text):
    answer = tool_format.parse(text, TOOLS, PROMPT)
    assert answer.text == text.removesuffix("<|im_end|>")
    assert (answer.calls, answer.invalid) == ((), ())


PIECES = ["<tool_call>", "</tool_call>", '{"name": ', '"price"', ', "arguments": ', "{}", "}", "["]
PIECES += ["]", "\\", '"', "<think>", "</think>", "\n", "1e999", "NaN", "é", "<|im_end|>", "{"]


@settings(max_examples=150, deadline=None)
@given(st.lists(st.one_of(st.sampled_from(PIECES), st.text(max_size=3)), max_size=14))
def test_no_answer_raises(format_pair, pieces):
    for tool_format in format_pair:
        answer = tool_format.parse("".join(pieces), TOOLS, PROMPT)
        for call in answer.calls:
            assert isinstance(json.loads(call["function"]["arguments"]), dict)
        assert all(item.reason for item in answer.invalid)


@pytest.fixture(scope="module")
def format_pair(tokenizer: Any) -> list[ToolFormat]:
    known = copy.deepcopy(tokenizer)
    known.chat_template = qwen2_5_chat_template
    return [ToolFormat.of(tokenizer), ToolFormat.of(known)]


# Into the prompt -------------------------------------------------------------------------------


def test_a_template_that_knows_tools_gets_them(with_template):
    known = ToolFormat.of(with_template(qwen2_5_chat_template))
    assert known.arrange(QUESTION, TOOLS) == (QUESTION, TOOLS)


def test_tools_are_described_in_the_system_message_of_other_templates(plain, tokenizer):
    messages, tools = plain.arrange([{"role": "system", "content": "Be brief."}, *QUESTION], TOOLS)
    assert tools == []
    assert [message["role"] for message in messages] == ["system", "user"]
    text = tokenizer.apply_chat_template(messages, tokenize=False)
    assert text.startswith("<|im_start|>system\nBe brief.\n\nYou can call these tools:")
    assert json.dumps(TOOLS[0]["function"]) in text
    # The described format is the one that is read.
    example = text[text.index("<tool_call>") : text.index("</tool_call>") + len("</tool_call>")]
    assert called(plain.parse(example)) == [("tool_name", {"argument_name": "value"})]


def test_the_description_joins_parts_or_makes_a_system_message():
    parts = [{"type": "text", "text": "Be brief."}]
    joined = with_tools_in_prompt([{"role": "system", "content": parts}, *QUESTION], TOOLS)
    assert joined[0]["content"][0] == parts[0]
    assert "price" in joined[0]["content"][1]["text"]
    made = with_tools_in_prompt(QUESTION, TOOLS)
    assert [message["role"] for message in made] == ["system", "user"]
    assert with_tools_in_prompt(QUESTION, []) == QUESTION
    assert QUESTION == [{"role": "user", "content": "How much is tea?"}]
    assert parts == [{"type": "text", "text": "Be brief."}]


def test_calls_and_results_go_back_in_the_format_that_is_read(plain, tokenizer):
    answer = plain.parse('Sure. <tool_call>{"name": "price", "arguments": {"a": "é"}}</tool_call>')
    history = [
        *QUESTION,
        {"role": "assistant", "content": answer.text, "tool_calls": list(answer.calls)},
        {"role": "tool", "tool_call_id": answer.calls[0]["id"], "content": "12"},
    ]
    messages, _ = plain.arrange(history, TOOLS)
    assert [m["role"] for m in messages] == ["system", "user", "assistant", "user"]
    again = plain.parse(messages[2]["content"])
    assert (called(again), again.text) == (called(answer), answer.text)
    assert messages[3]["content"] == "<tool_response>\n12\n</tool_response>"
    assert "12" in tokenizer.apply_chat_template(messages, tokenize=False)
