"""The model inside an agent, and agents that cannot be served."""

from __future__ import annotations

import subprocess
import sys

import pytest
from smolagents import CodeAgent, ToolCallingAgent
from smolagents.local_python_executor import PythonExecutor
from toolbrain_smolagents import SmolagentsAdapter, plugin

from toolbrain_core.errors import UnsupportedAgent
from toolbrain_core.roles import AgentAdapter


def test_the_model_its_tokenizer_and_its_options_are_named(make_model, price, model_dir):
    model = make_model(temperature=0.3, apply_chat_template_kwargs={"enable_thinking": False})
    adapter = SmolagentsAdapter()
    ref = adapter.model(CodeAgent(tools=[price], model=model))
    assert isinstance(adapter, AgentAdapter)
    assert ref.kind == "transformers"
    assert ref.model is model.model
    assert ref.processor is model.tokenizer
    assert ref.defaults == {"max_new_tokens": 8, "do_sample": False, "temperature": 0.3}
    assert ref.template_options == {"enable_thinking": False}
    assert ref.name == str(model_dir)


def test_template_options_are_in_the_request(make_model, price, run, block):
    model = make_model(apply_chat_template_kwargs={"enable_thinking": False})
    options = []

    def answer(request, key, turn):
        options.append(request.template_options)
        return block("final_answer(1)")

    run(CodeAgent(tools=[price], model=model), answer)
    assert options == [{"enable_thinking": False}]


def test_tool_specs_have_json_schemas(code_agent):
    specs = SmolagentsAdapter().tools(code_agent)
    assert [s.name for s in specs] == ["price", "add"]
    assert specs[0].description == "Price of an item in the shop."
    assert specs[0].parameters["properties"]["item"]["type"] == "string"


def test_structured_outputs_are_refused(model, price):
    agent = CodeAgent(tools=[price], model=model, use_structured_outputs_internally=True)
    with pytest.raises(UnsupportedAgent, match="use_structured_outputs_internally"):
        SmolagentsAdapter().model(agent)


def test_a_response_format_is_refused(model, price, run):
    class Formatted(CodeAgent):
        def provide_final_answer(self, task):
            return self.model.generate(self.write_memory_to_messages(), response_format={"a": "b"})

    agent = Formatted(tools=[price], model=model, max_steps=1)
    with pytest.raises(UnsupportedAgent, match="response_format"):
        run(agent, ["x", "y"])


def test_another_executor_is_refused(model, price):
    class Elsewhere(PythonExecutor):
        def send_tools(self, tools): ...

        def send_variables(self, variables): ...

        def __call__(self, code_action): ...

    agent = CodeAgent(tools=[price], model=model, executor=Elsewhere())
    with pytest.raises(UnsupportedAgent, match="Elsewhere"):
        SmolagentsAdapter().model(agent)


def test_agents_are_matched_by_their_classes(code_agent, json_agent):
    class Own(ToolCallingAgent):
        pass

    for agent in (code_agent, json_agent, Own(tools=[], model=code_agent.model)):
        name, cls = plugin.toolbrain_match_agent(agent)
        assert name == "smolagents"
        assert isinstance(agent, cls)
    assert plugin.toolbrain_match_agent(object()) is None


def test_the_plugin_imports_nothing_heavy():
    script = (
        "import sys, toolbrain_smolagents.plugin\n"
        "print({'smolagents', 'torch', 'transformers', 'numpy'} & set(sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "set()"
