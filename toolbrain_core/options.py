"""Keyword options: who takes which, and one clear error for those that nobody takes."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Iterable, Mapping
from typing import Any

import attrs

from .errors import ConfigurationError


def option_names(target: type[Any]) -> tuple[str, ...]:
    """The options of an attrs class (its fields), or the keyword-only parameters of any other."""
    if attrs.has(target):
        return tuple(f.name for f in attrs.fields(target) if f.init)
    parameters = inspect.signature(target).parameters.values()
    return tuple(p.name for p in parameters if p.kind is p.KEYWORD_ONLY)


def refuse_unknown(options: Iterable[str], valid: Mapping[str, Iterable[str]], where: str) -> None:
    """Errors: ConfigurationError for an option that none of the owners in `valid` takes; lists
    what each of them does take."""
    everything = [name for names in valid.values() for name in names]
    for option in options:
        if option not in everything:
            near = difflib.get_close_matches(option, everything, 1)
            hint = f" (did you mean {near[0]!r}?)" if near else ""
            lists = "; ".join(f"{owner}: {', '.join(names)}" for owner, names in valid.items())
            raise ConfigurationError(f"{where} has no option {option!r}{hint}. Valid: {lists}")


def build(target: type[Any], name: str, options: Mapping[str, Any]) -> Any:
    """An attrs instance from options. Errors: ConfigurationError naming what was refused."""
    try:
        return target(**options)
    except (TypeError, ValueError) as error:
        raise _refused(name, options, error) from error


def change(instance: Any, name: str, options: Mapping[str, Any]) -> Any:
    """`instance` with other options. Errors: as `build`."""
    try:
        return attrs.evolve(instance, **options)
    except (TypeError, ValueError) as error:
        raise _refused(name, options, error) from error


def _refused(name: str, options: Mapping[str, Any], error: Exception) -> ConfigurationError:
    """Names the given options: a value of the wrong type fails without saying where."""
    given = ", ".join(f"{key}={value!r:.60}" for key, value in options.items())
    # attrs' validators put the attribute and the value behind their message.
    reason = error.args[0] if error.args else error
    return ConfigurationError(f"{name} refuses its options ({given}): {reason}")
