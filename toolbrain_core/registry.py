"""The names that users type, and the lazy targets behind them.

A plugin adds `"module:attribute"`; the module is imported when the name is first used, so that
listing what is installed costs nothing.
"""

from __future__ import annotations

import difflib
import pkgutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from attrs import define, field, frozen

from .errors import ConfigurationError, PluginError, UnknownName


@frozen
class Provider:
    """Who adds a name: a plugin, and the distribution that it was installed with, if any."""

    plugin: str
    distribution: str = ""
    version: str = ""

    def __str__(self) -> str:
        return f"{self.distribution} {self.version}".strip() or self.plugin

    @property
    def short(self) -> str:
        """What a user installs, blocks or uninstalls."""
        return self.distribution or self.plugin


@frozen
class _Entry:
    name: str
    target: str
    provider: Provider


@define(eq=False)
class Registry:
    """The names of one kind ("algorithm", "reward", …). Case is ignored, and `_` equals `-`.

    `suggestions` are the distributions to install where no plugin provides this kind. `problems`
    are sentences about the plugins that could not be loaded; the plugin manager keeps the list.
    """

    kind: str
    suggestions: Sequence[str] = ()
    problems: list[str] = field(factory=list)
    _entries: dict[str, _Entry] = field(factory=dict, init=False)
    _contested: dict[str, str] = field(factory=dict, init=False)
    _unavailable: dict[Provider, str] = field(factory=dict, init=False)
    _loaded: dict[str, Any] = field(factory=dict, init=False)
    _adding: Provider = field(default=Provider("this program"), init=False)

    def add(self, name: str, target: str, aliases: Sequence[str] = ()) -> None:
        """Map `name` (and `aliases`) to `target`, `"package.module:attribute"`; imports nothing.

        Errors: PluginError for a target of another form, and for a name that is taken; then the
        name is refused from everybody, since nothing says which of the two was meant.
        """
        module, _, attribute = target.partition(":") if isinstance(target, str) else ("", "", "")
        if not module or not attribute:
            raise PluginError(
                f"{self._adding} adds the {self.kind} {name!r} with the target {target!r}; "
                "'package.module:attribute' is needed"
            )
        entry = _Entry(name, target, self._adding)
        keys = list(dict.fromkeys(_key(word) for word in (name, *aliases)))
        taken = [(key, self._entries[key]) for key in keys if key in self._entries]
        for key, other in taken:
            self._contested[key] = self._collision(key, other.provider, entry.provider)
        if taken:
            raise PluginError(self._contested[taken[0][0]])
        self._entries.update(dict.fromkeys(keys, entry))

    def names(self) -> list[str]:
        """The names that can be used here, sorted; without aliases."""
        return sorted(entry.name for entry in self._usable())

    def describe(self) -> str:
        """The usable names and who provides each: `grpo (toolbrain-grpo 0.1.0), sft (…)`."""
        usable = sorted(self._usable(), key=lambda entry: entry.name)
        return ", ".join(f"{entry.name} ({entry.provider})" for entry in usable)

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and _key(name) in self._entries

    def get(self, name: str) -> Any:
        """The target of `name`, imported on first use.

        Errors: UnknownName that says what is installed and what failed to load; PluginError where
        two plugins add the name, or its target cannot be imported; ConfigurationError where its
        plugin cannot work on this machine.
        """
        key = _key(name)
        if key in self._contested:
            raise PluginError(self._contested[key])
        entry = self._entries.get(key)
        if entry is None:
            raise UnknownName(self._unknown(name))
        if entry.provider in self._unavailable:
            raise ConfigurationError(
                f"the {self.kind} {entry.name!r} of {entry.provider} cannot work on this machine: "
                f"{self._unavailable[entry.provider]}"
            )
        if entry.target not in self._loaded:
            self._loaded[entry.target] = self._load(entry)
        return self._loaded[entry.target]

    @contextmanager
    def adding(self, provider: Provider) -> Iterator[None]:
        """Names added inside are `provider`'s."""
        before, self._adding = self._adding, provider
        try:
            yield
        finally:
            self._adding = before

    def provided_by(self, provider: Provider) -> list[str]:
        """The names that `provider` added, sorted; without aliases."""
        return sorted({e.name for e in self._entries.values() if e.provider == provider})

    def remove(self, provider: Provider) -> None:
        """Forget every name of `provider`."""
        self._entries = {k: e for k, e in self._entries.items() if e.provider != provider}

    def refuse(self, provider: Provider, reason: str) -> None:
        """Keep the names of `provider`, and answer each request for one with `reason`."""
        self._unavailable[provider] = reason

    def _usable(self) -> set[_Entry]:
        return {
            entry
            for key, entry in self._entries.items()
            if key not in self._contested and entry.provider not in self._unavailable
        }

    def _collision(self, key: str, first: Provider, second: Provider) -> str:
        if first == second:
            return f"{first} adds the {self.kind} {key!r} twice"
        return (
            f"the {self.kind} {key!r} is provided by both {first} and {second}; uninstall one, or "
            f"block it: TOOLBRAIN_BLOCK_PLUGINS={second.short}"
        )

    def _unknown(self, name: str) -> str:
        close = difflib.get_close_matches(_key(name), self._entries, n=1)
        guess = f" (did you mean {self._entries[close[0]].name!r}?)" if close else ""
        return "; ".join([f"no {self.kind} named {name!r}{guess}", self.availability()])

    def availability(self) -> str:
        """What is installed of this kind, what to install, and which plugins failed to load."""
        if known := self.describe():
            installed = f"installed: {known}"
        elif self.suggestions:
            installed = f"none is installed: pip install {' '.join(self.suggestions)}"
        else:
            installed = "no installed plugin provides one"
        return "; ".join([installed, *self.problems])

    def _load(self, entry: _Entry) -> Any:
        try:
            return pkgutil.resolve_name(entry.target)
        # A plugin's module may raise anything, or exit; the cause is chained.
        except (Exception, SystemExit) as error:
            raise PluginError(
                f"the {self.kind} {entry.name!r} of {entry.provider} could not be imported from "
                f"{entry.target!r}: {type(error).__name__}: {error}. "
                f"Reinstall it with what it needs: pip install {entry.provider.short}"
            ) from error


def _key(name: str) -> str:
    return str(name).strip().casefold().replace("_", "-")
