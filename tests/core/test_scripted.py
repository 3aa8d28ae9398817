"""The scripted policy and the function agent are whole implementations of their roles."""

import asyncio
import time

import pytest

from toolbrain_core.errors import AttemptClosed, SamplerFailure, UnsupportedAgent
from toolbrain_core.plugins import PluginManager
from toolbrain_core.roles import AgentAdapter, AttemptKey, ChatRequest, Policy, Session
from toolbrain_core.testing import scripted
from toolbrain_core.testing.scripted import FunctionAdapter, FunctionAgent, ScriptedPolicy
from toolbrain_core.traces import Task, ToolCall

KEY = AttemptKey("run", 0, "a", 0)


def request(text="hi", **options):
    return ChatRequest(({"role": "user", "content": text},), **options)


def double(n):
    """Twice n."""
    return 2 * n


def test_they_fit_their_roles():
    policy = ScriptedPolicy(["x"])
    assert isinstance(policy, Policy)
    assert isinstance(policy.session(KEY), Session)
    assert isinstance(FunctionAdapter(), AgentAdapter)


def test_a_reply_ends_before_the_first_stop_string_and_the_ids_after_it():
    session = ScriptedPolicy(["code</code> more STOP"]).session(KEY)
    reply = session.chat(request(stop=("STOP", "</code>")))
    [turn] = session.transcript.turns
    assert reply.text == turn.text == "code"
    assert "".join(map(chr, turn.completion_ids)) == "code</code>"
    assert turn.finish_reason == "stop"


def test_rows_train_every_sampled_token_once():
    policy = ScriptedPolicy(["one", "three"])
    session = policy.session(KEY)
    session.chat(request("a"))
    session.chat(request([{"type": "text", "text": "ab"}]))
    rows = policy.rows(session.transcript.trace())
    assert [sum(row.trained) for row in rows] == [3, 5]
    assert rows[1].turn == (-1, -1, 1, 1, 1, 1, 1)
    for row in rows:
        assert len({len(row.ids), len(row.trained), len(row.logprobs), len(row.turn)}) == 1


def test_a_script_that_ends_is_a_sampler_failure_of_the_session():
    session = ScriptedPolicy(["only"]).session(KEY)
    session.chat(request())
    with pytest.raises(SamplerFailure, match="after 1 replies"):
        session.chat(request())
    assert session.transcript.failure.kind == "infrastructure"


def test_closing_a_session_ends_a_delayed_reply():
    session = ScriptedPolicy(["late"], delay=0.2).session(KEY)
    session.transcript.close()
    started = time.monotonic()
    with pytest.raises(AttemptClosed):
        session.chat(request())
    with pytest.raises(AttemptClosed):
        asyncio.run(session.achat(request()))
    assert time.monotonic() - started < 1


def test_save_and_load_keep_replies_and_version(tmp_path):
    ScriptedPolicy(["a", "b"], weights_version=3).save(tmp_path / "policy")
    other = ScriptedPolicy(["c"])
    other.load(tmp_path / "policy")
    assert (other.replies, other.weights_version) == (["a", "b"], 3)


def test_a_bound_agent_answers_with_its_policy():
    async def coroutine(ask, task):
        return await ask(task.query)

    policy = ScriptedPolicy(["4"])
    for function in (lambda ask, task: ask(task.query), coroutine):
        agent = FunctionAgent(function)
        with pytest.raises(UnsupportedAgent, match="no model"):
            agent.run("2 + 2?")
        bound = FunctionAdapter().bind(agent, policy)
        assert bound.run("2 + 2?") == "4"
        assert FunctionAdapter().bind(bound, policy) is bound


def test_a_demonstration_executes_its_plan():
    agent = FunctionAgent(lambda ask, task: None, [double])
    plan = [ToolCall("c", "double", {"n": 4})]
    demonstration = FunctionAdapter().demonstrate(agent, Task("a", "twice 4?"), plan)
    roles = [message["role"] for message in demonstration.messages]
    assert roles == ["user", "assistant", "user", "assistant"]
    assert demonstration.messages[-1]["content"] == "8"


def test_tools_are_described_and_can_be_narrowed_to_some():
    agent = FunctionAgent(lambda ask, task: list(ask.tools), [double, len])
    assert [spec.name for spec in FunctionAdapter().tools(agent)] == ["double", "len"]
    session = ScriptedPolicy(["x"]).session(KEY)
    trace = FunctionAdapter().run(agent, Task("a", "q"), session, tools=["double"])
    assert trace.final_answer == ["double"]


def test_the_module_is_a_plugin_for_function_agents():
    plugins = PluginManager.with_plugins(scripted)
    agent = FunctionAgent(lambda ask, task: None, model=ScriptedPolicy(["x"]))
    assert plugins.match_agent(agent) == "function"
    provided = {name for names in plugins.records[-1].provides.values() for name in names}
    assert provided == {"function", "scripted"}
    assert scripted.scripted_policy(FunctionAdapter().model(agent)) is agent.model
