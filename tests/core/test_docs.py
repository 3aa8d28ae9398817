"""The documentation names everything that can be set, called or implemented, and nothing else."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from attrs import fields

from toolbrain_core import Brain, hookspecs
from toolbrain_core.cli import cli
from toolbrain_core.options import option_names

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(
    path
    for path in [*ROOT.glob("*.md"), *DOCS.rglob("*.md"), *ROOT.glob("plugins/*/*.md")]
    if path.is_file()
)
OPTIONS = (DOCS / "reference" / "options.md").read_text(encoding="utf-8")

#: Pages whose Python blocks run as they stand, one after the other.
RUNNABLE = ("guides/rewards.md", "guides/data.md")


def section(heading: str) -> str:
    """The text below a second-level heading of the options' page."""
    return OPTIONS.split(f"\n## {heading}\n")[1].split("\n## ")[0]


def rows(heading: str) -> set[str]:
    """The options that the table below a heading has a row for."""
    return set(re.findall(r"^\| `(\w+)` \|", section(heading), flags=re.MULTILINE))


def parameters(function: object) -> set[str]:
    """The named parameters, without `self`."""
    return {
        name
        for name, parameter in inspect.signature(function).parameters.items()  # type: ignore[arg-type]
        if name != "self" and parameter.kind is not parameter.VAR_KEYWORD
    }


@pytest.mark.parametrize(
    ("heading", "function"),
    [
        ("Brain", Brain.__init__),
        ("Brain.train", Brain.train),
        ("Brain.evaluate", Brain.evaluate),
    ],
)
def test_every_parameter_of_brain_has_a_row_and_every_row_a_parameter(
    heading: str, function: object
) -> None:
    assert rows(heading) == parameters(function)


def test_every_option_of_the_policy_has_a_row_and_every_row_an_option() -> None:
    policy = pytest.importorskip("toolbrain_transformers.policy").TransformersPolicy
    assert rows("Policy") == set(option_names(policy))


def test_every_option_of_the_task_generator_has_a_row_and_every_row_an_option() -> None:
    generator = pytest.importorskip("toolbrain_taskgen.generator").PlanGenerator
    assert rows("Brain.generate_tasks") == set(option_names(generator))


@pytest.mark.parametrize(
    ("heading", "module", "name"),
    [("GRPO", "toolbrain_grpo.algorithm", "Grpo"), ("SFT", "toolbrain_sft.algorithm", "Sft")],
)
def test_every_option_of_the_algorithms_has_a_row_and_every_row_an_option(
    heading: str, module: str, name: str
) -> None:
    algorithm = getattr(pytest.importorskip(module), name)
    assert rows(heading) | rows("Both algorithms") == set(option_names(algorithm))
    assert not rows(heading) & rows("Both algorithms")


@pytest.mark.parametrize(
    ("module", "name"), [("toolbrain_grpo.algorithm", "Grpo"), ("toolbrain_sft.algorithm", "Sft")]
)
def test_the_default_of_every_number_is_the_one_in_the_table(module: str, name: str) -> None:
    algorithm = getattr(pytest.importorskip(module), name)
    documented = dict(re.findall(r"^\| `(\w+)` \| ([-\d.e]+) \|", OPTIONS, flags=re.MULTILINE))
    numbers = {
        field.name: field.default
        for field in fields(algorithm)
        if isinstance(field.default, int | float) and not isinstance(field.default, bool)
    }
    assert numbers
    assert {name: float(documented[name]) for name in numbers} == numbers


def hook_names() -> list[str]:
    return [name for name in vars(hookspecs) if name.startswith("toolbrain_")]


def test_every_hook_has_a_heading_and_every_heading_a_hook() -> None:
    guide = (DOCS / "plugins.md").read_text(encoding="utf-8")
    headings = re.findall(r"^### (toolbrain_\w+)$", guide, flags=re.MULTILINE)
    assert sorted(headings) == sorted(hook_names())
    assert len(headings) > 10


def test_every_command_and_flag_of_the_core_is_in_the_guide() -> None:
    guide = (DOCS / "guides" / "cli.md").read_text(encoding="utf-8")
    for command in ("train", "evaluate"):
        text = guide.split(f"\n## toolbrain {command}\n")[1].split("\n## ")[0]
        flags = {flag for p in cli.commands[command].params for flag in p.opts if flag[0] == "-"}
        assert len(flags) > 5
        assert not {flag for flag in flags if f"`{flag}`" not in text}
    own = {name for name, c in cli.commands.items() if _module(c).startswith("toolbrain_core.")}
    assert own == {"train", "evaluate", "plugins"}  # plugins add theirs to the same group


def _module(command: click.Command) -> str:
    found = command.callback
    return getattr(inspect.unwrap(found), "__module__", "") if found else ""


def blocks(path: Path) -> Iterator[tuple[int, str]]:
    """The Python blocks of a page, each with the line that it begins at."""
    text = path.read_text(encoding="utf-8")
    for match in re.finditer(r"^```python\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL):
        yield text[: match.start()].count("\n") + 2, match[1]


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_python_block_is_python_and_every_link_leads_to_a_file(page: Path) -> None:
    for line, code in blocks(page):
        compile(code, f"{page.name}:{line}", "exec")
    for target in re.findall(r"\]\(([^)#]+)", page.read_text(encoding="utf-8")):
        if not target.startswith("http"):
            assert (page.parent / target).exists(), f"{page}: {target}"


@pytest.mark.parametrize("page", RUNNABLE)
def test_the_blocks_of_a_page_run_one_after_the_other(page: str) -> None:
    namespace: dict[str, object] = {}
    found = list(blocks(DOCS / page))
    assert found
    for _, code in found:
        exec(code, namespace)


def test_the_plugin_that_the_guide_tests_loads() -> None:
    [code] = [code for _, code in blocks(DOCS / "plugins.md") if "with_plugins" in code]
    exec(code, {})


def test_the_package_that_the_guide_shows_is_the_one_in_contrib() -> None:
    guide = (DOCS / "plugins.md").read_text(encoding="utf-8")
    package = ROOT / "contrib" / "toolbrain-hello"
    project = (package / "pyproject.toml").read_text(encoding="utf-8")
    for line in re.search(r"```toml\n(.*?)```", guide, flags=re.DOTALL)[1].splitlines():  # type: ignore[index]
        assert line in project
    source = package / "src" / "toolbrain_hello"
    assert 'registry.add("hello", "toolbrain_hello.rewards:reward_hello")' in (
        source / "plugin.py"
    ).read_text(encoding="utf-8")
    returned = 'return float("hello" in str(trace.final_answer or "").lower())'
    assert returned in guide
    assert returned in (source / "rewards.py").read_text(encoding="utf-8")
