"""The facade: an agent, what trains it, and the evidence."""

from __future__ import annotations

import hashlib
import json
import logging
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, Literal, cast

import attrs

from .chat_models import PolicyChat
from .demonstrations import as_demonstrations
from .errors import ConfigurationError, DataError, ToolBrainError, UnsupportedAgent
from .evaluation import Evaluation, evaluate_groups
from .generated import GeneratedTasks, plan_of
from .options import build, change, check_types, option_names, refuse_unknown
from .plugins import PluginManager, default_manager
from .probe import probe_statefulness
from .progress import ProgressObserver, watched
from .report import write_report
from .rewards import as_reward, check_reward
from .roles import AgentAdapter, Algorithm, ChatModel, Observe, Policy, Reward, TaskGenerator
from .rollouts import Rollouts, check_limits
from .runs import Run, RunDirectory, TrainResult, interruptible
from .traces import Demonstration, Group, Rollout, Task, ToolCall, Trace, as_tasks, jsonable

logger = logging.getLogger(__name__)

_DEFAULT_ALGORITHM = "grpo"


class Brain:
    """Trains the model inside the user's own agent.

    `agent`: an agent of a framework that an installed plugin knows, or a function without
    arguments that builds one (then each attempt gets a fresh one; build the model once, outside).
    `algorithm`: a name with its options as further keywords, or an object
    (`Grpo(learning_rate=2e-4)`). `reward_func`: a callable (see `toolbrain_core.rewards`) or a
    name. `trainable_model` picks the model where an agent has several.
    `setup(task)`, `teardown(trace)` run around each attempt, in its thread; `observe(trace,
    messages)` replaces what the policy sees. `concurrency` attempts run at once, each for at most
    `time_limit` seconds (None: no limit). `probe=False` leaves out the check for tools that keep
    state. Runs are kept in `run_dir`/name. `progress=False` draws nothing.
    Further keywords are options of the algorithm or of the policy (`lora`, `adapter`, `dtype`, …).

    Errors: `ConfigurationError` (an unknown name or option lists the valid ones),
    `UnsupportedAgent` (says which plugin to install, or what the agent has that cannot be served).
    """

    def __init__(
        self,
        agent: Any,
        *,
        algorithm: str | Algorithm | None = None,
        reward_func: Callable[..., Any] | str | None = None,
        trainable_model: Any = None,
        setup: Callable[[Task], Any] | None = None,
        teardown: Callable[[Trace], Any] | None = None,
        observe: Observe | None = None,
        concurrency: int = 64,
        time_limit: float | None = 600.0,
        probe: bool = True,
        seed: int = 0,
        run_dir: str | Path = "runs",
        progress: bool = True,
        plugins: PluginManager | None = None,
        **options: Any,
    ):
        given = {
            "setup": setup,
            "teardown": teardown,
            "observe": observe,
            "concurrency": concurrency,
            "time_limit": time_limit,
            "probe": probe,
            "seed": seed,
            "run_dir": run_dir,
            "progress": progress,
            "plugins": plugins,
        }
        check_types(given, Brain.__init__, "Brain")
        check_limits(concurrency, time_limit)
        self.plugins = plugins or default_manager()
        self.seed = seed
        self.run_dir = Path(run_dir)
        self.progress = progress
        self.probe = probe
        self._reward = self._as_reward(reward_func)
        self._prototype, make_agent = self._agent_of(agent)
        self.adapter = self._adapter_of(self._prototype)
        ref = self.adapter.model(self._prototype, trainable_model)
        policy_class = self.plugins.registries["policies"].get(ref.kind)
        self._algorithm, rest = self._split(algorithm, policy_class, options)
        if isinstance(rest.get("sampler"), str):
            rest["sampler"] = self.plugins.registries["samplers"].get(rest["sampler"])()
        check_types(rest, policy_class.__init__, "the policy")
        seeded = {"seed": seed, **rest} if "seed" in option_names(policy_class) else rest
        self.policy = cast(Policy, policy_class(ref, **seeded))
        self._observe = observe
        self._bound: Any = None
        self._rollouts = Rollouts(
            adapter=self.adapter,
            policy=self.policy,
            agent=None if make_agent else self._prototype,
            make_agent=make_agent,
            setup=setup,
            teardown=teardown,
            observe=observe,
            concurrency=concurrency,
            time_limit=time_limit,
        )

    @classmethod
    def load(cls, path: str | Path, agent: Any, **keywords: Any) -> Brain:
        """A Brain for `agent` with the weights that `save` wrote. Keywords as for `Brain`."""
        if not (Path(path) / "toolbrain.json").is_file():
            raise DataError(f"{path} was not written by Brain.save: it has no toolbrain.json")
        return cls(agent, adapter=path, **keywords)

    @property
    def agent(self) -> Any:
        """The user's agent with the trained weights, as it was trained: their own object where
        nothing had to be added to it."""
        if self._bound is None:
            self._bound = self.adapter.bind(self._prototype, self.policy, self._observe)
        return self._bound

    def train(
        self,
        data: Iterable[Any],
        algorithm: str | Algorithm | None = None,
        *,
        name: str | None = None,
        resume: bool = False,
        **options: Any,
    ) -> TrainResult:
        """Improve the policy on `data`; what was learned before stays.

        `data`: what the algorithm consumes. Tasks: dicts with `query` and `gold_answer`, or
        `Task`s. Demonstrations: dicts with `query` and `messages` or `completion`,
        `Demonstration`s or `Rollout`s. The run is written to `run_dir`/`name` (a time stamp by
        default); with `resume` the run of that name goes on from its last checkpoint.
        Ctrl-C saves and raises KeyboardInterrupt; a second one stops at once.
        """
        chosen = self._chosen(algorithm, options)
        word = _name_of(chosen)
        items = self._items(data, chosen)
        rollouts = self._scored(chosen, items)
        if resume and name is None:
            raise ConfigurationError(
                f"resume=True goes on with a run that has a name: give name=…; "
                f"{self.run_dir} holds: {', '.join(_runs_in(self.run_dir)) or 'no run'}"
            )
        config = self._config(chosen, items)
        if name is None:
            name = RunDirectory.claim(self.run_dir, f"{word}-{time.strftime('%Y%m%d-%H%M%S')}")
        with RunDirectory.opened(self.run_dir, name, config, resume) as directory:
            latest = directory.latest_checkpoint() if resume else None
            run = Run(
                name=name,
                directory=directory,
                policy=self.policy,
                data=tuple(items),
                algorithm=word,
                seed=self.seed,
                resume_from=latest[0] if latest else None,
                plugins=self.plugins,
                rollouts=rollouts,
            )
            with self._watching(), interruptible(run.stop):
                return self._train(chosen, run)

    def evaluate(
        self,
        tasks: Iterable[Any],
        attempts: int = 1,
        *,
        reward_func: Callable[..., Any] | str | None = None,
    ) -> Evaluation:
        """How the agent does on `tasks` as it is used: with its own sampling options."""
        return evaluate_groups(self.rollout(tasks, attempts, reward_func=reward_func))

    def rollout(
        self,
        tasks: Iterable[Any],
        attempts: int = 1,
        *,
        purpose: Literal["train", "use"] = "use",
        reward_func: Callable[..., Any] | str | None = None,
    ) -> list[Group]:
        """Attempts at `tasks`, as scored groups in their order. Nothing is trained."""
        todo = as_tasks(tasks)
        reward = self._as_reward(reward_func) or self._reward
        if reward is not None:
            check_reward(reward, todo)
        with watched("evaluating", len(todo), self.progress) as advance:
            return attrs.evolve(self._rollouts, reward=reward).run(
                todo,
                attempts,
                run_name="evaluation",
                iteration=0,
                seed=self.seed,
                purpose=purpose,
                on_group=lambda _group: advance(),
            )

    def demonstrate(self, task: Task, calls: Sequence[ToolCall]) -> Demonstration:
        """A plan of calls, executed for real, as this agent would write it."""
        return self.adapter.demonstrate(self._prototype, task, calls, observe=self._observe)

    def demonstrations(self, tasks: Iterable[Task]) -> list[Demonstration]:
        """What supervised training learns from: the plans of generated tasks, executed, as this
        agent would write them. Errors: `DataError` for a task without a plan."""
        return [self.demonstrate(task, plan_of(task)) for task in tasks]

    def generate_tasks(
        self, n: int, *, generator: str = "plans", seed: int | None = None, **options: Any
    ) -> GeneratedTasks:
        """Up to `n` tasks made from the agent's tools, whose gold answers were computed by running
        them; the list's `report` says what became of the others.

        `generator` is a name that a plugin provides (toolbrain-taskgen: "plans"), with its options
        as further keywords. `seed`: the Brain's, unless given. `writer`, of a generator that has
        one: "policy", a `ChatModel`, or whatever an installed plugin makes one of.
        """
        check_types({"n": n, "seed": seed}, Brain.generate_tasks, "generate_tasks")
        target = self.plugins.registries["task_generators"].get(generator)
        refuse_unknown(options, {generator: option_names(target)}, "generate_tasks")
        serving: AbstractContextManager[Any] = nullcontext()
        if options.get("writer") == "policy":
            serving = self.policy.serving()
        if options.get("writer") is not None:
            options["writer"] = self._as_chat_model(options["writer"])
        maker: TaskGenerator = build(target, generator, options)
        with serving, watched("making tasks", n, self.progress) as advance:
            return maker.generate(
                self.adapter.tools(self._prototype),
                n,
                demonstrate=self.demonstrate,
                rollout=self.rollout,
                seed=self.seed if seed is None else seed,
                advance=advance,
            )

    def save(self, path: str | Path) -> None:
        """Write adapter, tokenizer and `toolbrain.json` to a directory, all or nothing."""
        self.policy.save(path)

    def merge(self, path: str | Path) -> None:
        """Write a plain model with the adapter merged into its weights."""
        self.policy.merge(path)

    def _as_chat_model(self, writer: Any) -> ChatModel:
        if writer == "policy":
            return PolicyChat(self.policy, self.seed)
        if isinstance(writer, ChatModel):
            return writer
        model = self.plugins.match_chat_model(writer)
        if model is None:
            raise ConfigurationError(
                f"writer={writer!r:.60}: give 'policy', an object with chat(ChatRequest), or what "
                "an installed plugin knows as a chat model; none knows this"
            )
        return model

    def _train(self, algorithm: Algorithm, run: Run) -> TrainResult:
        result: TrainResult | None = None
        self.plugins.notify("toolbrain_run_started", run=run)
        try:
            self._look_before(run)
            result = algorithm.train(run)
        finally:  # also for an interrupted or failed run: what it earned is reported
            try:
                write_report(run.directory.path)
            except ToolBrainError as error:  # costs neither the result nor the run's own error
                logger.warning("the report was not written: %s", error)
            self.plugins.notify("toolbrain_run_finished", run=run, result=result)
        return result

    def _look_before(self, run: Run) -> None:
        """Say beforehand what could make the run worthless."""
        for problem in self.policy.preflight():
            run.warn(problem)
        if self.probe and run.rollouts and not run.rollouts.make_agent and not run.resume_from:
            stateful = probe_statefulness(run.rollouts, run.data, self.seed, run.stop)
            if stateful:
                run.warn(stateful)

    def _items(
        self, data: Iterable[Any], algorithm: Algorithm
    ) -> list[Task | Demonstration | Rollout]:
        wanted = algorithm.consumes
        if "tasks" in wanted:
            return list(as_tasks(data))
        if "demonstrations" in wanted:
            return list(as_demonstrations(data, self.adapter, self._prototype, self._observe))
        raise ConfigurationError(
            f"{_name_of(algorithm)} consumes {', '.join(sorted(wanted))}, which this toolbrain "
            "cannot make of data. Upgrade toolbrain-core."
        )

    def _scored(self, algorithm: Algorithm, items: Sequence[Any]) -> Rollouts | None:
        if "tasks" not in algorithm.consumes:
            return None
        if self._reward is None:
            raise ConfigurationError(
                f"{_name_of(algorithm)} needs a reward: Brain(agent, reward_func=…), a callable or "
                f"a name; installed: {', '.join(self.plugins.registries['rewards'].names())}"
            )
        check_reward(self._reward, items)
        return attrs.evolve(self._rollouts, reward=self._reward)

    def _config(self, algorithm: Algorithm, items: Sequence[Any]) -> dict[str, Any]:
        options = {
            name: jsonable(getattr(algorithm, name)) for name in option_names(type(algorithm))
        }
        return {
            "schema": 1,
            "algorithm": _name_of(algorithm),
            "options": options,
            "seed": self.seed,
            "items": len(items),
            "data": _digest(items),
            "agent": f"{type(self._prototype).__module__}.{type(self._prototype).__qualname__}",
            "tools": [spec.name for spec in self.adapter.tools(self._prototype)],
            "policy": dict(self.policy.describe()),
            "plugins": {
                record.distribution or record.name: record.version
                for record in self.plugins.records
                if record.status == "ok"
            },
            "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        }

    def _watching(self) -> AbstractContextManager[Any]:
        return self.plugins.observing(ProgressObserver()) if self.progress else nullcontext()

    def _as_reward(self, reward: Callable[..., Any] | str | None) -> Reward | None:
        if isinstance(reward, str):
            reward = self.plugins.registries["rewards"].get(reward)
        return None if reward is None else as_reward(cast(Callable[..., Any], reward))

    def _agent_of(self, agent: Any) -> tuple[Any, Callable[[], Any] | None]:
        """The agent to look at, and the function that builds one for each attempt, if any."""
        if self.plugins.match_agent(agent) is not None or not callable(agent):
            return agent, None
        try:
            return agent(), agent
        except (Exception, SystemExit) as error:  # a model, a class, a script's main()
            what = getattr(agent, "__name__", f"an object of class {type(agent).__name__}")
            raise UnsupportedAgent(
                f"{what} is neither an agent that an installed plugin knows nor a function that "
                f"makes one: calling it without arguments raised {type(error).__name__}: {error}"
            ) from error

    def _adapter_of(self, agent: Any) -> AgentAdapter:
        name = self.plugins.match_agent(agent)
        if name is None:
            raise self.plugins.unmatched(agent)
        return cast(AgentAdapter, self.plugins.registries["adapters"].get(name)())

    def _split(
        self, algorithm: str | Algorithm | None, policy_class: Any, options: Mapping[str, Any]
    ) -> tuple[Algorithm | None, dict[str, Any]]:
        """The algorithm with its options, and the policy's."""
        of_policy = set(option_names(policy_class))
        rest = {name: value for name, value in options.items() if name in of_policy}
        ours = {name: value for name, value in options.items() if name not in of_policy}
        if algorithm is None and not ours:
            return None, rest
        return self._with_options(algorithm or _DEFAULT_ALGORITHM, ours, sorted(of_policy)), rest

    def _with_options(
        self,
        algorithm: str | Algorithm,
        options: Mapping[str, Any],
        of_policy: Iterable[str] = (),
    ) -> Algorithm:
        if isinstance(algorithm, str):
            target, word = self.plugins.registries["algorithms"].get(algorithm), algorithm.lower()
        else:
            target, word = type(algorithm), _name_of(algorithm)
        if not attrs.has(target) or not hasattr(target, "consumes"):
            raise ConfigurationError(
                f"algorithm must be a name or an algorithm such as Grpo(), not {algorithm!r}"
            )
        valid = {word: option_names(target)}
        if of_policy:
            valid["the policy"] = tuple(of_policy)
        refuse_unknown(options, valid, f"Brain with algorithm {word!r}")
        if isinstance(algorithm, str):
            return cast(Algorithm, build(target, word, options))
        return cast(Algorithm, change(algorithm, word, options))

    def _chosen(self, algorithm: str | Algorithm | None, options: Mapping[str, Any]) -> Algorithm:
        """The algorithm of one `train`: the Brain's own, changed, unless another is named."""
        if algorithm is None:
            return self._with_options(self._algorithm or _DEFAULT_ALGORITHM, options)
        if isinstance(algorithm, str) and self._algorithm is not None:
            target = self.plugins.registries["algorithms"].get(algorithm)
            if type(self._algorithm) is target:
                return self._with_options(self._algorithm, options)
        return self._with_options(algorithm, options)


def _runs_in(folder: Path) -> list[str]:
    return sorted(path.parent.name for path in folder.glob("*/config.json"))


def _digest(items: Iterable[Task | Demonstration | Rollout]) -> str:
    """Tells other tasks from these, or their order: for a run that is resumed."""
    sha = hashlib.sha256()
    for item in items:
        task = item if isinstance(item, Task) else item.task
        facts = json.dumps(jsonable([task.id, task.query, task.gold_answer], depth=64))
        sha.update(re.sub(" at 0x[0-9a-f]+", "", facts).encode())  # of an object's repr
    return f"sha256 {sha.hexdigest()[:16]}"


def _name_of(algorithm: Algorithm) -> str:
    return str(getattr(algorithm, "name", type(algorithm).__name__.lower()))
