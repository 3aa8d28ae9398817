"""The command line: its errors, its exit codes, and what users point it at."""

import json
import os
import signal
import subprocess
import sys

import pytest

from toolbrain_core.cli import main
from toolbrain_core.errors import ConfigurationError, DataError
from toolbrain_core.inputs import load_target, parse_options, read_tasks

PLUGIN = """
import threading, time
import click
from toolbrain_core.errors import DataError
from toolbrain_core.hookspecs import hookimpl

@hookimpl
def toolbrain_register_commands(cli):
    @cli.command()
    def asleep():
        threading.Thread(target=time.sleep, args=(60,)).start()
        print("ready", flush=True)
        time.sleep(60)

    @cli.command()
    def expected():
        raise DataError("no tasks in here")

    @cli.command()
    def unexpected():
        raise LookupError("a bug")
"""


@pytest.fixture
def environment(tmp_path):
    """An environment in which a plugin with three commands is installed."""
    (tmp_path / "tb_commands.py").write_text(PLUGIN)
    info = tmp_path / "tb_commands-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: tb-commands\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[toolbrain]\ncommands = tb_commands\n")
    return {**os.environ, "PYTHONPATH": str(tmp_path)}


def toolbrain(environment, *arguments):
    return subprocess.run(
        [sys.executable, "-m", "toolbrain_core.cli", *arguments],
        env=environment,
        capture_output=True,
        text=True,
    )


def test_an_expected_error_is_one_message_and_exit_code_1(environment):
    done = toolbrain(environment, "expected")
    assert (done.returncode, done.stderr) == (1, "Error: no tasks in here\n")


def test_an_unexpected_error_names_its_type_and_how_to_see_more(environment):
    done = toolbrain(environment, "unexpected")
    assert done.returncode == 1
    assert len(done.stderr.splitlines()) == 1
    assert "LookupError: a bug" in done.stderr
    assert "--traceback" in done.stderr


@pytest.mark.parametrize("command", ["expected", "unexpected"])
def test_the_traceback_is_shown_when_asked(environment, command):
    done = toolbrain(environment, "--traceback", command)
    assert done.returncode == 1
    assert "Traceback (most recent call last)" in done.stderr
    assert "tb_commands.py" in done.stderr


def test_an_interrupt_exits_with_130_though_a_thread_is_asleep(environment):
    command = [sys.executable, "-m", "toolbrain_core.cli", "asleep"]
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=10) == 130
        assert process.stderr.read().strip() == "Interrupted."


def test_commands_of_plugins_are_in_the_help(environment):
    assert "asleep" in toolbrain(environment, "--help").stdout


def test_the_version_is_printed(capsys):
    with pytest.raises(SystemExit) as left:
        main(["--version"])
    assert left.value.code == 0
    assert capsys.readouterr().out.startswith("toolbrain, version 0.")


@pytest.mark.parametrize("command", ["no-such-command", "train"])
def test_wrong_usage_exits_with_2(capsys, command):
    with pytest.raises(SystemExit) as left:
        main([command])
    assert left.value.code == 2
    assert "Usage: toolbrain" in capsys.readouterr().err


def test_the_table_of_plugins_shows_names_and_status(environment):
    done = toolbrain({**environment, "COLUMNS": "160"}, "plugins", "list")
    assert done.returncode == 0
    assert "tb-commands 1.0" in done.stdout
    assert "exact-match" in done.stdout


def test_option_values_are_json_where_they_parse_and_else_strings():
    options = parse_options(["learning-rate=2e-4", "loss_type=dapo", 'trl={"a": 1}', "lora=null"])
    assert options == {"learning_rate": 2e-4, "loss_type": "dapo", "trl": {"a": 1}, "lora": None}
    assert parse_options(["note=a=b"]) == {"note": "a=b"}


@pytest.mark.parametrize(
    ("pairs", "message"),
    [
        (["novalue"], "key=value is needed"),
        (["=3"], "key=value is needed"),
        (["a=1", "a=2"], "given twice"),
        (["seed=3"], "use --seed"),
        (["run-dir=x"], "use --run-dir"),
    ],
)
def test_an_option_that_cannot_be_used_is_named(pairs, message):
    with pytest.raises(ConfigurationError, match=message):
        parse_options(pairs)


def test_tasks_are_read_from_json_lines_and_from_a_json_list(tmp_path):
    tasks = [{"query": "one\u2028line"}, {"query": "two", "gold_answer": 2}]
    lines, whole = tmp_path / "tasks.jsonl", tmp_path / "tasks.json"
    lines.write_text("\n\n".join(json.dumps(t, ensure_ascii=False) for t in tasks), "utf-8")
    whole.write_text(json.dumps(tasks), "utf-8")
    assert read_tasks(lines) == read_tasks(whole) == tasks


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("t.jsonl", '{"query": "a"}\n{"query": ', "t.jsonl: its last line is not JSON"),
        ("t.jsonl", '{"query": \n{"query": "a"}\n', "t.jsonl:1: not JSON"),
        ("t.json", '[{"query": "a"},\n]', "t.json:2: not JSON"),
        ("t.json", '{"query": "a"}', "a list of tasks is needed, not dict"),
        ("t.csv", "query\na\n", "read from .jsonl, or from .json"),
    ],
)
def test_a_file_of_tasks_that_cannot_be_read_is_named(tmp_path, name, text, message):
    (tmp_path / name).write_text(text)
    with pytest.raises(DataError, match=message):
        read_tasks(tmp_path / name)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The current folder, whose modules are forgotten afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        del sys.modules[name]


def test_a_target_is_found_in_a_module_of_the_current_folder(folder):
    (folder / "my_agents.py").write_text("class Box:\n    agent = 'inner'\nagent = 'outer'\n")
    assert load_target("my_agents:agent") == "outer"
    assert load_target("my_agents:Box.agent") == "inner"


def test_a_target_in_a_file_may_import_what_lies_beside_it(folder):
    place = folder / "deep"
    place.mkdir()
    (place / "beside.py").write_text("agent = object()\n")
    (place / "entry.py").write_text("from beside import agent\nreward = lambda trace: 1.0\n")
    agent = load_target("deep/entry.py:agent")
    assert agent is load_target(f"{place}/entry.py:agent")
    assert callable(load_target("deep/entry.py:reward"))


def test_a_file_that_is_called_as_a_known_module_does_not_hide_it(folder):
    (folder / "json.py").write_text("agent = 'mine'\n")
    assert load_target("json.py:agent") == "mine"
    assert json.loads("1") == 1
    assert sys.modules["json"] is json


@pytest.mark.parametrize(
    ("where", "message"),
    [
        ("agent", "write module:attribute or file.py:attribute"),
        ("no_such_module_anywhere:agent", "No module named 'no_such_module_anywhere'"),
        ("missing.py:agent", "there is no file .*missing.py"),
        ("breaks.py:agent", "importing breaks.py raised ZeroDivisionError"),
        ("fine.py:agnet", "fine.py has no 'agnet'; it has: agent"),
    ],
)
def test_a_target_that_cannot_be_found_is_explained(folder, where, message):
    (folder / "breaks.py").write_text("1 / 0\n")
    (folder / "fine.py").write_text("agent = 1\n")
    with pytest.raises(ConfigurationError, match=message):
        load_target(where)
