"""When two answers say the same: `answers_match`, for rewards and evaluation alike."""

from __future__ import annotations

import json
import math
import numbers
import re
from collections.abc import Mapping
from decimal import Decimal
from fractions import Fraction
from typing import Any

from .traces import jsonable

_CURRENCY = "[$€£¥₹]"
_NUMBER = re.compile(
    rf"(?P<before>{_CURRENCY}?)\s*(?P<sign>[+-]?)\s*(?P<inner>{_CURRENCY}?)\s*"
    r"(?P<digits>(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)(?:\.[0-9]*)?|\.[0-9]+)"
    rf"(?P<exponent>[eE][+-]?[0-9]{{1,3}})?\s*(?P<after>[%$€£¥₹]?)"
)
_QUOTES = {'"': '"', "'": "'", "`": "`", "“": "”", "\u2018": "\u2019", "«": "»"}
_LONGEST_NUMBER = 1_000  # characters; longer digit strings compare as text
_RELATIVE, _ABSOLUTE = Fraction(1, 10**6), Fraction(1, 10**9)


def answers_match(answer: Any, gold: Any) -> bool:
    """Whether `answer` says the same as `gold`.

    - Numbers, and strings that are one number, compare as numbers: 12 == "12" == "12.00". Two
      whole numbers must be equal; others may differ by 1e-6 of the larger one, or by 1e-9.
      Thousands separators (`1,234`) and one currency or percent sign are allowed: " $1,234.50 " is
      1234.5, "50%" is 50 (never 0.5), and two different signs ("$5", "5%") do not match.
    - Other strings compare without regard to case, to the amount of white space, to quotes around
      them and to a final period. `True` is "true"; it is not 1.
    - Lists and dicts, and strings that hold one as JSON, compare element by element by the same
      rules, lists in order.
    - Where `gold` is a list, tuple or set and `answer` is not, `gold` holds several allowed
      answers, and one of them must match.
    """
    answer, wanted = _parsed(answer), _parsed(gold)
    if isinstance(gold, list | tuple | set | frozenset) and not isinstance(answer, list):
        return any(answers_match(answer, allowed) for allowed in gold)
    return _equal(answer, wanted)


def _parsed(value: Any) -> Any:
    """Containers as JSON data, also those written as a string; everything else as it is."""
    if isinstance(value, list | tuple | set | frozenset | Mapping):
        return jsonable(value)
    if isinstance(value, str) and value.lstrip()[:1] in {"[", "{"}:
        try:
            return json.loads(value)
        except (ValueError, RecursionError):
            return value
    return value


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(_equal, a, b))
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_equal(a[key], b[key]) for key in a)
    if isinstance(a, list | dict) or isinstance(b, list | dict) or a is None or b is None:
        return a is b
    first, second = _quantity(a), _quantity(b)
    if first and second:
        return _same_quantity(first, second)
    # A number never equals a text that is not one.
    return not first and not second and _text(a) == _text(b)


def _same_quantity(a: tuple[Fraction, str], b: tuple[Fraction, str]) -> bool:
    (x, x_sign), (y, y_sign) = a, b
    if x_sign and y_sign and x_sign != y_sign:
        return False
    if x.denominator == y.denominator == 1:
        return x == y
    return abs(x - y) <= max(_ABSOLUTE, _RELATIVE * max(abs(x), abs(y)))


def _quantity(value: Any) -> tuple[Fraction, str] | None:
    """A number and its currency or percent sign, or None for what is not a number.

    Fractions, so that whole numbers stay exact; a float counts as the decimal it prints as.
    """
    if isinstance(value, bool):
        return None
    if isinstance(value, int):
        return Fraction(value), ""
    if isinstance(value, numbers.Real | Decimal):
        return (Fraction(str(value)), "") if math.isfinite(value) else None
    return _quantity_in(_text(value)) if isinstance(value, str) else None


def _quantity_in(text: str) -> tuple[Fraction, str] | None:
    match = _NUMBER.fullmatch(text.replace("\u2212", "-")) if len(text) <= _LONGEST_NUMBER else None
    if match is None:
        return None
    signs = {match["before"], match["inner"], match["after"]} - {""}
    if len(signs) > 1:
        return None
    number = match["sign"] + match["digits"].replace(",", "") + (match["exponent"] or "")
    return Fraction(number), signs.pop() if signs else ""


def _text(value: Any) -> str:
    """Lower case, single spaces, without the quotes around it and a final period."""
    text = " ".join(str(value).split()).casefold()
    while len(text) > 1:
        shorter = text.removesuffix(".")
        if len(text) > 2 and _QUOTES.get(text[0]) == text[-1]:
            shorter = text[1:-1]
        if (shorter := shorter.strip()) in {"", text}:
            break
        text = shorter
    return text


__all__ = ["answers_match"]
