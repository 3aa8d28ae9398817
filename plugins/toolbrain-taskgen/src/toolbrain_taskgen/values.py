"""Where the arguments of a plan come from: schemas, docstrings, users, and what tools returned."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from attrs import define, field

from toolbrain_core.traces import ToolSpec

#: Numbers to use where a schema and its words name none.
_INTEGERS = (2, 3, 4, 5, 6, 7, 8, 9, 10, 12, 15, 20)
_NUMBERS = (0.5, 1.5, 2.0, 2.5, 4.0, 5.5, 7.5, 10.0, 12.5, 20.0)
#: Words of names that say nothing about what is named.
_EMPTY_WORDS = {
    "get",
    "find",
    "list",
    "look",
    "up",
    "of",
    "the",
    "a",
    "for",
    "name",
    "all",
    "value",
}
_QUOTED = re.compile(r"""(?<!\w)(['"`])([^'"`\n]{1,60})\1(?!\w)""")  # no apostrophes
_AFTER_EXAMPLE = re.compile(
    r"(?:e\.g\.|for example|for instance|such as|like)[:,]?\s+([^.;()\n]+)", re.I
)


def words_of(name: str) -> frozenset[str]:
    """The words of a name in snake_case or camelCase, singular, without the empty ones."""
    spaced = re.sub(r"([a-z0-9])([A-Z])", r"\1 \2", name)
    words = re.findall(r"[a-z0-9]+", spaced.lower())
    singular = (
        w[:-1] if len(w) > 3 and w.endswith("s") and not w.endswith("ss") else w for w in words
    )
    return frozenset(w for w in singular if w not in _EMPTY_WORDS)


def types_of(schema: Mapping[str, Any]) -> frozenset[str]:
    """The JSON types that a schema allows; of "nullable" ones the others."""
    if "anyOf" in schema or "oneOf" in schema:
        options = schema.get("anyOf") or schema.get("oneOf") or ()
        return frozenset().union(*map(types_of, options)) - {"null"}
    kind = schema.get("type", "string" if "enum" not in schema else "enum")
    kinds = [kind] if isinstance(kind, str) else list(kind)
    return frozenset(kinds) - {"null"}


def type_of(value: Any) -> str:
    """The JSON type of a value; "object" for all that is no scalar and no list."""
    if isinstance(value, bool):
        return "boolean"
    for kind, name in (
        (int, "integer"),
        (float, "number"),
        (str, "string"),
        (list | tuple, "array"),
    ):
        if isinstance(value, kind):
            return name
    return "object"


def allows(schema: Mapping[str, Any], kind: str) -> bool:
    """Whether a value of this JSON type may be given."""
    types = types_of(schema)
    return kind in types or (kind == "integer" and "number" in types) or "any" in types


@define
class ValueSource:
    """Values for arguments. `examples` are the user's, by `tool.parameter` or `parameter`;
    `returned` are scalars that tools returned, by the name they had there."""

    examples: Mapping[str, Sequence[Any]] = field(factory=dict)
    returned: dict[str, list[Any]] = field(factory=dict)

    def candidates(self, tool: ToolSpec, name: str) -> list[Any]:
        """All values to choose from for one parameter; none where nothing is known."""
        schema = tool.parameters.get("properties", {}).get(name, {})
        for key in (f"{tool.name}.{name}", name):
            if key in self.examples:
                return list(self.examples[key])
        return self._of_schema(schema, name)

    def draw(self, tool: ToolSpec, name: str, random: random.Random) -> Any:
        """One value. Errors: LookupError where there is none."""
        values = self.candidates(tool, name)
        if not values:
            raise LookupError(name)
        return random.choice(values)

    def learn(self, name: str, output: Any) -> None:
        """Note what a tool returned; `name` is the tool's."""
        for known_as, value in _scalars(name, output):
            kept = self.returned.setdefault(known_as, [])
            if value not in kept and len(kept) < 200:
                kept.append(value)

    def _of_schema(self, schema: Mapping[str, Any], name: str) -> list[Any]:
        if schema.get("enum"):
            return list(schema["enum"])
        if "const" in schema:
            return [schema["const"]]
        types = types_of(schema)
        if types == {"boolean"}:
            return [True, False]
        given = [
            *schema.get("examples", ()),
            *self._mentioned(schema),
            *self._fitting(schema, name),
        ]
        if given:
            return _unique(given)
        if "array" in types:
            return [[v] for v in self._of_schema(schema.get("items", {}), name)]
        if types & {"integer", "number"}:
            return _within(schema, _INTEGERS if "integer" in types else _NUMBERS)
        default = schema.get("default")
        return [] if default is None else [default]

    def _mentioned(self, schema: Mapping[str, Any]) -> Iterator[Any]:
        """Values that the description shows: quoted, or after "e.g."."""
        text = str(schema.get("description", ""))
        found = [word for _, word in _QUOTED.findall(text)]
        if not found:
            lists = _AFTER_EXAMPLE.findall(text)
            found = [part.strip() for each in lists for part in re.split(r",| or | and ", each)]
        for word in filter(None, found):
            value = _as_type(word, types_of(schema))
            if value is not None:
                yield value

    def _fitting(self, schema: Mapping[str, Any], name: str) -> Iterator[Any]:
        wanted = words_of(name)
        for known_as, values in self.returned.items():
            if wanted & words_of(known_as):
                yield from (v for v in values if allows(schema, type_of(v)))


def _scalars(name: str, output: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(output, Mapping):
        for key, value in output.items():
            yield from _scalars(str(key), value)
    elif isinstance(output, list | tuple):
        for value in output[:50]:
            yield from _scalars(name, value)
    elif isinstance(output, int | float) or (isinstance(output, str) and 0 < len(output) <= 60):
        yield name, output


def _as_type(word: str, types: frozenset[str]) -> Any:
    if "string" in types or not types:
        return word
    try:
        number = float(word)
    except ValueError:
        return None
    if "integer" in types and number.is_integer():
        return int(number)
    return number if "number" in types else None


def _within(schema: Mapping[str, Any], numbers: Sequence[float]) -> list[Any]:
    low = schema.get("minimum", schema.get("exclusiveMinimum"))
    high = schema.get("maximum", schema.get("exclusiveMaximum"))
    fit = [n for n in numbers if (low is None or n > low) and (high is None or n < high)]
    ends = [end for end in (schema.get("minimum"), schema.get("maximum")) if end is not None]
    return fit or ends


def _unique(values: Sequence[Any]) -> list[Any]:
    return [value for index, value in enumerate(values) if value not in values[:index]]
