"""Rows: every sampled token trained exactly once, in the context that it was sampled in."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from toolbrain_transformers.rows import rows_of

from toolbrain_core.traces import Turn

EOS = 0
TOKENS = st.integers(0, 3)  # few, so that prompts meet by chance too


def turn(prompt: tuple[int, ...], completion: tuple[int, ...]) -> Turn:
    logprobs = tuple(-0.1 * (1 + index) for index in range(len(completion)))
    return Turn((), "", prompt_ids=prompt, completion_ids=completion, logprobs=logprobs)


@st.composite
def conversations(draw: Any) -> list[Turn]:
    """Turns that go on from any earlier one (with its end-of-sequence token or without), repeat
    its prompt, cut it short, or begin anew."""
    turns: list[Turn] = []
    for _ in range(draw(st.integers(1, 6))):
        fresh = tuple(draw(st.lists(TOKENS, min_size=1, max_size=4)))
        prompt = fresh
        if turns and draw(st.booleans()):
            before = draw(st.sampled_from(turns))
            whole = before.prompt_ids + before.completion_ids
            kept = draw(st.sampled_from([whole, whole[:-1], before.prompt_ids, whole[:2]]))
            prompt = kept + (fresh if draw(st.booleans()) else ())
        body = tuple(draw(st.lists(st.integers(1, 3), max_size=3)))
        turns.append(turn(prompt or fresh, body + ((EOS,) if draw(st.booleans()) else ())))
    return turns


@given(conversations())
def test_every_sampled_token_is_trained_once_in_its_own_context(turns):
    rows = rows_of(turns, {EOS})
    trained: dict[int, list[tuple[int, float]]] = {index: [] for index in range(len(turns))}
    for row in rows:
        assert len(row.ids) == len(row.trained) == len(row.logprobs) == len(row.turn)
        for position, is_trained in enumerate(row.trained):
            if not is_trained:
                assert (row.logprobs[position], row.turn[position]) == (0.0, -1)
                continue
            source = turns[row.turn[position]]
            sampled = source.prompt_ids + source.completion_ids
            assert sampled[: position + 1] == row.ids[: position + 1]
            trained[row.turn[position]].append((position, row.logprobs[position]))
    for index, source in enumerate(turns):
        first = len(source.prompt_ids)
        assert sorted(trained[index]) == [(first + i, lp) for i, lp in enumerate(source.logprobs)]


@given(conversations())
def test_no_row_is_without_a_trained_token(turns):
    assert all(any(row.trained) for row in rows_of(turns, {EOS}))


def test_an_append_only_conversation_is_one_row():
    first = turn((1, 2), (3, 1))
    second = turn((1, 2, 3, 1, 2, 2), (1, EOS))
    third = turn((*second.prompt_ids, 1, EOS, 3), (2,))
    (row,) = rows_of([first, second, third], {EOS})
    assert row.ids == third.prompt_ids + third.completion_ids
    assert [i for i, is_trained in enumerate(row.trained) if is_trained] == [2, 3, 6, 7, 9]
    assert [t for t in row.turn if t >= 0] == [0, 0, 1, 1, 2]


def test_an_eos_that_is_not_repeated_is_trained_apart():
    first = turn((1, 2), (3, EOS))
    second = turn((1, 2, 3, 1), (2,))
    long, alone = rows_of([first, second], {EOS})
    assert (long.ids, long.trained) == ((1, 2, 3, 1, 2), (False, False, True, False, True))
    assert (alone.ids, alone.trained) == ((1, 2, 3, EOS), (False, False, False, True))


def test_two_attempts_at_one_prompt_are_two_rows():
    rows = rows_of([turn((1, 2), (3,)), turn((1, 2), (1,))], {EOS})
    assert [row.ids for row in rows] == [(1, 2, 3), (1, 2, 1)]


def test_a_turn_that_sampled_nothing_has_no_row():
    assert rows_of([turn((1, 2), ())], {EOS}) == []
