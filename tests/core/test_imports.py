"""The core and the discovery of plugins stay light."""

import subprocess
import sys
from pathlib import Path

import pytest

import toolbrain_core

DISCOVER = Path(__file__).parents[1] / "packaging" / "discover_light.py"
HEAVY = "torch transformers trl peft accelerate datasets smolagents langchain numpy matplotlib"


def python(*arguments):
    """Run a fresh interpreter; its output."""
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_discovering_every_installed_plugin_imports_nothing_heavy():
    found = set(python(str(DISCOVER)).split())
    assert {"toolbrain-core", "toolbrain-grpo", "toolbrain-smolagents"} <= found


def test_importing_the_core_imports_none_of_its_modules_before_they_are_used():
    listed = python(
        "-c",
        "import sys, toolbrain_core; print([m for m in sys.modules if 'toolbrain_core.' in m])",
    )
    assert listed.strip() == "[]"


def test_every_public_name_can_be_imported_without_anything_heavy():
    listed = python(
        "-c", "import sys; from toolbrain_core import *; print(Brain, compare, *sys.modules)"
    )
    assert not set(HEAVY.split()) & set(listed.split())


def test_public_names_are_listed_and_others_are_refused():
    assert set(toolbrain_core.__all__) <= set(dir(toolbrain_core))
    with pytest.raises(AttributeError, match="no attribute 'brian'"):
        toolbrain_core.brian  # noqa: B018
