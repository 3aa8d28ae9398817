"""Keyword options: who takes which, and one clear error for those that nobody takes."""

from __future__ import annotations

import difflib
import inspect
import numbers
import types
from collections.abc import Callable, Iterable, Mapping
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import attrs

from .errors import ConfigurationError

_UNIONS = (Union, types.UnionType)


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


def check_types(options: Mapping[str, Any], target: Any, where: str) -> None:
    """Refuse values that are not what `target` (an attrs class, or a function) says it takes.

    Without it `shuffle="False"` would be true, and a misspelt choice would be as good as none.
    Annotations that cannot be evaluated here are not looked at.
    Errors: ConfigurationError naming the option, its value and what is needed.
    """
    try:
        hints = get_type_hints(target)
    except (NameError, TypeError):  # names imported for type checkers only
        return
    for option, value in options.items():
        if option in hints and not _fits(value, hints[option]):
            raise ConfigurationError(
                f"{where} refuses {option}={value!r:.60}: {_words(hints[option])} is needed"
            )


def _fits(value: Any, hint: Any) -> bool:
    origin, parts = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return _fits(value, parts[0])
    if origin in _UNIONS:
        return any(_fits(value, part) for part in parts)
    if origin is Literal:
        return any(type(value) is type(part) and value == part for part in parts)
    if hint is None or hint is type(None):
        return value is None
    kind = origin or hint
    if kind is Callable:
        return callable(value)
    if kind is tuple:  # as JSON has lists only
        return isinstance(value, tuple | list)
    if kind in (int, float) and isinstance(value, bool):
        return False
    kind = {int: numbers.Integral, float: numbers.Real}.get(kind, kind)
    try:
        return isinstance(value, kind)
    except TypeError:  # Any, a type variable, a protocol that cannot be asked
        return True


def _words(hint: Any) -> str:
    origin, parts = get_origin(hint), get_args(hint)
    if origin in _UNIONS:
        return " or ".join(map(_words, parts))
    if origin is Literal:
        return " or ".join(map(repr, parts))
    kind = origin or hint
    name = str(getattr(kind, "__name__", kind))
    return {
        bool: "true or false",
        int: "a whole number",
        float: "a number",
        str: "a string",
        type(None): "None",
        tuple: "a list",
        Callable: "something to call",
    }.get(kind, f"a {name}")


def build(target: type[Any], name: str, options: Mapping[str, Any]) -> Any:
    """An attrs instance from options. Errors: ConfigurationError naming what was refused."""
    check_types(options, target, name)
    try:
        return target(**options)
    except (TypeError, ValueError) as error:
        raise _refused(name, options, error) from error


def change(instance: Any, name: str, options: Mapping[str, Any]) -> Any:
    """`instance` with other options. Errors: as `build`."""
    check_types(options, type(instance), name)
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
