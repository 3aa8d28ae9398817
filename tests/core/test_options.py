from __future__ import annotations

import attrs
import pytest

from toolbrain_core.errors import ConfigurationError
from toolbrain_core.options import build, change, option_names, refuse_unknown


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


@pytest.mark.parametrize("options", [{"rate": -1.0}, {"rate": "fast"}])
def test_a_value_that_is_refused_is_one_line_that_names_the_option(options):
    for act in (lambda: build(Settings, "grpo", options), lambda: change(Settings(), "x", options)):
        with pytest.raises(ConfigurationError, match=r"refuses its options .*rate") as refused:
            act()
        assert "\n" not in str(refused.value)
        assert "Attribute(" not in str(refused.value)
