"""Finds the installed plugins, and what is wrong with one before its hooks are looked at.

A plugin is a module named by an entry point of the group `toolbrain`. One that cannot be imported
is a record with its reason; it never stops the others.
"""

from __future__ import annotations

import importlib.metadata
import os
from collections import defaultdict
from collections.abc import Iterator, Mapping
from importlib.metadata import EntryPoint
from typing import Any, Literal

from attrs import Factory, frozen
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from .registry import Provider

GROUP = "toolbrain"
CORE = "toolbrain-core"
#: Entry-point or distribution names, separated by commas, that are not to be imported.
BLOCK_VARIABLE = "TOOLBRAIN_BLOCK_PLUGINS"

Status = Literal["ok", "failed", "incompatible", "blocked", "unavailable"]


@frozen
class PluginRecord:
    """What became of one plugin. `provides` maps a kind ("algorithms") to the names added."""

    name: str
    distribution: str = ""
    version: str = ""
    status: Status = "ok"
    reason: str = ""
    provides: Mapping[str, list[str]] = Factory(dict)

    @classmethod
    def of(cls, provider: Provider, status: Status = "ok", reason: str = "") -> PluginRecord:
        """A record of `provider`, which provides no names."""
        return cls(provider.plugin, provider.distribution, provider.version, status, reason)

    @property
    def provider(self) -> Provider:
        """Who this is about, as registries know it."""
        return Provider(self.name, self.distribution, self.version)

    @property
    def problem(self) -> str:
        """One sentence about a plugin that could not be loaded; empty where it was."""
        name = self.distribution or self.name
        return {
            "failed": f"{name!r} failed to load: {self.reason}",
            "incompatible": f"{name!r} is incompatible: {self.reason}",
            "blocked": f"{name!r} is blocked: {self.reason}",
        }.get(self.status, "")


@frozen
class Found:
    """One entry point: the object that it names, or the record of why there is none."""

    provider: Provider
    plugin: Any = None
    record: PluginRecord | None = None


def discover() -> Iterator[Found]:
    """The installed plugins by name, imported one after the other.

    Blocked ones come first, and are not imported; neither are incompatible ones and those that
    share their name with another.
    """
    blocked = {canonicalize_name(word) for word in _blocked_words()}
    allowed: dict[str, list[EntryPoint]] = defaultdict(list)
    for entry in sorted(importlib.metadata.entry_points(group=GROUP), key=_order):
        origin = _origin(entry)
        if blocked & {canonicalize_name(entry.name), canonicalize_name(origin.short)}:
            yield _not_loaded(origin, "blocked", f"by {BLOCK_VARIABLE}")
        else:
            allowed[entry.name].append(entry)
    for same_name in allowed.values():
        yield from _refuse_all(same_name) if len(same_name) > 1 else [_load(same_name[0])]


def core_version() -> str:
    """The installed version of toolbrain-core."""
    return importlib.metadata.version(CORE)


def _load(entry: EntryPoint) -> Found:
    origin = _origin(entry)
    try:
        if unmet := _unmet_core_requirement(entry):
            return _not_loaded(origin, "incompatible", unmet)
        return Found(origin, entry.load())
    except (Exception, SystemExit) as error:  # a plugin's module may raise anything
        return _not_loaded(origin, "failed", f"{type(error).__name__}: {error}")


def _refuse_all(entries: list[EntryPoint]) -> Iterator[Found]:
    """Entry points of one name: nothing says which was meant."""
    origins = [_origin(entry) for entry in entries]
    reason = (
        f"the plugin name {entries[0].name!r} is taken by {' and '.join(map(str, origins))}; "
        f"uninstall one, or block it: {BLOCK_VARIABLE}={origins[-1].short}"
    )
    yield from (_not_loaded(origin, "failed", reason) for origin in origins)


def _unmet_core_requirement(entry: EntryPoint) -> str:
    """Why the installed core does not do for the plugin's distribution; empty where it does."""
    for line in (entry.dist.requires if entry.dist else None) or ():
        need, have = Requirement(line), core_version()
        wanted = canonicalize_name(need.name) == CORE
        applies = need.marker is None or need.marker.evaluate({"extra": ""})
        if wanted and applies and not need.specifier.contains(have, prereleases=True):
            return f"it needs {CORE}{need.specifier}, but {CORE} {have} is installed"
    return ""


def _not_loaded(provider: Provider, status: Status, reason: str) -> Found:
    return Found(provider, record=PluginRecord.of(provider, status, reason))


def _order(entry: EntryPoint) -> tuple[str, str]:
    return entry.name, _origin(entry).short


def _origin(entry: EntryPoint) -> Provider:
    """Who installed an entry point; a distribution without readable metadata has no name."""
    if entry.dist is None:
        return Provider(entry.name)
    try:
        # Without a METADATA file these are None up to Python 3.13, and raise from 3.14 on.
        return Provider(entry.name, entry.dist.name or "", entry.dist.version or "")
    except Exception:
        return Provider(entry.name)


def _blocked_words() -> list[str]:
    return [word.strip() for word in os.environ.get(BLOCK_VARIABLE, "").split(",") if word.strip()]
