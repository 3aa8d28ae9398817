"""The installed plugins: their names, their hooks, and a wall between them.

Whatever goes wrong with one plugin is kept in its `PluginRecord` and shown by
`toolbrain plugins list`; loading never raises for it, and the others work.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import pluggy
from attrs import evolve, frozen

from . import builtin, hookspecs
from .discovery import BLOCK_VARIABLE, CORE, GROUP, PluginRecord, core_version, discover
from .errors import PluginError, ToolBrainError, UnsupportedAgent
from .registry import Provider, Registry

if TYPE_CHECKING:
    import click

    from .roles import ChatModel

logger = logging.getLogger(__name__)

#: Each register hook's kind in the plural, one of it in words, and what to install for it.
KINDS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "adapters": ("agent adapter", ("toolbrain-smolagents",)),
    "policies": ("policy", ("toolbrain-transformers",)),
    "algorithms": ("algorithm", ("toolbrain-grpo", "toolbrain-sft")),
    "rewards": ("reward", ()),
    "judges": ("judge", ()),
    "retrievers": ("retriever", ()),
    "loaders": ("model loader", ()),
    "samplers": ("sampler", ("toolbrain-vllm",)),
    "task_generators": ("task generator", ("toolbrain-taskgen",)),
}


@frozen
class _Loaded:
    """A plugin whose hooks can be called; `active` unless it cannot work on this machine.

    Each has a pluggy manager to itself, so that one plugin's hook can be validated, called and
    failed without the others.
    """

    plugin: Any
    provider: Provider
    hooks: pluggy.HookRelay
    active: bool = True

    def call(self, hook_name: str, **arguments: Any) -> Any:
        """The results of one hook, as pluggy gives them."""
        return getattr(self.hooks, hook_name)(**arguments)


class PluginManager:
    """The installed plugins: their registries, their records, and calls of their hooks.

    `PluginManager()` discovers what is installed. `PluginManager.with_plugins(module, …)` knows
    only the core's own names and the modules or objects given: tests use it. Every registry is in
    `registries`, by kind: `manager.registries["algorithms"].get("grpo")`.
    """

    def __init__(self, autoload: bool = True) -> None:
        self._loaded: list[_Loaded] = []
        self._problems: list[str] = []
        self._records: list[PluginRecord] = []
        self.registries: dict[str, Registry] = {
            kind: Registry(word, install, self._problems) for kind, (word, install) in KINDS.items()
        }
        self._keep(self._load(builtin, Provider("core", CORE, core_version())))
        if autoload:
            for found in discover():
                self._keep(found.record or self._load(found.plugin, found.provider))

    @classmethod
    def with_plugins(cls, *plugins: Any) -> PluginManager:
        """A manager of these modules or objects only; never reads entry points."""
        manager = cls(autoload=False)
        for plugin in plugins:
            manager.add(plugin)
        return manager

    @property
    def records(self) -> tuple[PluginRecord, ...]:
        """What became of each plugin; the core's own names come first."""
        return tuple(self._records)

    def add(self, plugin: Any, name: str = "") -> PluginRecord:
        """Add a module or object with hook implementations; its record says how that went."""
        word = name or getattr(plugin, "__name__", type(plugin).__name__)
        same = sum(record.name.partition("#")[0] == word for record in self._records)
        return self._keep(self._load(plugin, Provider(f"{word}#{same + 1}" if same else word)))

    def remove(self, plugin: Any) -> None:
        """Take out what `add` put in, with its names. One that is not there is no error."""
        for loaded in [item for item in self._loaded if item.plugin is plugin]:
            self._loaded.remove(loaded)
            self._forget_names(loaded.provider)
            self._records = [r for r in self._records if r.provider != loaded.provider]

    @contextlib.contextmanager
    def observing(self, observer: Any) -> Iterator[None]:
        """Inside, `observer` (an object with hook implementations) hears of runs too."""
        self.add(observer)
        try:
            yield
        finally:
            self.remove(observer)

    def match_agent(self, agent: Any) -> str | None:
        """The name of the adapter that runs `agent`, or None.

        Every plugin is asked; the class nearest to `type(agent)` in its MRO wins.
        Errors: PluginError naming both plugins where two adapters match the same class, or where
        an answer is not `(name, class)`.
        """
        matches = [
            (_distance(agent, matched), name, loaded.provider)
            for loaded in self._loaded
            for name, matched in self._matches(loaded, agent)
        ]
        if not matches:
            return None
        nearest = min(distance for distance, _, _ in matches)
        best = {name: provider for distance, name, provider in matches if distance == nearest}
        if len(best) > 1:
            names = " and ".join(f"{name!r} ({who})" for name, who in best.items())
            raise PluginError(
                f"the agent of class {type(agent).__name__} is matched equally well by the "
                f"adapters {names}; block one: {BLOCK_VARIABLE}=…"
            )
        return next(iter(best))

    def unmatched(self, agent: Any) -> UnsupportedAgent:
        """The error for an agent that `match_agent` gave None for: what is known, what to do."""
        of, registry = type(agent), self.registries["adapters"]
        framework = of.__module__.partition(".")[0]
        known = [name for name in registry.suggestions if name == f"toolbrain-{framework}"]
        step = f"pip install {known[0]}; " if known else ""
        return UnsupportedAgent(
            f"no installed plugin runs an agent of class {of.__module__}.{of.__qualname__}: {step}"
            + registry.availability()
        )

    def match_chat_model(self, obj: Any) -> ChatModel | None:
        """The `ChatModel` that the first plugin to know `obj` makes of it, or None."""
        for loaded in self._active():
            model: ChatModel | None = self._ask(loaded, "toolbrain_match_chat_model", obj=obj)
            if model is not None:
                return model
        return None

    def notify(self, hook_name: str, **arguments: Any) -> None:
        """Call an observer hook on every plugin; one that raises is logged and skipped."""
        for loaded in self._active():
            try:
                loaded.call(hook_name, **arguments)
            except ToolBrainError as error:  # in words already
                logger.error("%s: %s was skipped: %s", loaded.provider, hook_name, error)
            except (Exception, SystemExit):  # an observer must never stop a run
                logger.exception("%s: %s failed and was skipped", loaded.provider, hook_name)

    def commands(self, cli: click.Group) -> None:
        """Add the plugins' commands to `cli`; a plugin that fails, or takes a name that is in use,
        is logged and skipped."""
        from click import Group

        for loaded in self._active():
            own = Group()
            try:
                loaded.call("toolbrain_register_commands", cli=own)
            except (Exception, SystemExit):  # `toolbrain` must work whatever a plugin does
                logger.exception("%s: its commands could not be added", loaded.provider)
                continue
            for name, command in own.commands.items():
                if name in cli.commands:
                    logger.error("%s: the command %r exists already", loaded.provider, name)
                else:
                    cli.add_command(command, name)

    def _load(self, plugin: Any, provider: Provider) -> PluginRecord:
        """Take in a plugin's hooks and names; all its names go again where one of them fails."""
        try:
            loaded = _Loaded(plugin, provider, _hooks_of(plugin))
            reason = _unavailable(loaded)
            provides = self._register_names(loaded)
        except (Exception, SystemExit) as error:  # a plugin's hooks may raise anything
            self._forget_names(provider)
            return PluginRecord.of(provider, "failed", _why(error))
        self._loaded.append(evolve(loaded, active=not reason))
        if reason:
            for registry in self.registries.values():
                registry.refuse(provider, reason)
        record = PluginRecord.of(provider, "unavailable" if reason else "ok", reason)
        return evolve(record, provides=provides)

    def _register_names(self, loaded: _Loaded) -> dict[str, list[str]]:
        for kind, registry in self.registries.items():
            with registry.adding(loaded.provider):
                loaded.call(f"toolbrain_register_{kind}", registry=registry)
        added = {kind: reg.provided_by(loaded.provider) for kind, reg in self.registries.items()}
        return {kind: names for kind, names in added.items() if names}

    def _forget_names(self, provider: Provider) -> None:
        for registry in self.registries.values():
            registry.remove(provider)

    def _keep(self, record: PluginRecord) -> PluginRecord:
        self._records.append(record)
        if record.problem:
            self._problems.append(record.problem)
        return record

    def _active(self) -> Iterator[_Loaded]:
        return (loaded for loaded in tuple(self._loaded) if loaded.active)

    def _ask(self, loaded: _Loaded, hook_name: str, **arguments: Any) -> Any:
        """A call that skips a plugin which breaks on what may be another plugin's business."""
        try:
            return loaded.call(hook_name, **arguments)
        except ToolBrainError:  # said to the user on purpose
            raise
        except (Exception, SystemExit):
            logger.exception("%s: %s failed and was skipped", loaded.provider, hook_name)
            return None

    def _matches(self, loaded: _Loaded, agent: Any) -> Iterator[tuple[str, type]]:
        answers = self._ask(loaded, "toolbrain_match_agent", agent=agent) or []
        for answer in answers:
            match answer:
                case (str(), type()):
                    yield answer
                case _:
                    raise PluginError(
                        f"{loaded.provider}: toolbrain_match_agent returned {answer!r}; "
                        "(adapter name, class) or None is needed"
                    )


@functools.cache
def default_manager() -> PluginManager:
    """The installed plugins, discovered once in a process."""
    return PluginManager()


def _why(error: BaseException) -> str:
    """The reason for a record; toolbrain's and pluggy's own messages need no class name."""
    if isinstance(error, ToolBrainError | pluggy.PluginValidationError):
        return str(error)
    return f"{type(error).__name__}: {error}"


def _hooks_of(plugin: Any) -> pluggy.HookRelay:
    """The plugin's hooks, checked. Errors: PluginValidationError, PluginError."""
    own = pluggy.PluginManager(GROUP)
    own.add_hookspecs(hookspecs)
    own.register(plugin)
    own.check_pending()  # pluggy itself accepts a hook that no one specified
    if not own.get_hookcallers(plugin):
        raise PluginError("it implements no hook; is @hookimpl missing?")
    return own.hook


def _unavailable(loaded: _Loaded) -> str:
    answers = loaded.call("toolbrain_unavailable")
    for answer in answers:
        if not isinstance(answer, str):
            raise PluginError(f"toolbrain_unavailable() returned {answer!r}, not a reason")
    return "; ".join(answers)


def _distance(agent: Any, matched: type) -> int:
    """How far `matched` is from the agent's class in its MRO; a virtual base is the farthest."""
    mro = type(agent).__mro__
    return mro.index(matched) if matched in mro else len(mro)


__all__ = ["KINDS", "PluginManager", "PluginRecord", "default_manager"]
