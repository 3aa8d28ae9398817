"""`toolbrain tasks generate MODULE:AGENT`."""

from __future__ import annotations

import json
from pathlib import Path

import click

from toolbrain_core.cli import further_options


@click.group()
def tasks() -> None:
    """Make tasks."""


@tasks.command()
@click.argument("agent", metavar="MODULE:AGENT")
@click.option("-n", "count", type=click.IntRange(min=1), default=100, show_default=True)
@click.option(
    "--out",
    required=True,
    type=click.Path(dir_okay=False, path_type=Path),
    help="The tasks (.jsonl). Written whole, or not at all.",
)
@click.option("--seed", type=int, default=0, show_default=True)
@click.option(
    "--examples",
    "examples_file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help='JSON: values for arguments, {"city": ["Paris", …], "tool.parameter": […]}.',
)
@click.option("--exclude", multiple=True, metavar="TOOL", help="Never run this one. Repeatable.")
@further_options("the generator")
@click.option("--json", "as_json", is_flag=True, help="The report as a JSON object.")
def generate(
    agent: str,
    count: int,
    out: Path,
    seed: int,
    examples_file: Path | None,
    exclude: tuple[str, ...],
    options: tuple[str, ...],
    as_json: bool,
) -> None:
    """Make tasks from an agent's tools by running them.

    Exits with 1 where none could be made; fewer than asked for are no error, and the report says
    why.
    """
    from toolbrain_core.brain import Brain
    from toolbrain_core.errors import ConfigurationError, DataError
    from toolbrain_core.inputs import load_target, parse_options
    from toolbrain_core.traces import to_json

    if out.suffix != ".jsonl":
        raise ConfigurationError(f"--out {out}: tasks are written as .jsonl")
    chosen = parse_options(options)
    if examples_file is not None:
        chosen["examples"] = _examples(examples_file)
    if exclude:
        chosen["exclude"] = list(exclude)
    made = Brain(load_target(agent), seed=seed).generate_tasks(count, **chosen)
    if not made:
        raise DataError(f"no task could be made: {json.dumps(made.report['rejected'])}")
    text = "".join(json.dumps(to_json(task), ensure_ascii=False) + "\n" for task in made)
    _write(out, text)
    report = made.report
    if as_json:
        click.echo(json.dumps(report, indent=2, ensure_ascii=False))
        return
    click.echo(f"{report['made']} of {report['asked']} tasks are in {out}")
    for title, key in (
        ("calls per task", "calls_per_task"),
        ("calls of each tool", "calls_of_tool"),
        ("rejected", "rejected"),
        ("tools not used", "tools_not_used"),
    ):
        for name, value in report[key].items():
            click.echo(f"{title}: {name}: {value}")


def _examples(path: Path) -> dict[str, list[object]]:
    from toolbrain_core.errors import DataError
    from toolbrain_core.inputs import read_json

    data = read_json(path)
    if not isinstance(data, dict) or not all(isinstance(v, list) and v for v in data.values()):
        raise DataError(f'{path}: {{"parameter": [values, …]}} is needed')
    return data


def _write(path: Path, text: str) -> None:
    from toolbrain_core.errors import ToolBrainError
    from toolbrain_core.saving import replace_file

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, text)
    except OSError as error:
        raise ToolBrainError(f"cannot write {path}: {error}") from error
