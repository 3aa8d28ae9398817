"""The data: to JSON and back, tasks from what users have, torn and foreign journals."""

import json
import math

import attrs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from toolbrain_core.errors import AttemptClosed, DataError
from toolbrain_core.sessions import Transcript
from toolbrain_core.traces import (
    Demonstration,
    Failure,
    Group,
    RewardResult,
    Rollout,
    Sampling,
    Task,
    ToolCall,
    ToolResult,
    Trace,
    Turn,
    Usage,
    as_tasks,
    from_json,
    json_line,
    jsonable,
    read_json_lines,
    read_rollouts,
    to_json,
)

text = st.text(max_size=20)
scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | text
)
free = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(text, inner, max_size=3),
    max_leaves=5,
)
finite = st.floats(allow_nan=False, allow_infinity=False)
ids = st.lists(st.integers(0, 10**6), max_size=5).map(tuple)
kinds = st.sampled_from(["format", "tool", "time_limit", "infrastructure"])
failures = st.builds(Failure, kinds, text, text, text)
calls = st.builds(
    ToolCall, text, text, st.dictionaries(text, free, max_size=2), st.sampled_from(["json", "code"])
)
turns = st.builds(
    Turn,
    messages=st.lists(st.dictionaries(text, free, max_size=2), max_size=2).map(tuple),
    text=text,
    prompt_ids=ids,
    completion_ids=ids,
    logprobs=st.lists(finite, max_size=3).map(tuple),
    sampling=st.builds(Sampling, temperature=finite, stop=st.lists(text, max_size=2).map(tuple)),
    calls=st.lists(calls, max_size=2).map(tuple),
    results=st.lists(st.builds(ToolResult, text, free, st.none() | text), max_size=2).map(tuple),
    error=st.none() | failures,
    row_break=st.none() | text,
)
traces = st.builds(
    Trace,
    turns=st.lists(turns, max_size=2).map(tuple),
    final_answer=free,
    error=st.none() | failures,
    usage=st.builds(Usage, st.integers(0), st.integers(0), finite),
    state=st.dictionaries(text, free, max_size=2),
)
rewards = st.builds(RewardResult, finite, st.dictionaries(text, finite, max_size=2))
tasks = st.builds(Task, text, text, free, st.dictionaries(text, free, max_size=2))
rollouts = st.builds(Rollout, tasks, traces, st.none() | rewards, st.integers(0, 9))


@settings(max_examples=60, deadline=None)
@given(rollouts)
def test_a_rollout_survives_json(rollout):
    line = json_line(rollout, step=1)
    assert "\n" not in line
    data = json.loads(line)
    assert data.pop("schema") == 1
    assert data.pop("step") == 1
    assert from_json(Rollout, data) == rollout


def test_numbers_that_json_has_not_keep_the_line_valid_and_numeric_fields_exact():
    turn = Turn((), "x", (1,), (2,), (-math.inf,))
    line = json_line(Rollout(Task("a", "q"), Trace((turn,), final_answer=math.nan)))
    back = from_json(Rollout, json.loads(line, parse_constant=pytest.fail))
    assert back.trace.turns == (turn,)
    assert back.trace.final_answer == "nan"


def test_a_demonstration_survives_json():
    demonstration = Demonstration(
        Task("a", "q"), ({"role": "user", "content": "q"}, {"role": "assistant", "content": "4"})
    )
    assert from_json(Demonstration, json.loads(json.dumps(to_json(demonstration)))) == demonstration


def test_records_are_frozen():
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        Task("a", "q").query = "another"


def test_what_is_not_the_record_is_named():
    with pytest.raises(DataError, match="not a Rollout"):
        from_json(Rollout, {"task": {"id": "a"}, "trace": {"turns": 3}})


def test_jsonable_keeps_data_and_writes_the_rest_as_text():
    assert jsonable({"a": (1, 2.5, None), 3: {"x"}}) == {"a": [1, 2.5, None], "3": ["x"]}
    assert jsonable([math.nan, -math.inf]) == ["nan", "-inf"]
    assert jsonable(Task) == str(Task)


def test_tasks_come_from_dicts_and_tasks_and_keep_unknown_keys_as_metadata():
    given_task = Task("own", "2 + 2?", "4")
    made = as_tasks(
        [
            {"query": "5 + 7", "gold_answer": "12", "level": 1, "metadata": {"unit": "kg"}},
            given_task,
        ]
    )
    assert made == [Task("0", "5 + 7", "12", {"level": 1, "unit": "kg"}), given_task]
    assert made[0].fields() == {
        "task_id": "0", "query": "5 + 7", "gold_answer": "12", "level": 1, "unit": "kg",
    }  # fmt: skip
    assert as_tasks({"query": f"q{n}"} for n in range(2))[1].id == "1"


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ([], "no tasks"),
        ([{"gold_answer": "4"}], "task 0 .* has no 'query'"),
        ([{"query": "  "}], "has no 'query'"),
        ([{"query": 5}], "has no 'query'"),
        ([{"query": "q"}, "r"], "task 1 is a str"),
        ([{"query": "q", "metadata": "x"}], "task 0: 'metadata' must be a dict, not 'x'"),
        ([Task("x", "q", metadata=None)], "task 0: 'metadata' must be a dict, not None"),
        ({"query": "q"}, "a list of dicts"),
        (7, "an iterable of dicts"),
        ([{"id": "x", "query": "q"}, {"id": "x", "query": "r"}], "tasks 0 and 1 share the id 'x'"),
    ],
)
def test_tasks_that_cannot_be_used_are_named(data, message):
    with pytest.raises(DataError, match=message):
        as_tasks(data)


def test_an_id_that_is_none_is_the_position_as_in_rows_of_a_table():
    rows = [{"id": None, "query": "q", "metadata": None}, {"id": None, "query": "r"}]
    assert [task.id for task in as_tasks(rows)] == ["0", "1"]


def test_what_an_iterable_of_tasks_raises_is_not_taken_for_bad_data():
    with pytest.raises(TypeError, match="NoneType"):
        as_tasks({"query": None + n} for n in range(2))


def journal(tmp_path, content):
    path = tmp_path / "journal.jsonl"
    path.write_bytes(content)
    return path


def test_a_torn_last_line_is_left_out_and_a_broken_one_before_it_is_named(tmp_path):
    whole = json_line(Rollout(Task("a", "q"), Trace())).encode()
    assert len(read_rollouts(journal(tmp_path, whole + b"\n" + whole[:-4]))) == 1
    with pytest.raises(DataError, match=r"journal\.jsonl:1: not JSON"):
        read_rollouts(journal(tmp_path, whole[:-4] + b"\n" + whole + b"\n"))


def test_a_torn_character_and_unicode_line_separators_are_no_line_ends(tmp_path):
    whole = json_line(Task("a", "one\u2028two\x85three")).encode() + b"\n"
    torn = '{"schema": 1, "query": "é'.encode()[:-1]
    [line] = read_json_lines(journal(tmp_path, whole + torn))
    assert line["query"] == "one\u2028two\x85three"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"[1]", "a JSON object is needed"),
        (b'{"schema": 99}', "Upgrade"),
        (b'{"schema": "x"}', "Upgrade"),
    ],
)
def test_foreign_lines_are_named(tmp_path, line, message):
    with pytest.raises(DataError, match=message):
        list(read_json_lines(journal(tmp_path, line + b"\n")))


def test_scores_are_none_where_an_attempt_was_not_scored():
    task = Task("a", "q")
    failed = RewardResult(None, failure=Failure("reward", "nan"))
    group = Group(task, tuple(Rollout(task, Trace(), r) for r in (RewardResult(0.5), failed, None)))
    assert group.scores == (0.5, None, None)


def test_a_transcript_notes_calls_on_turns_and_keeps_its_own_failure_first():
    transcript = Transcript()
    transcript.add_turn(Turn((), "one", (1, 2), (3,), (0.0,)))
    transcript.add_turn(Turn((), "two", (1, 2, 3), (4, 5), (0.0, 0.0)))
    transcript.add_call(ToolCall("c", "add"), ToolResult("c", 4), turn=0)
    transcript.state["seen"] = {1}
    transcript.fail(Failure("context_overflow", "full"))
    transcript.fail(Failure("infrastructure", "later"))
    trace = transcript.trace("4", Failure("agent", "gave up"))
    assert [len(turn.calls) for turn in trace.turns] == [1, 0]
    assert trace.error == Failure("context_overflow", "full")
    assert trace.final_answer is None
    assert (trace.usage.prompt_tokens, trace.usage.completion_tokens) == (5, 3)
    assert trace.state == {"seen": [1]}


def test_a_closed_transcript_takes_nothing_more():
    transcript = Transcript()
    transcript.add_turn(Turn((), "one"))
    transcript.close()
    with pytest.raises(AttemptClosed):
        transcript.add_turn(Turn((), "two"))
    transcript.add_call(ToolCall("c", "add"), ToolResult("c", 4))
    transcript.fail_turn(Failure("format", "late"))
    assert transcript.trace().turns == (Turn((), "one"),)
