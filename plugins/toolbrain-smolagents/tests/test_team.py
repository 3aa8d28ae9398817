"""Managed agents."""

from __future__ import annotations

import pytest
from smolagents import CodeAgent, InferenceClientModel, ToolCallingAgent, TransformersModel
from toolbrain_smolagents import SmolagentsAdapter

from toolbrain_core.errors import UnsupportedAgent
from toolbrain_core.traces import Task


def team(worker_model, manager_model, price, cls=ToolCallingAgent, **options):
    worker = cls(
        tools=[price], model=worker_model, name="clerk", description="Knows prices.", **options
    )
    return CodeAgent(tools=[], model=manager_model, managed_agents=[worker])


def answers(block, as_json):
    """The manager asks the clerk, who asks the shop."""
    clerk = iter([as_json("price", item="mug"), as_json("final_answer", answer="seven")])
    manager = iter([block('r = clerk(task="Price of a mug?")'), block("final_answer(7)")])
    return lambda request, key, turn: next(clerk if request.agent_name == "clerk" else manager)


def test_turns_and_calls_of_a_managed_agent_are_its_own(model, price, run, block, as_json):
    trace = run(team(model, model, price), answers(block, as_json))
    assert [t.agent_name for t in trace.turns] == ["", "clerk", "clerk", ""]
    assert [[c.name for c in t.calls] for t in trace.turns] == [
        ["clerk"],
        ["price"],
        ["final_answer"],
        ["final_answer"],
    ]
    assert dict(trace.turns[0].calls[0].arguments) == {"task": "Price of a mug?"}
    assert "seven" in trace.turns[0].results[0].output
    assert trace.final_answer == 7


def test_failures_of_a_managed_agent_stay_on_its_turns(model, price, run, block, as_json):
    clerk = iter(["no call", as_json("final_answer", answer="seven")])
    manager = iter([block('r = clerk("Price?")'), block("final_answer(7)")])
    trace = run(
        team(model, model, price),
        lambda request, key, turn: next(clerk if request.agent_name else manager),
    )
    kinds = [(t.agent_name, t.error.kind if t.error else None) for t in trace.turns]
    assert kinds == [("", None), ("clerk", "format"), ("clerk", None), ("", None)]


def test_a_callback_of_a_managed_agent_that_raises_is_infrastructure(
    model, price, run, block, as_json
):
    def broken(step):
        raise ZeroDivisionError("in the callback")

    agent = team(model, model, price, step_callbacks=[broken])
    trace = run(agent, answers(block, as_json))
    assert trace.error.kind == "infrastructure"
    assert trace.final_answer is None


def test_an_agent_with_another_model_keeps_it(model, make_model, price, run, block):
    other = make_model()
    agent = team(other, model, price, max_steps=1)
    trace = run(agent, [block('r = clerk(task="Price?")'), block("final_answer(7)")])
    assert [t.agent_name for t in trace.turns] == ["", ""]
    assert [c.name for c in trace.calls] == ["clerk", "final_answer"]
    assert trace.results[0].error is None


def test_a_managed_agents_model_can_be_the_trainable_one(
    model, make_model, price, session_of, as_json
):
    class Manager(TransformersModel):
        """Asks the clerk, whatever it samples."""

        def generate(self, messages, **kwargs):
            message = super().generate(messages, **kwargs)
            message.content = '<code>final_answer(clerk(task="Price?"))</code>'
            return message

    other = make_model(Manager)
    agent = team(model, other, price)
    adapter = SmolagentsAdapter()
    assert adapter.model(agent).model is other.model
    assert adapter.model(agent, trainable=model).model is model.model
    replies = [as_json("price", item="mug"), as_json("final_answer", answer="seven")]
    trace = adapter.run(agent, Task("t", "Price?"), session_of(replies))
    assert [t.agent_name for t in trace.turns] == ["clerk", "clerk"]
    assert [c.name for c in trace.calls] == ["price", "final_answer"]
    assert "seven" in trace.final_answer
    with pytest.raises(UnsupportedAgent, match="trainable"):
        adapter.model(agent, trainable=make_model())


def test_a_managed_model_with_the_same_weights_has_its_own_options(
    model, make_model, price, run, block, as_json
):
    import copy

    other = copy.copy(model)
    other.kwargs = {**model.kwargs, "max_new_tokens": 3}
    limits = {}

    def reply(request, key, turn):
        limits[request.agent_name] = request.max_tokens
        return scripted(request, key, turn)

    scripted = answers(block, as_json)
    assert run(team(other, model, price), reply).final_answer == 7
    assert limits == {"": None, "clerk": 3}


def test_managed_agents_are_tools(model, price):
    agent = team(model, model, price)
    specs = SmolagentsAdapter().tools(agent)
    assert [s.name for s in specs] == ["clerk"]
    assert specs[0].parameters["required"] == ["task"]


def test_the_original_team_is_left_as_it_was(model, price, run, block, as_json):
    agent = team(model, model, price)
    worker = agent.managed_agents["clerk"]
    before = dict(vars(worker))
    run(agent, answers(block, as_json))
    assert agent.managed_agents == {"clerk": worker}
    assert vars(worker) == before
    assert type(worker) is ToolCallingAgent
    assert worker.memory.steps == []


def test_an_api_model_below_is_kept_and_above_is_refused(model, price):
    api = InferenceClientModel(model_id="some/model", token="none")
    adapter = SmolagentsAdapter()
    assert adapter.model(team(api, model, price)).model is model.model
    with pytest.raises(UnsupportedAgent, match="InferenceClientModel"):
        adapter.model(team(model, api, price))
    assert adapter.model(team(model, api, price), trainable=model).model is model.model


def test_task_of_another_kind_of_agent_is_refused(session_of):
    with pytest.raises(UnsupportedAgent, match="not a smolagents agent"):
        SmolagentsAdapter().run(object(), Task("t", "q"), session_of(["x"]))
