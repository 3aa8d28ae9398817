"""An attempt runs the user's agent as it is, and its trace says what the policy did."""

from __future__ import annotations

import pytest
from smolagents import ActionStep, CodeAgent, Tool, ToolCallingAgent, TransformersModel
from toolbrain_smolagents import SmolagentsAdapter

from toolbrain_core.errors import UnsupportedAgent


def test_calls_that_code_makes_are_in_the_trace(code_agent, run, block):
    trace = run(code_agent, [block('x = price("mug")'), block("final_answer(add(x, b=1))")])
    assert trace.final_answer == 8
    assert trace.error is None
    calls = [(c.name, dict(c.arguments), c.via) for c in trace.calls]
    assert calls == [
        ("price", {"item": "mug"}, "code"),
        ("add", {"a": 7, "b": 1}, "code"),
        ("final_answer", {"answer": 8}, "code"),
    ]
    assert [len(turn.calls) for turn in trace.turns] == [1, 2]
    assert [r.output for r in trace.results] == [7, 8, 8]


def test_calls_written_as_json_are_in_the_trace(json_agent, run, as_json):
    trace = run(json_agent, [as_json("price", item="mug"), as_json("final_answer", answer="7")])
    assert trace.final_answer == "7"
    assert type(trace.final_answer) is str
    assert [(c.name, c.via) for c in trace.calls] == [("price", "json"), ("final_answer", "json")]


def test_the_policy_sees_what_the_model_would_see(code_agent, session_of, block, make_model):
    """The request's messages are those that TransformersModel itself hands to its template."""
    seen = []

    class Spy(TransformersModel):
        def _prepare_completion_kwargs(self, *args, **kwargs):
            prepared = super()._prepare_completion_kwargs(*args, **kwargs)
            seen.append(prepared["messages"])
            return prepared

    code_agent.model = make_model(Spy)
    code_agent.max_steps = 1
    code_agent.run("How much is a mug?")
    by_itself, seen[:] = seen[0], []
    session = session_of([block("final_answer(7)")])
    from toolbrain_core.traces import Task

    trace = SmolagentsAdapter().run(code_agent, Task("t", "How much is a mug?"), session)
    assert [dict(m) for m in trace.turns[0].messages] == [
        {"role": m["role"].value, "content": m["content"]} for m in by_itself
    ]
    assert all(type(m["role"]) is str for m in trace.turns[0].messages)


def test_an_attempt_can_be_repeated_to_the_letter(json_agent, run, as_json):
    """smolagents puts the id of each call into the next prompt."""
    replies = [as_json("price", item="mug"), as_json("price", item="lamp"), "7"]
    first, second = run(json_agent, replies), run(json_agent, replies)
    prompts = [turn.messages for turn in first.turns]
    assert prompts == [turn.messages for turn in second.turns]
    assert "'id': '" in prompts[1][2]["content"]
    assert prompts[2][2] != prompts[2][4]


def test_stop_strings_and_tool_schemas_are_passed_on(json_agent, run, as_json):
    requests = []

    def answer(request, key, turn):
        requests.append(request)
        return as_json("final_answer", answer="7") + "\nObservation: made up"

    trace = run(json_agent, answer)
    assert trace.turns[0].text.endswith("}}\n")
    assert requests[0].stop == ("Observation:", "Calling tools:")
    names = [tool["function"]["name"] for tool in requests[0].tools]
    assert names == ["price", "add", "final_answer"]


def test_code_agents_stop_at_their_closing_tag(price, model, run):
    agent = CodeAgent(tools=[price], model=model, code_block_tags=("[PY]", "[END]"))
    agent.code_block_tags = (r"<py>", r"</py>")
    stops = []

    def answer(request, key, turn):
        stops.append(request.stop)
        return '<py>final_answer(price("lamp"))</py>'

    assert run(agent, answer).final_answer == 12
    assert "</py>" in stops[0]


def test_the_call_for_a_last_answer_is_a_turn(price, model, run, block):
    agent = CodeAgent(tools=[price], model=model, max_steps=1)
    trace = run(agent, [block('price("mug")'), "It costs 7."])
    assert trace.final_answer == "It costs 7."
    assert len(trace.turns) == 2
    assert trace.state["max_steps_reached"] is True
    assert trace.error is None


def test_planning_steps_are_turns(price, model, run, block):
    agent = CodeAgent(tools=[price], model=model, planning_interval=1, max_steps=2)
    replies = ["1. Ask.<end_plan>", block('price("mug")'), "2. Say.", block("final_answer(7)")]
    trace = run(agent, replies)
    assert [t.text for t in trace.turns][::2] == ["1. Ask.", "2. Say."]
    assert trace.final_answer == 7


@pytest.mark.parametrize("cls", [CodeAgent, ToolCallingAgent])
def test_streaming_agents_run(cls, price, model, run, block, as_json, capfd):
    agent = cls(tools=[price], model=model, stream_outputs=True, planning_interval=2)
    action = block("final_answer(7)") if cls is CodeAgent else as_json("final_answer", answer=7)
    trace = run(agent, ["1. Answer.", action])
    assert trace.final_answer == 7
    assert capfd.readouterr().out == ""


def test_additional_args_reach_code_and_prompt(code_agent, run, block):
    arguments = {"stock": [1, 2]}
    trace = run(
        code_agent,
        [block("stock.append(3)\nfinal_answer(len(stock))")],
        metadata={"additional_args": arguments},
    )
    assert trace.final_answer == 3
    assert arguments == {"stock": [1, 2]}
    assert "stock" in trace.turns[0].messages[-1]["content"]


def test_reset_false_is_refused(code_agent, run):
    with pytest.raises(UnsupportedAgent, match="reset=False"):
        run(code_agent, ["x"], metadata={"reset": False})


def test_callbacks_and_checks_see_the_attempts_copy(price, model, run, block):
    seen = []
    agent = CodeAgent(
        tools=[price],
        model=model,
        step_callbacks={ActionStep: [lambda step, agent: seen.append((step, agent))]},
        final_answer_checks=[lambda answer, memory, agent: seen.append(agent) or True],
    )
    run(agent, [block("final_answer(7)")])
    (check_agent, (step, step_agent)) = seen
    assert step.is_final_answer
    assert check_agent is step_agent
    assert step_agent is not agent
    assert step_agent.monitor.total_output_token_count > 0
    assert agent.monitor.total_output_token_count == 0


def test_settings_of_the_executor_hold(price, model, run, block):
    agent = CodeAgent(
        tools=[price],
        model=model,
        additional_authorized_imports=["json"],
        max_print_outputs_length=100,
        instructions="Be brief.",
    )
    code = 'import json\nprint("y" * 500)\nz = json.dumps([1])'
    trace = run(agent, [block(code), block("final_answer(z)")])
    assert trace.final_answer == "[1]"
    assert "truncated" in trace.turns[1].messages[-1]["content"]
    assert "Be brief." in trace.turns[0].messages[0]["content"]


def test_custom_prompts_are_used(price, model, run, block):
    from toolbrain_smolagents import compact_prompts

    prompts = compact_prompts()
    prompts["system_prompt"] = "Tools: {{ tools | join(',') }}"
    agent = CodeAgent(tools=[price], model=model, prompt_templates=prompts)
    trace = run(agent, [block("final_answer(7)")])
    assert trace.turns[0].messages[0]["content"] == "Tools: price,final_answer"


def test_observe_replaces_what_the_policy_sees(code_agent, run, block):
    lengths = []

    def observe(trace, messages):
        lengths.append(len(messages))
        done = ", ".join(call.name for call in trace.calls) or "nothing"
        return [messages[0], {"role": "user", "content": f"Done: {done}"}]

    trace = run(code_agent, [block('price("mug")'), block("final_answer(7)")], observe=observe)
    assert [t.messages[-1]["content"] for t in trace.turns] == ["Done: nothing", "Done: price"]
    assert lengths[1] > lengths[0] == 2


def test_bound_agent_observes_with_its_own_weights(code_agent):
    asked = []

    def observe(trace, messages):
        asked.append(len(trace.turns))
        return [{"role": "user", "content": "Say anything."}]

    adapter = SmolagentsAdapter()
    assert adapter.bind(code_agent, policy=None) is code_agent
    bound = adapter.bind(code_agent, policy=None, observe=observe)
    assert bound.model.model is code_agent.model.model
    answers = [bound.run("one"), bound.run("two")]
    turns = code_agent.max_steps + 1
    assert asked == [*range(turns), *range(turns)]
    assert answers[0] == answers[1]  # greedy, and all it sees is the same
    assert len(bound.memory.steps) == turns + 1
    assert code_agent.memory.steps == []


def test_bound_and_scripted_runs_show_the_policy_the_same(json_agent, run, as_json):
    """What observe returns goes to the session as the model itself would format it."""

    def observe(trace, messages):
        return [
            {"role": "user", "content": "one"},
            {"role": "user", "content": "two"},
            {"role": "tool", "content": "three"},
        ]

    trace = run(json_agent, [as_json("final_answer", answer=1)], observe=observe)
    assert trace.turns[0].messages == ({"role": "user", "content": "one\ntwo\nthree"},)


def test_tools_can_be_restricted(code_agent, run, block):
    trace = run(code_agent, [block("add(1, 2)"), block("final_answer(1)")], tools=["price"])
    prompt = trace.turns[0].messages[0]["content"]
    assert "def price(" in prompt
    assert "def add(" not in prompt
    assert trace.turns[0].error.kind == "execution"
    assert set(code_agent.tools) == {"price", "add", "final_answer"}


def test_an_answer_that_only_a_tool_gave_is_no_answer(code_agent, run, block):
    trace = run(code_agent, [block('print(price("mug"))'), block('final_answer("unknown")')])
    assert 7 in [r.output for r in trace.results]
    assert trace.final_answer == "unknown"


def test_options_of_a_single_call_are_passed_on(model, price, run):
    class Careful(CodeAgent):
        def provide_final_answer(self, task):
            messages = self.write_memory_to_messages()
            return self.model.generate(messages, max_new_tokens=5, temperature=0.5)

    requests = []

    def answer(request, key, turn):
        requests.append(request)
        return "7"

    assert run(Careful(tools=[price], model=model, max_steps=1), answer).final_answer == "7"
    assert [r.max_tokens for r in requests] == [None, 5]
    assert [r.temperature for r in requests] == [None, 0.0]  # the model's do_sample=False wins


def test_a_models_own_generate_still_runs(make_model, price, run, block):
    class Shouting(TransformersModel):
        def generate(self, messages, **kwargs):
            message = super().generate(messages, **kwargs)
            message.content = message.content.replace("MUG", "mug")
            return message

    agent = CodeAgent(tools=[price], model=make_model(Shouting))
    assert run(agent, [block('final_answer(price("MUG"))')]).final_answer == 7


def test_a_model_that_never_asks_is_refused(make_model, price, run):
    class Deaf(TransformersModel):
        def generate(self, messages, **kwargs):
            from smolagents import ChatMessage, MessageRole

            return ChatMessage(role=MessageRole.ASSISTANT, content="<code>final_answer(1)</code>")

    with pytest.raises(UnsupportedAgent, match=r"super\(\)\.generate"):
        run(CodeAgent(tools=[price], model=make_model(Deaf)), ["unused"])


class Slow(Tool):
    name, description, output_type = "slow", "Waits.", "string"
    inputs = {"text": {"type": "string", "description": "Any text."}}  # noqa: RUF012

    async def forward(self, text: str) -> str:
        import asyncio

        await asyncio.sleep(0.01)
        return text.upper()


@pytest.mark.parametrize("cls", [CodeAgent, ToolCallingAgent])
def test_async_tools_are_completed(cls, model, run, block, as_json):
    agent = cls(tools=[Slow()], model=model)
    replies = [block('final_answer(slow("hi"))')]
    if cls is ToolCallingAgent:
        replies = [as_json("slow", text="hi"), as_json("final_answer", answer="HI")]
    trace = run(agent, replies)
    assert trace.final_answer == "HI"
    assert trace.results[0].output == "HI"
