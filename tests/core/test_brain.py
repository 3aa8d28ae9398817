"""The facade, with a scripted policy, an agent that is a function, and two small algorithms."""

from __future__ import annotations

import json
import sys
import threading

import attrs
import pytest

from toolbrain_core import Brain, Task
from toolbrain_core.errors import (
    ConfigurationError,
    DataError,
    PluginError,
    RunDirectoryError,
    UnknownName,
    UnsupportedAgent,
)
from toolbrain_core.hookspecs import hookimpl
from toolbrain_core.plugins import PluginManager
from toolbrain_core.runs import TrainResult
from toolbrain_core.testing import scripted
from toolbrain_core.testing.scripted import FunctionAgent, ScriptedPolicy


def result_of(run, updates, **metrics):
    run.record(1, metrics)
    return TrainResult(
        run.algorithm, updates, 1, metrics, tuple(run.warnings), run.directory.path, 0.0
    )


@attrs.frozen(kw_only=True)
class Counting:
    """Rolls the tasks out once, and raises the policy's version: its update."""

    attempts: int = attrs.field(default=2, validator=attrs.validators.gt(0))
    rate: float = 1.0
    name = "counting"
    consumes = frozenset({"tasks"})

    def train(self, run):
        groups = run.rollout(run.data, self.attempts, step=1, iteration=0)
        run.policy.weights_version += 1
        return result_of(run, 1, reward_mean=sum(groups[0].scores) / self.attempts)


@attrs.frozen(kw_only=True)
class Copying:
    """Notes how many demonstrations it got."""

    rows: int = 8
    name = "copying"
    consumes = frozenset({"demonstrations"})

    def train(self, run):
        run.policy.weights_version += 10
        return result_of(run, len(run.data), items=len(run.data))


@attrs.frozen(kw_only=True)
class Preferring:
    name = "preferring"
    consumes = frozenset({"preferences"})

    def train(self, run):
        raise AssertionError("never reached")


class Algorithms:
    @hookimpl
    def toolbrain_register_algorithms(self, registry):
        registry.add("counting", f"{__name__}:Counting")
        registry.add("copying", f"{__name__}:Copying", aliases=("supervised",))
        registry.add("preferring", f"{__name__}:Preferring")


@pytest.fixture
def plugins():
    return PluginManager.with_plugins(scripted, Algorithms())


def echo(ask, task):
    return ask(task.query)


@pytest.fixture
def policy():
    return ScriptedPolicy(lambda request, key, turn: request.messages[-1]["content"])


@pytest.fixture
def make(plugins, policy, tmp_path):
    def brain(agent=None, **options):
        options = {"algorithm": "counting", "reward_func": "exact-match", **options}
        agent = agent or FunctionAgent(echo, model=policy)
        return Brain(agent, plugins=plugins, run_dir=tmp_path / "runs", progress=False, **options)

    return brain


TASKS = [{"query": "4", "gold_answer": 4}, {"query": "5", "gold_answer": 7}]


# The algorithm and its options -------------------------------------------------------------------


@pytest.mark.parametrize("name", ["counting", "COUNTING", "Counting"])
def test_an_algorithm_goes_by_its_name_in_any_case(make, name):
    assert make(algorithm=name).train(TASKS, name="run").algorithm == "counting"


def test_an_alias_is_the_algorithm(make):
    brain = make(algorithm="supervised")
    data = [{"query": "4", "completion": "4"}]
    assert brain.train(data, name="run").algorithm == "copying"


def test_a_typed_algorithm_is_the_same_as_its_name_with_options(make):
    typed = make(algorithm=Counting(attempts=3)).train(TASKS, name="typed")
    named = make(algorithm="counting", attempts=3).train(TASKS, name="named")
    options = [
        json.loads((r.run_dir / "config.json").read_text())["options"] for r in (typed, named)
    ]
    assert options[0] == options[1] == {"attempts": 3, "rate": 1.0}


def test_options_of_one_call_do_not_stay(make):
    brain = make(rate=2.0)
    for name, given in (("a", {"attempts": 5}), ("b", {})):
        result = brain.train(TASKS, name=name, **given)
        config = json.loads((result.run_dir / "config.json").read_text())
        assert config["options"] == {"rate": 2.0, "attempts": given.get("attempts", 2)}


def test_another_algorithm_on_the_same_brain_goes_on_with_the_policy(make, policy):
    brain = make()
    brain.train([{"query": "4", "completion": "4"}], algorithm="copying", name="first")
    brain.train(TASKS, name="second")
    assert policy.weights_version == 11
    assert brain.policy is policy


def test_an_unknown_algorithm_says_what_there_is(make):
    with pytest.raises(UnknownName, match=r"'contuing' \(did you mean 'counting'\?\).*installed: "):
        make(algorithm="contuing")
    with pytest.raises(UnknownName, match="no algorithm named 'ppo'"):
        make().train(TASKS, algorithm="ppo")


def test_an_unknown_option_lists_the_valid_ones(make):
    with pytest.raises(ConfigurationError) as refused:
        make(atempts=3)
    assert "no option 'atempts' (did you mean 'attempts'?)" in str(refused.value)
    assert "counting: attempts, rate" in str(refused.value)
    with pytest.raises(ConfigurationError, match=r"no option 'rows'.*counting: attempts, rate"):
        make().train(TASKS, rows=3)


def test_an_option_out_of_range_names_itself(make):
    with pytest.raises(ConfigurationError, match=r"counting refuses its options.*'attempts'"):
        make(attempts=0)


@pytest.mark.parametrize("algorithm", [3, object(), Counting, Task("t", "?")])
def test_what_is_no_algorithm_is_refused(make, algorithm):
    with pytest.raises(ConfigurationError, match="must be a name or an algorithm"):
        make(algorithm=algorithm, attempts=2)


def test_an_algorithm_that_consumes_what_no_data_can_be_made_of_is_refused(make):
    with pytest.raises(ConfigurationError, match="preferring consumes preferences"):
        make(algorithm="preferring").train(TASKS)


# The agent ---------------------------------------------------------------------------------------


def test_an_agent_of_no_known_framework_says_what_there_is(make):
    class Strange:
        pass

    with pytest.raises(UnsupportedAgent, match="Strange: installed: function"):
        make(Strange())


def test_an_agent_of_a_framework_whose_plugin_is_missing_names_the_plugin():
    foreign = type("CodeAgent", (), {"__module__": "smolagents.agents"})
    with pytest.raises(UnsupportedAgent, match="pip install toolbrain-smolagents"):
        Brain(foreign(), plugins=PluginManager.with_plugins(), reward_func="exact-match")


def test_the_trained_agent_is_the_users_own_object(make, policy):
    agent = FunctionAgent(echo, model=policy)
    brain = make(agent)
    brain.train(TASKS, name="run")
    assert brain.agent is agent


def test_a_function_that_makes_agents_makes_one_for_each_attempt(make, policy):
    made = []

    def make_agent():
        count = iter(range(100))
        made.append(FunctionAgent(lambda ask, task: ask(str(next(count))), model=policy))
        return made[-1]

    brain = make(make_agent)
    [group] = brain.rollout([{"query": "count"}], 8)
    assert [r.trace.final_answer for r in group.rollouts] == ["0"] * 8  # a world each
    assert len(made) == 1 + 8  # one to look at


def test_evaluation_gives_the_answers_of_the_agent_itself(make):
    brain = make()
    dozen = [{"query": f"answer {n}"} for n in range(12)]
    groups = brain.rollout(dozen)
    used = [brain.agent.run(task["query"]) for task in dozen]
    assert [g.rollouts[0].trace.final_answer for g in groups] == used
    assert len(set(used)) == 12


def test_evaluate_scores_and_writes_nothing(make, tmp_path):
    evaluation = make().evaluate(TASKS, attempts=3)
    assert evaluation.as_dict()["accuracy"] == 0.5
    assert not (tmp_path / "runs").exists()


# Data --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "shape",
    [
        lambda: TASKS,
        lambda: tuple(TASKS),
        lambda: (dict(task) for task in TASKS),
        lambda: [Task("0", "4", 4), TASKS[1]],
    ],
    ids=["dicts", "tuple", "generator", "mixed"],
)
def test_data_may_be_any_iterable_of_dicts_or_tasks(make, shape):
    result = make().train(shape(), name="run")
    assert len((result.run_dir / "rollouts.jsonl").read_text().splitlines()) == 4


def test_data_may_be_a_dataset(make):
    datasets = pytest.importorskip("datasets")
    result = make().train(datasets.Dataset.from_list(TASKS), name="run")
    assert len((result.run_dir / "rollouts.jsonl").read_text().splitlines()) == 4


@pytest.mark.parametrize(
    ("data", "says"),
    [
        ([], "no tasks"),
        (iter(()), "no tasks"),
        ([{"gold_answer": 4}], "task 0.*has no 'query'"),
        ([{"query": "4"}, {"query": "  "}], "task 1.*has no 'query'"),
        ({"query": "4"}, "must be a list"),
        (3, "must be an iterable"),
        (["4"], "task 0 is a str"),
    ],
)
def test_bad_tasks_are_named_before_anything_is_written(make, tmp_path, data, says):
    with pytest.raises(DataError, match=says):
        make().train(data)
    assert not (tmp_path / "runs").exists()


# The reward --------------------------------------------------------------------------------------


@pytest.mark.parametrize("reward", [3, [lambda trace: 1.0], Task])
def test_a_reward_that_is_not_callable_is_refused_at_once(make, reward):
    with pytest.raises(ConfigurationError, match="a reward cannot be"):
        make(reward_func=reward)


def test_a_reward_whose_parameters_no_task_has_is_refused_before_the_first_rollout(make, tmp_path):
    brain = make(reward_func=lambda trace, colour: 1.0)
    with pytest.raises(ConfigurationError, match="'colour', which task '0' does not have"):
        brain.train(TASKS)
    assert not (tmp_path / "runs").exists()


def test_training_on_tasks_without_a_reward_is_refused_and_copying_is_not(make):
    brain = make(reward_func=None)
    with pytest.raises(ConfigurationError, match=r"counting needs a reward.*exact-match"):
        brain.train(TASKS)
    brain.train([{"query": "4", "completion": "4"}], algorithm="copying", name="run")


def test_an_unknown_reward_has_a_suggestion(make):
    with pytest.raises(UnknownName, match="did you mean 'exact-match'"):
        make(reward_func="exact-mach")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"concurrency": "8"}, "concurrency='8': a whole number"),
        ({"concurrency": 0}, "concurrency must be at least 1"),
        ({"time_limit": "x"}, "time_limit='x': a number or None"),
        ({"probe": "no"}, "probe='no': true or false"),
        ({"setup": "x"}, "setup='x': something to call"),
        ({"seed": 1.5}, r"seed=1\.5: a whole number"),
        ({"attempts": "2"}, "counting refuses attempts='2': a whole number"),
    ],
)
def test_a_value_of_the_wrong_type_is_refused_in_words(make, options, says):
    with pytest.raises(ConfigurationError, match=says):
        make(**options)


class Model:
    """What is not an agent, and can be called all the same."""

    def __call__(self, messages):
        raise AssertionError("never reached")


@pytest.mark.parametrize("agent", [Model(), FunctionAgent, lambda task: None, sys.exit])
def test_what_is_no_agent_and_makes_none_is_refused_in_words(make, agent):
    with pytest.raises(UnsupportedAgent, match=r"neither an agent .* nor a function"):
        make(agent)


# The run directory -------------------------------------------------------------------------------


def test_a_second_run_of_one_name_is_refused(make):
    brain = make()
    first = brain.train(TASKS, name="run")
    journal = (first.run_dir / "rollouts.jsonl").read_bytes()
    with pytest.raises(RunDirectoryError, match="holds a run already: give resume=True"):
        brain.train(TASKS, name="run")
    assert (first.run_dir / "rollouts.jsonl").read_bytes() == journal


def test_runs_without_a_name_do_not_collide(make):
    brain = make()
    runs = {brain.train(TASKS).run_dir for _ in range(3)}
    assert len(runs) == 3


def test_resuming_without_a_name_says_which_runs_there_are(make):
    brain = make()
    brain.train(TASKS, name="first")
    with pytest.raises(ConfigurationError, match=r"give name=…; .* holds: first"):
        brain.train(TASKS, resume=True)


@pytest.mark.parametrize(
    "other", [TASKS[::-1], TASKS[:1], [{**TASKS[0], "query": "?"}, *TASKS[1:]]]
)
def test_a_run_resumed_on_other_tasks_is_refused(make, other):
    brain = make()
    brain.train(TASKS, name="run")
    with pytest.raises(RunDirectoryError, match=r"data \(was 'sha256"):
        brain.train(other, name="run", resume=True)
    brain.train(TASKS, name="run", resume=True)


def test_a_report_that_cannot_be_written_costs_nothing_but_itself(make, caplog):
    brain = make()
    with brain.plugins.observing(SpoilingTheJournal()):
        assert brain.train(TASKS, name="run").updates == 1
    assert "the report was not written" in caplog.text


class SpoilingTheJournal:
    @hookimpl
    def toolbrain_step_finished(self, run):
        with (run.directory.path / "metrics.jsonl").open("a") as file:
            file.write("not JSON\n")


def test_an_observer_that_fails_in_words_is_said_in_words(make, caplog):
    brain = make()
    with brain.plugins.observing(OnAFullDisk()):
        brain.train(TASKS, name="run")
    assert "no room for the plot" in caplog.text
    assert "Traceback" not in caplog.text


class OnAFullDisk:
    @hookimpl
    def toolbrain_run_finished(self, run):
        raise RunDirectoryError("no room for the plot")


def test_a_run_resumed_with_other_options_is_refused(make):
    brain = make()
    brain.train(TASKS, name="run")
    with pytest.raises(RunDirectoryError, match=r"options\.attempts \(was 2, now 3\)"):
        brain.train(TASKS, name="run", resume=True, attempts=3)


class Watching:
    def __init__(self):
        self.heard = []

    @hookimpl
    def toolbrain_run_started(self, run):
        self.heard.append("started")

    @hookimpl
    def toolbrain_group_finished(self, run, group):
        self.heard.append(group.task.id)

    @hookimpl
    def toolbrain_run_finished(self, run, result):
        self.heard.append(result and result.updates)


def test_observers_hear_of_a_run_and_of_its_failure(make, plugins):
    watching = Watching()
    brain = make()
    with plugins.observing(watching):
        result = brain.train(TASKS, name="run")
    assert watching.heard[0] == "started"
    assert sorted(watching.heard[1:-1]) == ["0", "1"]
    assert watching.heard[-1] == 1
    assert (result.run_dir / "report.md").is_file()


def test_a_run_that_fails_is_reported_and_its_error_is_raised(plugins, policy, tmp_path):
    @attrs.frozen
    class Failing(Counting):
        def train(self, run):
            super().train(run)
            raise ZeroDivisionError("half way")

    watching = Watching()
    brain = Brain(
        FunctionAgent(echo, model=policy),
        algorithm=Failing(),
        reward_func="exact-match",
        plugins=plugins,
        run_dir=tmp_path,
        progress=False,
    )
    with plugins.observing(watching), pytest.raises(ZeroDivisionError, match="half way"):
        brain.train(TASKS, name="run")
    assert watching.heard[-1] is None
    assert json.loads((tmp_path / "run" / "report.json").read_text())["groups"]


# State, setup, teardown --------------------------------------------------------------------------


class Counter:
    """A tool that keeps state from one call to the next."""

    __name__ = "count"

    def __init__(self):
        self.calls = 0

    def __call__(self):
        self.calls += 1
        return self.calls


class ForkedCounter(Counter):
    def fork(self):
        return ForkedCounter()


def counting_agent(tool, policy):
    """Asks its model first, as an agent does, then calls the tool."""

    def act(ask, task):
        ask(task.query)
        return str(ask.call("count"))

    return FunctionAgent(act, tools=[tool], model=policy)


@pytest.mark.parametrize(("tool", "warned"), [(Counter, True), (ForkedCounter, False)])
def test_a_tool_that_keeps_state_is_warned_of_unless_it_can_be_forked(make, policy, tool, warned):
    brain = make(counting_agent(tool(), policy))
    result = brain.train(TASKS, name="run")
    assert any("'count'" in w and "make_agent" in w for w in result.warnings) is warned


def test_the_probe_can_be_left_out(make, policy):
    counter = Counter()
    brain = make(counting_agent(counter, policy), probe=False)
    result = brain.train(TASKS, name="run")
    assert result.warnings == ()
    assert counter.calls == 4  # 2 tasks, 2 attempts, and no others


def test_an_agent_of_its_own_for_each_attempt_needs_no_probe(make, policy):
    brain = make(lambda: counting_agent(Counter(), policy))
    assert brain.train(TASKS, name="run").warnings == ()
    [group] = brain.rollout([TASKS[0]], 4)
    assert [r.trace.final_answer for r in group.rollouts] == ["1"] * 4


def test_setup_and_teardown_run_around_each_attempt_in_its_thread(make, policy):
    local, seen = threading.local(), []

    def setup(task):
        local.world = f"world of {task.id}"

    def teardown(trace):
        seen.append((local.world, trace.final_answer))

    agent = FunctionAgent(lambda ask, task: ask(local.world), model=policy)
    brain = make(agent, setup=setup, teardown=teardown)
    groups = brain.rollout(TASKS, 3)
    answers = [r.trace.final_answer for g in groups for r in g.rollouts]
    assert answers == ["world of 0"] * 3 + ["world of 1"] * 3
    assert sorted(seen) == sorted((a, a) for a in answers)


# Saving ------------------------------------------------------------------------------------------


def test_what_is_no_save_of_a_brain_cannot_be_loaded(plugins, policy, tmp_path):
    with pytest.raises(DataError, match=r"was not written by Brain\.save"):
        Brain.load(tmp_path, FunctionAgent(echo, model=policy), plugins=plugins)


def test_two_plugins_with_one_algorithm_are_named_when_it_is_asked_for(policy, tmp_path):
    class Others:
        @hookimpl
        def toolbrain_register_algorithms(self, registry):
            registry.add("counting", f"{__name__}:Copying")

    both = PluginManager.with_plugins(scripted, Algorithms(), Others())
    with pytest.raises(PluginError, match="provided by both Algorithms and Others"):
        Brain(FunctionAgent(echo, model=policy), algorithm="counting", plugins=both)
