"""The command `toolbrain`. Everything that costs time is imported inside the commands."""

from __future__ import annotations

import functools
import json
import logging
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click
from attrs import asdict, define

from .errors import ToolBrainError
from .inputs import load_target, parse_options, read_tasks
from .saving import check_replaceable

if TYPE_CHECKING:
    from .plugins import PluginRecord

#: `toolbrain train` ran to its end, but no group of attempts had any signal to learn from.
EXIT_NOTHING_LEARNED = 3
EXIT_INTERRUPTED = 130


@define
class _Session:
    """What the command line said before the subcommand."""

    traceback: bool = False


class _PluginGroup(click.Group):
    """A group that asks plugins for their commands only where its own do not answer."""

    @functools.cached_property
    def _extended(self) -> bool:
        from .plugins import default_manager

        default_manager().commands(self)
        return True

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self.commands:
            _ = self._extended
        return super().get_command(ctx, cmd_name)

    def list_commands(self, ctx: click.Context) -> list[str]:
        _ = self._extended
        return super().list_commands(ctx)


@click.group(cls=_PluginGroup)
@click.version_option(package_name="toolbrain-core", prog_name="toolbrain")
@click.option("--traceback", is_flag=True, help="Show where an error came from.")
@click.pass_obj
def cli(session: _Session | None, traceback: bool) -> None:
    """Train the agent you already have to use its tools."""
    if session is not None:
        session.traceback = traceback


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """The console script. Exit codes: 0, 1 (an error), 2 (usage), 3 (nothing learned), 130."""
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s: %(message)s")
    session = _Session()
    try:
        code = cli.main(arguments, prog_name="toolbrain", standalone_mode=False, obj=session)
    except (click.Abort, KeyboardInterrupt):  # click makes one of the other
        _leave_at_once(EXIT_INTERRUPTED)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except Exception as error:  # the outermost boundary: a person reads what went wrong
        if session.traceback:
            sys.excepthook(type(error), error, error.__traceback__)
        else:
            click.echo(f"Error: {_in_words(error)}", err=True)
        sys.exit(1)
    sys.exit(code if isinstance(code, int) else 0)


def _in_words(error: Exception) -> str:
    if isinstance(error, ToolBrainError):
        return str(error)
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text} (run again with toolbrain --traceback to see where)"


def _leave_at_once(code: int) -> NoReturn:
    """Exit without joining threads: one may be asleep in a user's tool."""
    click.echo("Interrupted.", err=True)
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


@cli.group()
def plugins() -> None:
    """What is installed."""


@plugins.command("list")
@click.option("--json", "as_json", is_flag=True, help="A JSON list, for programs.")
def list_plugins(as_json: bool) -> None:
    """List the plugins, and why one cannot be used."""
    from .plugins import default_manager

    records = default_manager().records
    if as_json:
        click.echo(json.dumps([asdict(record) for record in records], indent=2))
    else:
        _print_table(records)


def _print_table(records: Sequence[PluginRecord]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table()
    for heading in ("plugin", "distribution", "status", "provides, or why not"):
        table.add_column(heading, overflow="fold")
    for record in records:
        provides = "; ".join(f"{kind}: {', '.join(n)}" for kind, n in record.provides.items())
        row = (
            record.name,
            f"{record.distribution} {record.version}".strip(),
            record.status,
            "\n".join(filter(None, [record.reason, provides])),
        )
        table.add_row(*map(Text, row))  # Text: a reason may hold brackets, which are not markup
    Console().print(table)


def _shared_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """What `train` and `evaluate` both ask."""
    for decorate in (
        click.option("--seed", type=int, default=0, show_default=True),
        click.option("--run-dir", default="runs", show_default=True, help="Where runs are kept."),
        click.option("--reward", help="A reward's name, or module:function."),
        click.option(
            "--tasks",
            "tasks_file",
            required=True,
            type=click.Path(exists=True, dir_okay=False, path_type=Path),
            help="Tasks: .jsonl, or .json with a list.",
        ),
        click.argument("agent", metavar="MODULE:AGENT"),
    ):
        command = decorate(command)
    return command


def further_options(of: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """`-o KEY=VALUE` (the parameter `options`, for `parse_options`): options of what `of` says."""
    return click.option(
        "-o",
        "--option",
        "options",
        multiple=True,
        metavar="KEY=VALUE",
        help=f"An option of {of}; the value is JSON, or else a string. Repeatable.",
    )


@cli.command()
@_shared_options
@click.option("--algorithm", default="grpo", show_default=True)
@click.option("--run-name", help="The run's folder; a time stamp by default.")
@click.option("--resume", is_flag=True, help="Go on from the run's last checkpoint.")
@further_options("the algorithm")
@click.option("--save", type=click.Path(file_okay=False, path_type=Path), help="Keep the result.")
@click.pass_context
def train(
    ctx: click.Context,
    agent: str,
    tasks_file: Path,
    reward: str | None,
    run_dir: str,
    seed: int,
    algorithm: str,
    run_name: str | None,
    resume: bool,
    options: tuple[str, ...],
    save: Path | None,
) -> None:
    """Train an agent. MODULE:AGENT (or FILE.py:AGENT) is an agent, or what builds one.

    Exits with 3 where no group of attempts had any signal to learn from.
    """
    chosen = parse_options(options)
    if save is not None:
        check_replaceable(save)  # now, not after hours of training
    data = read_tasks(tasks_file)
    target, reward_func = load_target(agent), _reward(reward)

    from .brain import Brain

    brain = Brain(
        target,
        algorithm=algorithm,
        reward_func=reward_func,
        run_dir=run_dir,
        seed=seed,
        **chosen,
    )
    result = brain.train(data, name=run_name, resume=resume)
    click.echo(
        f"{result.algorithm}: {result.updates} updates in {result.steps} steps, "
        f"{result.seconds:.0f} s; see {result.run_dir}"
    )
    if result.updates == 0:
        reason = result.no_signal or "no update of the weights was made"
        if not any(reason in warning for warning in result.warnings):  # else the log has it
            click.echo(f"Nothing was learned: {reason}", err=True)
        if save is not None:
            click.echo(f"{save} was not written", err=True)
        ctx.exit(EXIT_NOTHING_LEARNED)
    if save is not None:
        brain.save(save)
        click.echo(f"saved: {save}")


@cli.command()
@_shared_options
@click.option("--attempts", type=click.IntRange(min=1), default=1, show_default=True)
@click.option(
    "--adapter",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="A folder that `train --save` wrote.",
)
@click.option("--json", "as_json", is_flag=True, help="A JSON object, for programs.")
def evaluate(
    agent: str,
    tasks_file: Path,
    reward: str | None,
    run_dir: str,
    seed: int,
    attempts: int,
    adapter: Path | None,
    as_json: bool,
) -> None:
    """Measure an agent on tasks. MODULE:AGENT (or FILE.py:AGENT) as in `train`."""
    data = read_tasks(tasks_file)
    target, reward_func = load_target(agent), _reward(reward)

    from .brain import Brain

    settings: dict[str, Any] = {"reward_func": reward_func, "run_dir": run_dir, "seed": seed}
    brain = (
        Brain(target, **settings) if adapter is None else Brain.load(adapter, target, **settings)
    )
    evaluation = brain.evaluate(data, attempts=attempts)
    if as_json:
        click.echo(json.dumps(evaluation.as_dict(), indent=2))
    else:
        click.echo("\n".join(evaluation.lines()))


def _reward(name: str | None) -> Any:
    """A reward's name stays a name: `Brain` knows them all."""
    return load_target(name) if name and ":" in name else name


if __name__ == "__main__":
    main()
