"""What goes wrong is typed, put on its turn, and never taken for an answer."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest
from smolagents import CodeAgent, Tool, ToolCallingAgent
from toolbrain_smolagents import SmolagentsAdapter

from toolbrain_core.errors import AttemptClosed, ConfigurationError, ContextOverflow, SamplerFailure
from toolbrain_core.traces import Task


def test_text_without_code_is_a_format_failure(code_agent, run, block):
    trace = run(code_agent, ["I do not know.", block("final_answer(1)")])
    assert [t.error and t.error.kind for t in trace.turns] == ["format", None]
    assert trace.error is None
    assert not trace.well_formed


def test_code_that_does_not_parse_is_a_format_failure(code_agent, run, block):
    trace = run(code_agent, [block("x = = 1"), block("final_answer(1)")])
    assert trace.turns[0].error.kind == "format"


def test_json_that_does_not_parse_is_a_format_failure(json_agent, run, as_json):
    trace = run(json_agent, ["price of mug", as_json("final_answer", answer=1)])
    assert trace.turns[0].error.kind == "format"


def test_code_that_raises_is_an_execution_failure_and_its_call_is_kept(code_agent, run, block):
    trace = run(code_agent, [block('price("sofa")'), block("final_answer(1)")])
    assert trace.turns[0].error.kind == "execution"
    assert trace.turns[0].results[0].error == "KeyError: 'sofa'"
    assert trace.turns[1].error is None


@pytest.mark.parametrize(
    ("name", "arguments", "reason"),
    [
        ("cost", {"item": "mug"}, "Unknown tool"),
        ("price", {"item": 3}, "has type"),
        ("price", {}, "required"),
        ("price", {"item": "sofa"}, "KeyError"),
    ],
)
def test_json_calls_that_fail_are_recorded_once(json_agent, run, as_json, name, arguments, reason):
    trace = run(json_agent, [as_json(name, **arguments), as_json("final_answer", answer=1)])
    assert trace.turns[0].error.kind == "tool"
    ((call, result),) = zip(trace.turns[0].calls, trace.turns[0].results, strict=True)
    assert (call.name, dict(call.arguments), call.via) == (name, arguments, "json")
    assert reason in result.error


def test_a_tool_name_of_the_wrong_type_is_the_agents_failure(json_agent, run):
    trace = run(json_agent, ['{"name": {"a": 1}, "arguments": {}}'])
    assert trace.error.kind == "agent"
    assert trace.final_answer is None
    assert trace.calls[0].name == "{'a': 1}"


def test_a_failed_check_is_an_execution_failure(price, model, run, block):
    def positive(answer, memory, agent):
        return answer > 0

    agent = CodeAgent(tools=[price], model=model, final_answer_checks=[positive])
    trace = run(agent, [block("final_answer(-1)"), block("final_answer(1)")])
    assert trace.turns[0].error.kind == "execution"
    assert trace.final_answer == 1


@pytest.mark.parametrize("turn", [0, 1])
@pytest.mark.parametrize(
    ("error", "kind"), [(ContextOverflow, "context_overflow"), (SamplerFailure, "infrastructure")]
)
def test_session_failures_end_the_attempt(price, model, run, block, error, kind, turn):
    """Turn 1 is the call for a last answer, whose exceptions smolagents turns into an answer."""

    def answer(request, key, index):
        if index == turn:
            raise error("no")
        return block('price("mug")')

    trace = run(CodeAgent(tools=[price], model=model, max_steps=1), answer)
    assert trace.error.kind == kind
    assert trace.final_answer is None


def test_an_error_that_the_session_does_not_note_is_no_answer_either(price, model, run, block):
    def answer(request, key, index):
        if index:
            raise RuntimeError("a bug in the sampler")
        return block('price("mug")')

    trace = run(CodeAgent(tools=[price], model=model, max_steps=1), answer)
    assert trace.error.kind == "infrastructure"
    assert "a bug in the sampler" in trace.error.traceback
    assert trace.final_answer is None


def test_a_callback_that_raises_is_infrastructure(price, model, run, block):
    def broken(step):
        raise ZeroDivisionError("in the callback")

    trace = run(CodeAgent(tools=[price], model=model, step_callbacks=[broken]), [block("x = 1")])
    assert trace.error.kind == "infrastructure"
    assert trace.error.exception == "ZeroDivisionError"
    assert len(trace.turns) == 1


def test_an_observe_that_raises_is_infrastructure(code_agent, run):
    trace = run(code_agent, ["x"], observe=lambda trace, messages: messages[99])
    assert trace.error.kind == "infrastructure"
    assert trace.error.exception == "IndexError"


def test_an_unknown_tool_to_keep_is_an_error(code_agent, run):
    with pytest.raises(ConfigurationError, match=r"'cost'.*price"):
        run(code_agent, ["x"], tools=["cost"])


def test_an_abandoned_attempt_is_unwound(model, session_of, block):
    """AttemptClosed passes through `except` in the policy's code and through smolagents."""
    session = session_of(
        [block("while True:\n    try:\n        tick()\n    except:\n        pass")]
    )

    class Tick(Tool):
        name, description, output_type = "tick", "Ticks.", "integer"
        inputs = {}  # noqa: RUF012
        ticks = 0

        def forward(self) -> int:
            self.ticks += 1
            if self.ticks == 3:
                session.transcript.close()
            return self.ticks

    tick = Tick()
    agent = CodeAgent(tools=[tick], model=model)
    with pytest.raises(AttemptClosed):
        SmolagentsAdapter().run(agent, Task("t", "Loop."), session)
    assert tick.ticks == 3


def test_a_stuck_parallel_call_does_not_keep_the_interpreter(model_dir):
    """smolagents runs several calls of one turn in a pool whose workers are joined at exit."""
    script = textwrap.dedent(
        f"""
        import threading, time
        from smolagents import Tool, ToolCallingAgent, TransformersModel
        from smolagents.models import ChatMessageToolCall, ChatMessageToolCallFunction
        from toolbrain_core.errors import AttemptClosed
        from toolbrain_core.roles import AttemptKey
        from toolbrain_core.testing.scripted import ScriptedPolicy
        from toolbrain_core.traces import Task
        from toolbrain_smolagents import SmolagentsAdapter

        class Stuck(Tool):
            name, description, output_type, inputs = "stuck", "Hangs.", "string", {{}}
            def forward(self) -> str:
                started.set()
                threading.Event().wait()

        class Twice(TransformersModel):
            def parse_tool_calls(self, message):
                function = ChatMessageToolCallFunction(name="stuck", arguments={{}})
                message.tool_calls = [ChatMessageToolCall(function, i, "function") for i in "ab"]
                return message

        started = threading.Event()
        agent = ToolCallingAgent(tools=[Stuck()], model=Twice(model_id={str(model_dir)!r}))
        session = ScriptedPolicy(["go"]).session(AttemptKey("r", 0, "t", 0))
        outcome = []

        def attempt():
            try:
                SmolagentsAdapter().run(agent, Task("t", "Hang."), session)
            except AttemptClosed:
                outcome.append("unwound")

        thread = threading.Thread(target=attempt, daemon=True)
        thread.start()
        assert started.wait(30)
        session.transcript.close()
        thread.join(10)
        print(*outcome)
        """
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=90, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[-1] == "unwound"


def test_parallel_calls_are_recorded(make_model, price, run, as_json):
    from smolagents import TransformersModel
    from smolagents.models import ChatMessageToolCall, ChatMessageToolCallFunction

    class Twice(TransformersModel):
        def parse_tool_calls(self, message):
            if "final" in message.content:
                return super().parse_tool_calls(message)
            message.tool_calls = [
                ChatMessageToolCall(ChatMessageToolCallFunction({"item": item}, "price"), item, "f")
                for item in ("mug", "sofa" if "sofa" in message.content else "lamp")
            ]
            return message

    agent = ToolCallingAgent(tools=[price], model=make_model(Twice))
    trace = run(agent, ["both", "mug and sofa", as_json("final_answer", answer=19)])
    assert sorted(r.output for r in trace.turns[0].results) == [7, 12]
    assert sorted(str(r.error) for r in trace.turns[1].results) == ["KeyError: 'sofa'", "None"]
    assert trace.turns[1].error.kind == "tool"
    assert trace.final_answer == 19
