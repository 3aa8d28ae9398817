from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import attrs
import pytest

from toolbrain_core.errors import ConfigurationError
from toolbrain_core.options import build, change, check_types, option_names, refuse_unknown


@attrs.frozen(kw_only=True)
class Settings:
    rate: float = attrs.field(default=1.0, validator=attrs.validators.gt(0))
    steps: int = 3
    made: int = attrs.field(default=0, init=False)


class Plain:
    def __init__(self, ref, *, size=1, dtype="auto"):
        self.size = size


def test_the_options_of_an_attrs_class_are_the_fields_that_can_be_given():
    assert option_names(Settings) == ("rate", "steps")


def test_the_options_of_another_class_or_function_are_its_keywords():
    assert option_names(Plain) == ("size", "dtype")
    assert option_names(lambda ref, **rest: None) == ()


def test_known_options_of_any_owner_are_accepted():
    refuse_unknown(["rate", "size"], {"a": ["rate"], "b": ["size"]}, "Brain")


def test_an_unknown_option_is_named_with_a_guess_and_with_what_each_owner_takes():
    with pytest.raises(ConfigurationError) as refused:
        refuse_unknown(["raet"], {"grpo": ["rate", "steps"], "the policy": ["lora"]}, "Brain")
    assert str(refused.value) == (
        "Brain has no option 'raet' (did you mean 'rate'?). "
        "Valid: grpo: rate, steps; the policy: lora"
    )


def test_there_is_no_guess_where_nothing_is_near():
    with pytest.raises(ConfigurationError) as refused:
        refuse_unknown(["zzz"], {"grpo": ["rate"]}, "Brain")
    assert "did you mean" not in str(refused.value)


def test_build_and_change_make_instances():
    made = build(Settings, "grpo", {"rate": 2.0})
    assert made == Settings(rate=2.0)
    assert change(made, "grpo", {"steps": 4}) == Settings(rate=2.0, steps=4)
    assert made.steps == 3


def takes(
    *,
    count: int = 1,
    rate: float = 1.0,
    flag: bool = True,
    dtype: Literal["auto", "fp32"] = "auto",
    limit: float | None = None,
    folder: str | Path = "runs",
    names: str | tuple[str, ...] = (),
    lora: Mapping[str, Any] | None = None,
    setup: Callable[[str], Any] | None = None,
    anything: Any = None,
) -> None:
    """Options of every kind that there is."""


@pytest.mark.parametrize(
    "options",
    [
        {"count": 3, "rate": 2, "flag": False, "dtype": "fp32", "limit": 0.5},
        {"limit": None, "folder": Path("x"), "names": ["a", "b"], "lora": {"r": 8}},
        {"setup": print, "anything": object(), "unknown": 1},
    ],
)
def test_values_of_the_types_that_are_said_are_accepted(options):
    check_types(options, takes, "Brain")


@pytest.mark.parametrize(
    ("option", "value", "needed"),
    [
        ("count", "3", "a whole number"),
        ("count", 2.5, "a whole number"),
        ("count", True, "a whole number"),
        ("rate", "high", "a number"),
        ("flag", "False", "true or false"),
        ("flag", 0, "true or false"),
        ("dtype", "fp8", "'auto' or 'fp32'"),
        ("limit", "x", "a number or None"),
        ("folder", 5, "a string or a Path"),
        ("names", 5, "a string or a list"),
        ("lora", True, "a Mapping or None"),
        ("setup", "f", "something to call or None"),
    ],
)
def test_a_value_of_another_type_is_refused_with_what_is_needed(option, value, needed):
    with pytest.raises(ConfigurationError) as refused:
        check_types({option: value}, takes, "Brain")
    assert str(refused.value) == f"Brain refuses {option}={value!r}: {needed} is needed"


def test_an_option_of_the_wrong_type_never_reaches_an_algorithm():
    for act in (lambda o: build(Settings, "grpo", o), lambda o: change(Settings(), "grpo", o)):
        with pytest.raises(ConfigurationError, match=r"grpo refuses steps=2\.5: a whole"):
            act({"steps": 2.5})
        with pytest.raises(ConfigurationError, match="grpo refuses rate='fast': a number is"):
            act({"rate": "fast"})


@pytest.mark.parametrize("options", [{"rate": -1.0}, {"rate": 0}])
def test_a_value_that_is_refused_is_one_line_that_names_the_option(options):
    for act in (lambda: build(Settings, "grpo", options), lambda: change(Settings(), "x", options)):
        with pytest.raises(ConfigurationError, match=r"refuses its options .*rate") as refused:
            act()
        assert "\n" not in str(refused.value)
        assert "Attribute(" not in str(refused.value)
