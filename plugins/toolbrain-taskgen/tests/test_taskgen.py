"""Tasks from tools: gold answers that were executed, words that name every value."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from attrs import define, field
from click.testing import CliRunner
from smolagents import ToolCallingAgent
from toolbrain_taskgen.planning import literals
from toolbrain_taskgen.running import PlanRunner
from toolbrain_taskgen.values import ValueSource
from toolbrain_taskgen.wording import names, problem_of

from toolbrain_core.cli import cli
from toolbrain_core.errors import ConfigurationError, DataError
from toolbrain_core.generated import plan_of
from toolbrain_core.inputs import read_tasks
from toolbrain_core.roles import ChatReply, ChatRequest
from toolbrain_core.traces import Task, ToolSpec, as_tasks

from .conftest import BROKEN, Broken


def test_every_gold_answer_is_what_its_plan_gives_in_a_fresh_process(make_brain: Any) -> None:
    brain = make_brain()
    tasks = brain.generate_tasks(40)
    assert len(tasks) == 40 == len({task.id for task in tasks})
    runner = PlanRunner(brain.demonstrate)
    for task in tasks:
        assert runner.run(task, plan_of(task)).answer == task.gold_answer
        for value in literals(plan_of(task)):
            assert names(task.query, value), task
    assert set(tasks.report["calls_per_task"]) == {1, 2, 3}
    assert tasks.report["tools_not_used"] == {}
    assert json.loads(json.dumps(tasks.report))["made"] == 40


def test_one_seed_makes_the_same_tasks(make_brain: Any) -> None:
    brain = make_brain()
    first, again = brain.generate_tasks(8), brain.generate_tasks(8)
    assert list(first) == list(again)
    assert list(first) != list(brain.generate_tasks(8, seed=1))


def test_what_one_call_returns_is_given_to_the_next(make_brain: Any) -> None:
    tasks = make_brain().generate_tasks(40, min_calls=2, max_calls=2)
    chains = [task for task in tasks if "$result" in json.dumps(plan_of(task)[1].arguments)]
    chained = [t for t in chains if plan_of(t)[-1].name == "shipping"]
    assert chained
    for task in chained:
        user = plan_of(task)[0].arguments["user"]
        assert f"the city of {user}" in task.query
        assert {"ann": "Oslo", "ben": "Rome"}[user] not in task.query


@pytest.mark.parametrize("how", ["code", "json"])
def test_plans_become_demonstrations_in_the_agents_own_words(make_brain: Any, how: str) -> None:
    kind = {"agent": {"kind": ToolCallingAgent}} if how == "json" else {}
    brain = make_brain(**kind)
    tasks = brain.generate_tasks(6)
    for task, shown in zip(tasks, brain.demonstrations(tasks), strict=True):
        assert shown.metadata["final_answer"] == task.gold_answer
        written = "".join(turn["text"] for turn in shown.metadata["turns"])
        for call in plan_of(task):
            assert call.name in written
        assert ("<code>" in written) == (how == "code")


def test_a_policy_is_trained_on_what_was_made(make_brain: Any) -> None:
    brain = make_brain()
    tasks = brain.generate_tasks(4, max_calls=1)
    result = brain.train(brain.demonstrations(tasks), algorithm="sft", num_iterations=1)
    assert result.updates > 0


def test_tools_that_misbehave_are_reported_and_nothing_hangs(make_brain: Any) -> None:
    brain = make_brain(*(Broken(name, what) for name, what in BROKEN.items()))
    started = time.monotonic()
    tasks = brain.generate_tasks(10, time_limit=3.0)
    assert time.monotonic() - started < 60
    unused = tasks.report["tools_not_used"]
    assert {name: unused[name].partition(":")[0] for name in BROKEN} == {
        "raising": "raised",
        "sleeping": "time limit",
        "huge": "too large",
        "varying": "not deterministic",
        "silent": "no answer",
        "undefined": "no answer",
        "opaque": "no data",
        "quitting": "raised",
        "crashing": "crashed",
    }
    assert "no service" in unused["raising"]
    assert len(tasks) == 10


@pytest.mark.parametrize("how", ["excluded", "it has side effects"])
def test_a_tool_with_side_effects_is_never_run(make_brain: Any, tmp_path: Path, how: str) -> None:
    file = tmp_path / "precious"
    file.write_text("here", encoding="utf-8")
    remover = Broken("remover", lambda: str(file.unlink()))
    if how != "excluded":
        remover.side_effects = True
    brain = make_brain(remover)
    tasks = brain.generate_tasks(6, exclude=["remover"] if how == "excluded" else [])
    assert file.exists()
    assert tasks.report["tools_not_used"]["remover"] == how


def test_a_tool_whose_values_are_unknown_says_what_to_give(make_brain: Any) -> None:
    from .conftest import find_city

    brain = make_brain(agent={"tools": [find_city]})
    with pytest.raises(DataError, match=r"find_city: no value is known for user: .*examples="):
        brain.generate_tasks(3)
    tasks = brain.generate_tasks(2, examples={"user": ["ann", "ben"]}, max_calls=1)
    assert {task.gold_answer for task in tasks} == {"Oslo", "Rome"}


def test_fewer_tasks_than_asked_for_are_said_so(make_brain: Any, caplog: Any) -> None:
    from .conftest import find_city

    brain = make_brain(agent={"tools": [find_city]})
    tasks = brain.generate_tasks(5, examples={"user": ["ann", "ben"]}, max_calls=1)
    assert len(tasks) == 2
    assert "2 of 5 tasks were made: duplicate" in caplog.text
    assert tasks.report["rejected"]["duplicate"] > 0


@define
class Writer:
    """A chat model that answers with what is in its list, and then with the last again."""

    answers: list[str]
    asked: list[ChatRequest] = field(factory=list)

    def chat(self, request: ChatRequest) -> ChatReply:
        self.asked.append(request)
        return ChatReply(self.answers[min(len(self.asked), len(self.answers)) - 1])


def test_a_writer_that_loses_a_value_is_asked_again(make_brain: Any) -> None:
    from .conftest import find_city

    brain = make_brain(agent={"tools": [find_city]})
    options = {"examples": {"user": ["ann"]}, "max_calls": 1, "description": "a parcel office"}
    writer = Writer(["Where does she live?", "Use find_city for ann.", "Where  does\nAnn live?"])
    [task] = brain.generate_tasks(1, writer=writer, **options)
    assert task.query == "Where does Ann live?"
    assert task.gold_answer == "Oslo"
    asked = writer.asked[0].messages[0]["content"]
    assert "a parcel office" in asked
    assert "ann" in asked
    stubborn = brain.generate_tasks(1, writer=Writer(["Where does she live?"]), **options)
    assert stubborn == []
    assert stubborn.report["rejected"]["the writer lost a value or named a tool"] == 1
    assert stubborn.report["written_by"] == "a language model"


def test_the_policy_may_write(make_brain: Any) -> None:
    """A random one loses every value; what it cost is bounded, and said."""
    options = {"max_calls": 1, "exclude": ["list_users"], "examples": {"user": ["ann", "ben"]}}
    tasks = make_brain().generate_tasks(1, writer="policy", retries=0, **options)
    assert tasks == []
    assert tasks.report["rejected"]["the writer lost a value or named a tool"] > 0


def test_what_no_plugin_knows_cannot_write(make_brain: Any) -> None:
    with pytest.raises(ConfigurationError, match="writer=42: give 'policy'"):
        make_brain().generate_tasks(1, writer=42)


def test_difficulty_is_measured_and_sifted(make_brain: Any) -> None:
    brain = make_brain()
    kept = brain.generate_tasks(3, probe=2, max_calls=1)
    assert [task.metadata["pass_rate"] for task in kept] == [0.0, 0.0, 0.0]  # it is random
    sifted = brain.generate_tasks(3, probe=2, max_calls=1, keep=(0.1, 0.9))
    assert sifted == []
    assert sifted.report["rejected"]["too hard"] == 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"exclude": ["wipe"]}, "exclude has 'wipe', which no tool is called"),
        ({"examples": {"town": ["Oslo"]}}, "examples has 'town'; the parameters are amount, city"),
        ({"examples": {"convert.city": ["Oslo"]}}, "examples has 'convert.city'"),
        ({"min_calls": 3, "max_calls": 2}, "min_calls=3 is more than max_calls=2"),
        ({"keep": (0.1, 0.9)}, "give probe, the attempts that measure them"),
        ({"seed": "first"}, "generate_tasks refuses seed='first'"),
        ({"probes": 2}, "no option 'probes'.*did you mean 'probe'"),
        ({"generator": "dreams"}, "no task generator named 'dreams'"),
    ],
)
def test_bad_options_are_refused_in_words(
    make_brain: Any, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigurationError, match=message):
        make_brain().generate_tasks(3, **options)


def test_a_task_of_ones_own_has_no_plan(make_brain: Any) -> None:
    brain = make_brain()
    with pytest.raises(DataError, match=r"task 'mine' carries no plan"):
        brain.demonstrations([Task("mine", "Where is Ann?")])
    with pytest.raises(DataError, match=r"task 'mine': metadata\['plan'\]"):
        brain.demonstrations([Task("mine", "Where is Ann?", metadata={"plan": [{"id": 1}]})])


def test_queries_read_like_sentences(make_brain: Any) -> None:
    made = make_brain().generate_tasks(40, max_calls=1, seed=3)
    queries = {task.query for task in made}
    assert any(q.startswith("Please convert ") for q in queries)
    assert any("the cost of shipping a parcel to Oslo" in q for q in queries)
    assert not any(" a city" in q or "lists" in q for q in queries)


@pytest.mark.parametrize(
    ("query", "value", "found"),
    [
        ("What do 15 mugs cost?", 5, False),
        ("What do 15 mugs cost?", 15, True),
        ("It weighs 2.5 kg.", 2, False),
        ("It weighs 2.5 kg.", 2.5, True),
        ("It weighs 2.", 2.0, True),
        ("Ship it to New York, please.", "new york", True),
        ("Ship it to Yorkshire.", "York", False),
        ("Express, please.", True, True),
    ],
)
def test_a_value_is_a_word_of_its_own(query: str, value: Any, found: bool) -> None:
    assert names(query, value) is found


def test_a_tool_may_not_be_named(make_brain: Any) -> None:
    brain = make_brain()
    tools = {tool.name: tool for tool in brain.adapter.tools(brain.agent)}
    task = brain.generate_tasks(1, max_calls=1)[0]
    assert problem_of(task.query, plan_of(task), tools) == ""
    assert problem_of(f"{task.query} Call find_city.", plan_of(task), tools)
    camel = {**tools, "findCity": tools["find_city"]}
    assert problem_of(f"{task.query} Use findCity.", plan_of(task), camel)


def test_apostrophes_are_no_quotes() -> None:
    words = "The user's name, if it's known."
    quoted = "Name of the item, singular, like 'mug' or 'lamp'."
    values = ValueSource()
    for description, known in ((words, []), (quoted, ["mug", "lamp"])):
        schema = {"properties": {"it": {"type": "string", "description": description}}}
        assert values.candidates(ToolSpec("t", "", schema), "it") == known


def test_the_same_calls_in_another_order_are_a_duplicate(make_brain: Any) -> None:
    from .conftest import find_city

    brain = make_brain(agent={"tools": [find_city]})
    options = {"examples": {"user": ["ann", "ben"]}, "min_calls": 2, "max_calls": 2}
    tasks = brain.generate_tasks(2, **options)
    assert len(tasks) == 1
    assert sorted(tasks[0].gold_answer) == ["Oslo", "Rome"]


def test_a_tool_that_hangs_is_tried_once(make_brain: Any, tmp_path: Path) -> None:
    """Also where the others need several rounds until their values are known."""
    tried = tmp_path / "tried"

    def hang() -> str:
        with tried.open("a", encoding="utf-8") as file:
            file.write("x")
        time.sleep(60)
        return "awake"

    make_brain(Broken("hanging", hang)).generate_tasks(1, time_limit=2.0)
    assert tried.read_text(encoding="utf-8") == "x"


SCRIPT = """
from smolagents import CodeAgent, LogLevel, TransformersModel, tool

@tool
def double(number: int) -> int:
    '''Twice a number.

    Args:
        number: Any number.
    '''
    return 2 * number

def make():
    model = TransformersModel(model_id={model!r}, device_map="cpu", max_new_tokens=8)
    return CodeAgent(tools=[double], model=model, max_steps=2, verbosity_level=LogLevel.OFF)
"""


def test_tasks_are_made_on_the_command_line(model_dir: Path, tmp_path: Path) -> None:
    script, out = tmp_path / "mine.py", tmp_path / "made" / "tasks.jsonl"
    script.write_text(SCRIPT.format(model=str(model_dir)), encoding="utf-8")
    examples = tmp_path / "examples.json"
    examples.write_text('{"number": [3, 4, 21]}', encoding="utf-8")
    command = ["tasks", "generate", f"{script}:make", "-n", "3", "--out", str(out)]
    done = CliRunner().invoke(
        cli, [*command, "--examples", str(examples), "-o", "max_calls=1"], catch_exceptions=False
    )
    assert done.exit_code == 0
    assert f"3 of 3 tasks are in {out}" in done.output
    tasks = as_tasks(read_tasks(out))
    assert {task.gold_answer for task in tasks} == {6, 8, 42}
    assert {plan_of(task)[0].name for task in tasks} == {"double"}
    assert [entry.name for entry in out.parent.iterdir()] == ["tasks.jsonl"]


def test_bad_files_are_refused_before_the_model_is_loaded(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"tasks are written as \.jsonl"):
        CliRunner().invoke(
            cli,
            ["tasks", "generate", "nowhere:agent", "--out", str(tmp_path / "tasks.csv")],
            catch_exceptions=False,
        )
