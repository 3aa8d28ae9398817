"""Calls that a model wrote as JSON, read out of the text around them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NoReturn

from attrs import frozen

#: A block whose body is JSON, as Qwen's and Hermes' templates ask for it.
JSON_BLOCK = re.compile(r"<tool_call>\s*[\[{]")

_OPEN = re.compile(r"<tool_call>\s*")
_CLOSE = re.compile(r"\s*</tool_call>")
_BARE = re.compile(r'\[\s*\{\s*"|\{\s*"')
_BARE_CALL = re.compile(r'\{\s*"(?:name|arguments|parameters)"\s*:')
_EMPTY_FENCE = re.compile(r"```(?:json)?\s*```")
_PASSED = ("arguments", "parameters")  # what models call them


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no JSON number")


_DECODER = json.JSONDecoder(parse_constant=_refuse)


@frozen
class InvalidCall:
    """What looked like a call and is none: as it was written, and why."""

    text: str
    reason: str


@frozen
class ParsedAnswer:
    """`text` around the calls, without reasoning; `calls` shaped as in OpenAI's API: `id`, `type`,
    and `function` with `name` and `arguments` (the text of a JSON object)."""

    text: str
    calls: tuple[dict[str, Any], ...] = ()
    invalid: tuple[InvalidCall, ...] = ()


def parse_json(text: str, call_id: str) -> ParsedAnswer:
    """Calls in `<tool_call>` blocks; where there is no block, bare JSON calls."""
    pieces = list(_blocks(text) if "<tool_call>" in text else _bare_calls(text))
    around = "".join(piece for piece in pieces if isinstance(piece, str))
    found = [piece for piece in pieces if not isinstance(piece, str)]
    return answer_of(_EMPTY_FENCE.sub("", around), found, call_id)


def _blocks(text: str) -> Iterator[str | dict[str, Any] | InvalidCall]:
    """Text, calls and invalid calls in order; a block may lack its end (a stop string)."""
    at = 0
    while opening := _OPEN.search(text, at):
        yield text[at : opening.start()]
        value, end = _decode(text, opening.end())
        following = _OPEN.search(text, end)
        limit = following.start() if following else len(text)
        closing = _CLOSE.search(text, end, limit)
        at = closing.end() if closing else limit
        written = text[opening.start() : at]
        unread = text[end : closing.start() if closing else at].strip()
        if unread and not isinstance(value, ValueError):
            value = ValueError(f"a block holds one JSON value, and then comes {unread!r:.80}")
        for item in value if isinstance(value, list) else [value]:
            yield checked_call(item, written)
    yield text[at:]


def _bare_calls(text: str) -> Iterator[str | dict[str, Any] | InvalidCall]:
    """As `_blocks`, for JSON objects (or a list of them) that have a name and arguments."""
    at = 0
    while start := _BARE.search(text, at):
        yield text[at : start.start()]
        value, at = _decode(text, start.start())
        items = value if isinstance(value, list) else [value]
        if not isinstance(value, ValueError) and not all(map(_is_call, items)):
            yield text[start.start() : at]
        elif not isinstance(value, ValueError):
            for item in items:
                yield checked_call(item, text[start.start() : at])
        elif _BARE_CALL.match(text, start.start()):
            following = _BARE_CALL.search(text, start.start() + 1)
            at = following.start() if following else len(text)
            yield InvalidCall(text[start.start() : at], str(value))
        else:
            at = start.start() + 1
            yield text[start.start() : at]
    yield text[at:]


def _is_call(value: Any) -> bool:
    if isinstance(value, Mapping) and isinstance(value.get("function"), Mapping):
        value = value["function"]
    return isinstance(value, Mapping) and "name" in value and not value.keys().isdisjoint(_PASSED)


def _decode(text: str, at: int) -> tuple[Any, int]:
    """The JSON value that begins at `at` and its end, or a `ValueError` in its place."""
    try:
        return _DECODER.raw_decode(text, at)
    except (ValueError, RecursionError) as error:
        return ValueError(f"not JSON: {error}"), at


def checked_call(value: Any, written: str) -> dict[str, Any] | InvalidCall:
    """The function of a call, its arguments as JSON text, or what is wrong with it."""
    try:
        return _function(value)
    except (ValueError, RecursionError) as error:
        return InvalidCall(written, str(error))


def _function(value: Any) -> dict[str, Any]:
    if isinstance(value, ValueError):
        raise value
    if isinstance(value, Mapping) and isinstance(value.get("function"), Mapping):
        value = value["function"]
    if not isinstance(value, Mapping) or not isinstance(value.get("name"), str):
        raise ValueError("a call is a JSON object with a name")
    given: Any = next((value[key] for key in _PASSED if value.get(key) is not None), {})
    arguments = _DECODER.decode(given or "{}") if isinstance(given, str) else given
    if not isinstance(arguments, Mapping):
        raise ValueError(f"the arguments of {value['name']!r} are no JSON object: {given!r:.80}")
    text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    f"{value['name']}{text}".encode()  # lone surrogates could not be written to a journal
    return {"name": value["name"], "arguments": text}


def answer_of(
    text: str, found: Sequence[dict[str, Any] | InvalidCall], call_id: str
) -> ParsedAnswer:
    """The parsed answer of functions and invalid calls in order; calls are numbered."""
    functions = [item for item in found if isinstance(item, dict)]
    calls = tuple(
        {"id": f"{call_id}_{index}", "type": "function", "function": function}
        for index, function in enumerate(functions)
    )
    return ParsedAnswer(
        text.strip(), calls, tuple(item for item in found if isinstance(item, InvalidCall))
    )
