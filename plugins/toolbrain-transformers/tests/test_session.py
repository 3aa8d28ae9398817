"""Sessions: exact ids, log-probabilities, stops, overflow, many at once."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from toolbrain_transformers.node_cache import CachedNode
from trl.chat_template_utils import qwen2_5_chat_template

from toolbrain_core.errors import AttemptClosed, ContextOverflow, NotServed, SamplerFailure
from toolbrain_core.roles import AttemptKey, ChatRequest
from toolbrain_core.traces import Sampling

#: ChatML without the end-of-sequence token after answers: agents that strip it render prompts so.
NO_EOS_TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'assistant' %}{{ m.content }}\n"
    "{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
)

WORDS = ["mug", "a green lamp", "seven blue chairs and one table", "the price of tea in winter"]
TOOL = {
    "type": "function",
    "function": {
        "name": "price",
        "description": "Price of an item.",
        "parameters": {"type": "object", "properties": {"item": {"type": "string"}}},
    },
}


def test_threads_at_once_share_forward_passes(make_policy, key, user):
    policy = make_policy()
    passes: list[int] = []
    policy.ref.model.lm_head.register_forward_hook(lambda *_: passes.append(1))
    barrier = threading.Barrier(8)

    def attempt(number: int) -> Any:
        session = policy.session(key(number), Sampling(max_new_tokens=20))
        barrier.wait()
        session.chat(user(f"attempt {number}"))
        return session.transcript.turns[0]

    with policy.serving(), ThreadPoolExecutor(8) as pool:
        turns = list(pool.map(attempt, range(8)))
    sampled = sum(len(turn.completion_ids) for turn in turns)
    assert sampled > 100
    assert len(passes) < sampled / 3


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(max_new_tokens=12),
        Sampling(temperature=0.7, top_p=0.9, top_k=50, max_new_tokens=12),
        Sampling(temperature=0.0, max_new_tokens=12),
        Sampling(repetition_penalty=1.3, min_p=0.01, max_new_tokens=12),
    ],
    ids=["plain", "cut", "greedy", "penalised"],
)
def test_recorded_logprobs_equal_a_fresh_forward(
    make_policy, make_model, key, user, follow_up, fresh_logprobs, sampling
):
    policy = make_policy(make_model(eos_logit=4.0, spread=2.0))
    request = user("hello")
    session = policy.session(key(), sampling)
    with policy.serving():
        for question in ("again", "once more", "and now"):
            request = follow_up(request, session.chat(request), question)
    for turn in session.transcript.turns:
        assert len(turn.logprobs) == len(turn.completion_ids) > 0
        fresh = fresh_logprobs(policy.model, turn)
        assert (fresh - torch.tensor(turn.logprobs)).abs().max() < 1e-4
    assert [turn.row_break for turn in session.transcript.turns] == ["first", None, None]


def test_greedy_ids_equal_generate_on_prompts_of_mixed_lengths(make_policy, key, user):
    policy = make_policy()
    greedy = Sampling(temperature=0.0, max_new_tokens=16)
    sessions = [policy.session(key(number), greedy) for number in range(len(WORDS))]
    with policy.serving(), ThreadPoolExecutor(len(WORDS)) as pool:
        list(pool.map(lambda pair: pair[0].chat(user(pair[1])), zip(sessions, WORDS, strict=True)))
    for session in sessions:
        turn = session.transcript.turns[0]
        prompt = torch.tensor([turn.prompt_ids])
        alone = policy.ref.model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=16,
            do_sample=False,
            pad_token_id=0,
        )
        assert turn.completion_ids == tuple(alone[0, prompt.shape[1] :].tolist())


def same_draws(one: tuple[int, ...], other: tuple[int, ...]) -> bool:
    """Whether ids are equal up to a draw that fell on the edge between neighbouring tokens, where
    the last bit of a probability decides; what follows it differs then."""
    for a, b in zip(one, other, strict=True):
        if a != b:
            return abs(a - b) < 20  # of 49,152
    return True


def test_a_result_does_not_depend_on_what_else_is_in_the_batch(policy, key, user):
    sampling = Sampling(temperature=0.8, top_p=0.95, max_new_tokens=16)

    def attempt(number: int) -> Any:
        session = policy.session(key(number), sampling)
        session.chat(user(WORDS[number % len(WORDS)] * (1 + number)))
        return session.transcript.turns[0].completion_ids

    with policy.serving():
        alone = [attempt(number) for number in range(8)]
        with ThreadPoolExecutor(8) as pool:
            together = list(pool.map(attempt, range(8)))
    assert all(map(same_draws, together, alone))
    assert len(set(alone)) == 8


def test_one_key_gives_one_result_and_every_turn_draws_anew(policy, key, user):
    def texts() -> list[str]:
        session = policy.session(key(3, seed=5), Sampling(max_new_tokens=8))
        return [session.chat(user("same")).text for _ in range(3)]

    with policy.serving():
        first, second = texts(), texts()
    assert first == second
    assert len(set(first)) == 3


@pytest.mark.parametrize(("start", "length"), [(1, 1), (3, 2), (5, 4), (8, 3), (12, 9)])
def test_a_stop_string_ends_the_text_and_cuts_no_token(policy, key, user, start, length):
    free = Sampling(max_new_tokens=24)
    with policy.serving():
        session = policy.session(key(), free)
        whole = session.chat(user("hi")).text
        stop = whole[start : start + length]
        stopped = policy.session(key(), free)
        reply = stopped.chat(user("hi", stop=("not in there", stop)))
    unstopped, turn = session.transcript.turns[0], stopped.transcript.turns[0]
    assert reply.finish_reason == turn.finish_reason == "stop"
    assert reply.text == turn.text == whole[: whole.index(stop)]
    kept = len(turn.completion_ids)
    assert turn.completion_ids == unstopped.completion_ids[:kept]
    assert stop in policy.visible_text(turn.completion_ids)
    assert stop not in policy.visible_text(turn.completion_ids[:-1])
    assert len(turn.logprobs) == kept


def test_the_stop_string_that_comes_first_counts(policy, key, user):
    with policy.serving():
        whole = policy.session(key(), Sampling(max_new_tokens=24)).chat(user("hi")).text
        stops = (whole[14:18], whole[4:6], whole[9:10])
        session = policy.session(key(), Sampling(max_new_tokens=24, stop=stops[:1]))
        text = session.chat(user("hi", stop=stops[1:])).text
    assert text == whole[: min(whole.index(stop) for stop in stops)]
    assert session.transcript.turns[0].sampling.stop == stops


def test_the_next_turn_goes_on_from_recorded_ids(policy, key, user, follow_up):
    session = policy.session(key(), Sampling(max_new_tokens=8))
    with policy.serving():
        request = user("hello")
        request = follow_up(request, session.chat(request), "go on")
        session.chat(request)
    first, second = session.transcript.turns
    assert second.row_break is None
    assert second.prompt_ids[: len(first.prompt_ids)] == first.prompt_ids
    answered = len(first.prompt_ids) + len(first.completion_ids)
    assert second.prompt_ids[:answered] == first.prompt_ids + first.completion_ids
    assert policy.decode(second.prompt_ids) == policy.template.render(request.messages)
    assert len(policy.rows(session.transcript.trace())) == 1


def test_a_changed_history_begins_a_new_row_and_says_where(policy, key, user):
    session = policy.session(key(), Sampling(max_new_tokens=8))
    with policy.serving():
        session.chat(user("the first question"))
        session.chat(user("the second question"))
    reason = session.transcript.turns[1].row_break
    assert "no longer begins" in reason
    assert "the " in reason
    assert len(policy.rows(session.transcript.trace())) == 2


def test_an_eos_that_the_template_repeats_stays_in_its_row(
    make_policy, make_model, key, user, follow_up
):
    policy = make_policy(make_model(eos_logit=30.0))
    session = policy.session(key(), Sampling(max_new_tokens=8))
    with policy.serving():
        request = user("hello")
        reply = session.chat(request)
        session.chat(follow_up(request, reply, "go on"))
    assert reply.finish_reason == "eos"
    assert "<|im_end|>" not in reply.text
    assert len(policy.rows(session.transcript.trace())) == 1


def test_an_eos_that_the_template_drops_is_trained_in_a_row_of_its_own(
    make_policy, make_model, with_template, key, user, follow_up
):
    policy = make_policy(make_model(eos_logit=9.0), with_template(NO_EOS_TEMPLATE))
    session = policy.session(key(), Sampling(max_new_tokens=30))
    with policy.serving():
        request = user("hello")
        reply = session.chat(request)
        session.chat(follow_up(request, reply, "go on"))
    first, second = session.transcript.turns
    assert first.finish_reason == "eos"
    assert len(first.completion_ids) > 1
    kept = first.prompt_ids + first.completion_ids[:-1]
    assert second.row_break is None
    assert second.prompt_ids[: len(kept)] == kept
    long, alone = policy.rows(session.transcript.trace())
    assert alone.ids == first.prompt_ids + first.completion_ids
    assert alone.trained == (False,) * len(kept) + (True,)
    assert long.ids == second.prompt_ids + second.completion_ids
    sampled = len(first.completion_ids) + len(second.completion_ids)
    assert sum(long.trained) + sum(alone.trained) == sampled


def test_agents_in_one_session_have_conversations_of_their_own(policy, key, user, follow_up):
    session = policy.session(key(), Sampling(max_new_tokens=8))
    with policy.serving():
        request = user("hello", agent_name="manager")
        reply = session.chat(request)
        session.chat(user("hello", agent_name="searcher"))
        session.chat(follow_up(request, reply, "go on", agent_name="searcher"))
        session.chat(follow_up(request, reply, "go on", agent_name="manager"))
    first, other, strange, continued = session.transcript.turns
    assert [first.row_break, other.row_break, continued.row_break] == ["first", "first", None]
    assert "no longer begins" in strange.row_break
    assert [t.agent_name for t in session.transcript.turns] == [
        "manager",
        "searcher",
        "searcher",
        "manager",
    ]


def test_a_prompt_without_room_for_an_answer_is_a_typed_failure(make_policy, key, user):
    policy = make_policy(max_context=40)
    session = policy.session(key(), Sampling(max_new_tokens=8))
    with policy.serving(), pytest.raises(ContextOverflow, match="context 40"):
        session.chat(user("word " * 40))
    trace = session.transcript.trace("an answer")
    assert trace.turns == ()
    assert trace.error.kind == "context_overflow"
    assert trace.error.is_own_mistake
    assert trace.final_answer is None


def test_a_context_that_fills_up_keeps_what_was_sampled(
    make_policy, key, user, follow_up, fresh_logprobs
):
    policy = make_policy(max_context=60)
    session = policy.session(key(), Sampling(max_new_tokens=500))
    with policy.serving(), pytest.raises(ContextOverflow, match="60 tokens was full"):
        session.chat(user("hello"))
    (turn,) = session.transcript.turns
    assert turn.finish_reason == "context"
    assert len(turn.prompt_ids) + len(turn.completion_ids) == 60
    assert len(turn.logprobs) == len(turn.completion_ids)
    assert session.transcript.trace().error.kind == "context_overflow"
    (row,) = policy.rows(session.transcript.trace())
    assert sum(row.trained) == len(turn.completion_ids)


def test_the_limit_comes_before_the_end_of_the_context(make_policy, key, user):
    policy = make_policy(max_context=60)
    session = policy.session(key(), Sampling(max_new_tokens=500))
    with policy.serving():
        reply = session.chat(user("hello", max_tokens=5))
    assert reply.finish_reason == "length"
    assert reply.usage.completion_tokens == len(session.transcript.turns[0].completion_ids) == 5
    assert session.transcript.failure is None


@pytest.mark.parametrize("style", ["chat", "achat"])
def test_an_abandoned_attempt_unwinds_and_frees_its_place(make_policy, key, user, style):
    policy = make_policy(max_batch=1, max_context=200_000)
    abandoned = policy.session(key(), Sampling(max_new_tokens=150_000))
    raised: list[BaseException] = []

    def attempt() -> None:
        try:
            if style == "chat":
                abandoned.chat(user("hello"))
            else:
                asyncio.run(abandoned.achat(user("hello")))
        except BaseException as error:
            raised.append(error)

    with policy.serving():
        thread = threading.Thread(target=attempt, daemon=True)
        thread.start()
        time.sleep(0.3)
        abandoned.transcript.close()
        thread.join(5)
        reply = policy.session(key(1), Sampling(max_new_tokens=2)).chat(user("hello"))
    assert [type(error) for error in raised] == [AttemptClosed]
    assert reply.usage.completion_tokens == 2
    assert abandoned.transcript.turns == ()
    with pytest.raises(AttemptClosed):
        abandoned.chat(user("again"))


def test_a_cancelled_achat_frees_its_place(make_policy, key, user):
    policy = make_policy(max_batch=1, max_context=200_000)

    async def attempts() -> Any:
        endless = policy.session(key(), Sampling(max_new_tokens=150_000))
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(endless.achat(user("hello")), 0.3)
        quick = policy.session(key(1), Sampling(max_new_tokens=2))
        return await asyncio.wait_for(quick.achat(user("hello")), 5)

    with policy.serving():
        assert asyncio.run(attempts()).usage.completion_tokens == 2


def test_achat_answers_as_chat_does_with_many_at_once(policy, key, user):
    sampling = Sampling(max_new_tokens=8)

    async def together() -> list[str]:
        sessions = [policy.session(key(n), sampling) for n in range(5)]
        replies = await asyncio.gather(*(s.achat(user(WORDS[0])) for s in sessions))
        assert [s.transcript.turns[0].text for s in sessions] == [r.text for r in replies]
        return [reply.text for reply in replies]

    with policy.serving():
        awaited = asyncio.run(together())
        asked = [policy.session(key(n), sampling).chat(user(WORDS[0])).text for n in range(5)]
    assert awaited == asked


@pytest.mark.parametrize("style", ["chat", "achat"])
def test_chat_outside_serving_is_a_failure_of_the_infrastructure(policy, key, user, style):
    session = policy.session(key())

    def ask() -> None:
        if style == "chat":
            session.chat(user("hello"))
        else:
            asyncio.run(session.achat(user("hello")))

    with pytest.raises(SamplerFailure, match="serving"):
        ask()
    assert session.transcript.failure.kind == "infrastructure"


@pytest.mark.parametrize("max_batch", [1, 64], ids=["full", "with room"])
def test_serving_ends_at_once_whatever_is_in_flight(make_policy, key, user, max_batch):
    policy = make_policy(max_batch=max_batch, max_context=200_000)
    sessions = [policy.session(key(n), Sampling(max_new_tokens=1500)) for n in range(2)]
    with ThreadPoolExecutor(2) as pool:
        with policy.serving():
            waiting = [pool.submit(session.chat, user("hello")) for session in sessions]
            time.sleep(0.3)
            asked_to_stop = time.monotonic()
        assert time.monotonic() - asked_to_stop < 3
        for future in waiting:
            assert isinstance(future.exception(5), SamplerFailure)
    assert {session.transcript.failure.kind for session in sessions} == {"infrastructure"}


class Device:
    """A model's forward pass fails while it is `broken`."""

    def __init__(self, model):
        self.broken = False
        model.register_forward_pre_hook(self.look)

    def look(self, *_):
        if self.broken:
            raise RuntimeError("the device is on fire")


def test_a_sampler_that_breaks_down_fails_what_it_was_asked_and_ends_serving(
    make_policy, make_model, key, user
):
    model = make_model()
    policy, device = make_policy(model), Device(model)
    first, second = (policy.session(key(n), Sampling(max_new_tokens=4)) for n in range(2))

    def lose() -> None:
        device.broken = True
        for session in (first, second):
            with pytest.raises(SamplerFailure):
                session.chat(user("hello"))

    with pytest.raises(SamplerFailure, match="the device is on fire"), policy.serving():
        lose()
    assert first.transcript.failure.kind == "infrastructure"

    device.broken = False
    with policy.serving():
        assert policy.session(key(), Sampling(max_new_tokens=4)).chat(user("hello")).turn == 0


def test_parts_are_flattened_where_the_template_needs_strings(policy, key, user):
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    session = policy.session(key(), Sampling(max_new_tokens=2))
    with policy.serving():
        session.chat(ChatRequest(({"role": "user", "content": parts},)))
        session.chat(user("one\ntwo"))
    as_parts, as_text = session.transcript.turns
    assert as_parts.prompt_ids == as_text.prompt_ids
    assert as_parts.messages[0]["content"] == parts


def test_an_image_is_not_served(policy, key):
    session = policy.session(key())
    image = {"role": "user", "content": [{"type": "image", "image": "cat.png"}]}
    with policy.serving(), pytest.raises(NotServed, match="image"):
        session.chat(ChatRequest((image,)))
    assert session.transcript.turns == ()


def test_in_use_whole_prompts_are_tokenised_as_the_agent_does(policy, key, user, follow_up):
    def second_prompt(attempt: int, purpose: str) -> tuple[Any, str]:
        session = policy.session(key(attempt), Sampling(max_new_tokens=40), purpose)
        request = user("hello")
        request = follow_up(request, session.chat(request), "go on")
        session.chat(request)
        text = policy.template.render(request.messages)
        return session.transcript.turns[1].prompt_ids, text

    differ = 0
    with policy.serving():
        for attempt in range(6):
            use, text = second_prompt(attempt, "use")
            train, same_text = second_prompt(attempt, "train")
            assert text == same_text == policy.decode(train)
            assert use == policy.encode(text)
            differ += train != use
    # Else keeping ids would be for nothing: some draws are not what the tokenizer would make.
    assert differ


def test_the_callers_limit_and_temperature_count_where_no_algorithm_says_otherwise(
    make_policy, key, user
):
    policy = make_policy(defaults={"max_new_tokens": 6, "do_sample": True, "temperature": 0.5})
    own, trained = policy.session(key()), policy.session(key(), Sampling(max_new_tokens=4))
    with policy.serving():
        for session in (own, trained):
            session.chat(user("hello", temperature=0.0, max_tokens=5))
    (use,), (train,) = own.transcript.turns, trained.transcript.turns
    assert (use.sampling.temperature, use.sampling.max_new_tokens) == (0.0, 5)
    assert (train.sampling.temperature, train.sampling.max_new_tokens) == (1.0, 4)


def test_turns_carry_the_version_of_the_weights_that_sampled_them(make_policy, key, user):
    policy = make_policy()
    session = policy.session(key(), Sampling(max_new_tokens=2))
    with policy.serving():
        session.chat(user("hello"))
    with policy.training():
        pass
    with policy.serving():
        session.chat(user("hello"))
    assert [turn.weights_version for turn in session.transcript.turns] == [0, 1]


def test_calls_that_the_policy_wrote_are_in_the_reply(
    make_policy, make_model, with_template, teach, key, user
):
    tokenizer = with_template(qwen2_5_chat_template)
    model = make_model()
    policy = make_policy(model, tokenizer)
    request = user("How much is a mug?", tools=(TOOL,))
    written = 'Sure. <tool_call>\n{"name": "price", "arguments": {"item": "mug"}}\n</tool_call>'
    prompt = policy.encode(policy.template.render(request.messages, request.tools))
    with policy.training():
        model.requires_grad_(True)
        teach(model, list(prompt), list(policy.encode(written + "<|im_end|>")))
    session = policy.session(key(), Sampling(temperature=0.0, max_new_tokens=60))
    with policy.serving():
        reply = session.chat(request)
        without = session.chat(user("How much is a mug?"))
    (call,) = reply.tool_calls
    assert call["id"] == "call_0_0"
    assert call["function"] == {"name": "price", "arguments": '{"item": "mug"}'}
    assert reply.text == written
    assert session.transcript.turns[0].prompt_ids == prompt
    assert without.tool_calls == ()


def test_nothing_cached_outlives_serving(policy):
    """Without waiting for Python's cycle collector, which cannot see how large tensors are."""
    gc.collect()
    gc.disable()
    try:
        with policy.serving():
            session = policy.session(AttemptKey("memory", 0, "t", 0), Sampling(max_new_tokens=3))
            session.chat(ChatRequest(({"role": "user", "content": "hello"},)))
        held = [t for t in gc.get_objects() if isinstance(t, CachedNode) and t.keys]
        assert not held
    finally:
        gc.enable()
