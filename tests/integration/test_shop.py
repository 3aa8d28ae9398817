"""The demo's shop: held-out means held out, and every gold answer is what the tools give."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
from attrs import evolve
from smolagents import CodeAgent
from toolbrain_smolagents import SmolagentsAdapter

from toolbrain_core import Task
from toolbrain_core.rewards import is_correct
from toolbrain_core.roles import AttemptKey
from toolbrain_core.testing.scripted import ScriptedPolicy
from toolbrain_core.traces import from_json, to_json

sys.path.insert(0, str(Path(__file__).parents[2] / "docs" / "examples"))

from shop.agent import demonstrate, make_agent
from shop.data import HELD_OUT_CITIES, HELD_OUT_ITEMS, ITEMS, ZONE_RATES, ZONES
from shop.tasks import grpo_tasks, held_out_tasks, run_code, sft_tasks
from shop.tools import TOOLS

SEEDS = range(3)
SFT = [task for seed in SEEDS for task in sft_tasks(150, seed)]
GRPO = [task for seed in SEEDS for task in grpo_tasks(400, seed)]
HELD_OUT = held_out_tasks()
NOVEL = [task for task in HELD_OUT if task.metadata["novel"]]


LITERAL = re.compile(r'"\w+"|\d+')


def literals(task: Task) -> set[str]:
    """Everything that the task's code is about: items, cities and numbers."""
    return {match.strip('"') for match in LITERAL.findall(task.metadata["code"])}


def query_numbers(task: Task) -> set[str]:
    return set(re.findall(r"\d+", task.query))


def chain(task: Task) -> str:
    """The code without its items, cities and numbers."""
    return LITERAL.sub("_", task.metadata["code"])


def wording(task: Task) -> str:
    """The query with every item, city and number blanked."""
    names = sorted({*ITEMS, *ZONES}, key=len, reverse=True)
    return re.sub(rf"\b({'|'.join(names)})(s?)\b|\d+", r"_\2", task.query)


def test_no_item_city_or_number_of_the_held_out_tasks_occurs_in_training() -> None:
    trained = set[str]().union(*map(literals, SFT + GRPO))
    held_out = set[str]().union(*map(literals, HELD_OUT))
    assert not trained & held_out
    assert held_out >= {*HELD_OUT_CITIES}
    assert {value for value in held_out if value in ITEMS} <= {*HELD_OUT_ITEMS}


def test_no_training_query_names_what_is_held_out() -> None:
    held_out_numbers = set[str]().union(*map(query_numbers, HELD_OUT))
    names = re.compile(rf"\b({'|'.join([*HELD_OUT_ITEMS, *HELD_OUT_CITIES])})s?\b", re.IGNORECASE)
    for task in SFT + GRPO:
        assert not names.search(task.query), task.query
        assert not query_numbers(task) & held_out_numbers, task.query


def test_novel_tasks_have_chains_and_wordings_that_training_lacks() -> None:
    assert len(HELD_OUT) >= 150
    assert len(NOVEL) >= 50
    assert not {chain(t) for t in NOVEL} & {chain(t) for t in SFT + GRPO}
    assert not {wording(t) for t in NOVEL} & {wording(t) for t in SFT + GRPO}
    assert not {t.metadata["phrasing"] for t in NOVEL} & {
        t.metadata["phrasing"] for t in SFT + GRPO
    }


def test_the_other_held_out_tasks_have_chains_that_training_has() -> None:
    familiar = [task for task in HELD_OUT if not task.metadata["novel"]]
    assert {chain(t) for t in familiar} == {chain(t) for t in GRPO}
    assert {wording(t) for t in familiar} <= {wording(t) for t in GRPO}
    assert {t.metadata["calls"] for t in familiar} == {1, 2, 3}


def test_the_warm_start_has_one_call_per_task_and_grpo_up_to_three() -> None:
    assert {task.metadata["calls"] for task in SFT} == {1}
    assert {task.metadata["code"].split("(")[0] for task in SFT} == {*TOOLS}
    shares = [sum(t.metadata["calls"] == n for t in GRPO) / len(GRPO) for n in (1, 2, 3)]
    assert shares == [0.2, 0.5, 0.3]


@pytest.mark.parametrize("tasks", [sft_tasks(100), grpo_tasks(300), HELD_OUT])
def test_ids_and_queries_are_unique_and_nothing_is_left_blank(tasks: list[Task]) -> None:
    assert len({task.id for task in tasks}) == len(tasks)
    assert len({task.query for task in tasks}) == len(tasks)
    assert not [
        task.query for task in tasks if re.search(r"[{}]|\ba [aeiou]|ss\b|ys\b", task.query)
    ]


def test_running_the_code_gives_the_gold_answer_in_as_many_calls_as_it_says() -> None:
    for task in HELD_OUT + GRPO + SFT:
        code = task.metadata["code"]
        assert run_code(code) == task.gold_answer, task
        assert (
            len(re.findall(r"\b(?:price|stock|weight|shipping)\(", code)) == task.metadata["calls"]
        )
        # Halves are exact in binary: no rounding decides whether an answer is right.
        assert task.gold_answer % 0.5 == 0, task


def test_gold_answers_agree_with_the_catalogue() -> None:
    """Computed here from the query alone, without the tools or the code."""
    examples = {task.metadata["shape"]: task for task in HELD_OUT}
    order, worth = examples["several_shipped"], examples["worth"]
    item = ITEMS[next(name for name in HELD_OUT_ITEMS if f" {name}s" in order.query)]
    city = next(name for name in HELD_OUT_CITIES if name in order.query)
    count = int(query_numbers(order).pop())
    assert order.gold_answer == count * item.price + ZONE_RATES[ZONES[city]]
    item = ITEMS[next(name for name in HELD_OUT_ITEMS if re.search(rf"\b{name}s?\b", worth.query))]
    assert worth.gold_answer == item.price * item.stock


def test_tasks_are_the_same_each_time_and_differ_by_seed() -> None:
    assert held_out_tasks() == HELD_OUT
    assert grpo_tasks(20, seed=1) == grpo_tasks(20, seed=1)
    assert [t.query for t in grpo_tasks(20, seed=1)] != [t.query for t in grpo_tasks(20, seed=2)]
    assert sft_tasks(40, seed=1)[:10] == sft_tasks(10, seed=1)


def test_tasks_go_through_json() -> None:
    task = NOVEL[-1]
    again = from_json(Task, json.loads(json.dumps(to_json(task))))
    assert again == task
    assert run_code(again.metadata["code"]) == task.gold_answer


def test_asking_for_more_tasks_than_there_are_says_so() -> None:
    with pytest.raises(ValueError, match=r"only \d+ different sft tasks"):
        sft_tasks(10_000)


def test_a_tool_says_what_it_does_not_know() -> None:
    with pytest.raises(ValueError, match="no item 'mugs'; names are singular"):
        run_code('price("mugs")')
    with pytest.raises(ValueError, match="does not ship to 'Atlantis'"):
        run_code('shipping("Atlantis")')


@pytest.fixture(scope="module")
def agent() -> CodeAgent:
    return make_agent()


def test_demonstrations_are_executed_by_the_agent(agent: CodeAgent) -> None:
    for task in [*SFT[:8], *NOVEL[:6]]:
        system, user, assistant = demonstrate(agent, task).messages
        assert (system["role"], user["role"]) == ("system", "user")
        assert task.query in str(user["content"])
        assert assistant["content"] == (
            f"<code>\nx = {task.metadata['code']}\nfinal_answer(x)\n</code>"
        )


def test_a_demonstration_that_misses_the_gold_answer_is_refused(agent: CodeAgent) -> None:
    with pytest.raises(ValueError, match=re.escape(SFT[0].id)):
        demonstrate(agent, evolve(SFT[0], gold_answer=-1))


def test_the_prompt_is_short_enough_for_a_small_model(agent: CodeAgent) -> None:
    tokens = agent.model.tokenizer(agent.system_prompt).input_ids
    assert len(tokens) <= 200
    assert all(f"{name}(" in agent.system_prompt for name in TOOLS)


def test_an_attempt_ends_with_its_steps(agent: CodeAgent) -> None:
    """smolagents' extra call for a last answer is left out: one step, one turn."""
    session = ScriptedPolicy(["No code at all."]).session(AttemptKey("r", 0, "t", 0))
    trace = SmolagentsAdapter().run(agent, HELD_OUT[0], session)
    assert [turn.error.kind for turn in trace.turns] == ["format"]
    assert trace.final_answer is None
    assert not is_correct(trace, HELD_OUT[0].gold_answer)
