"""The loader: what becomes of good and broken plugins, and of the names that they add."""

import json
import logging
import subprocess
import sys
import types
from abc import ABC

import click
import pytest

from toolbrain_core.errors import ConfigurationError, PluginError, ToolBrainError, UnknownName
from toolbrain_core.hookspecs import hookimpl
from toolbrain_core.plugins import PluginManager
from toolbrain_core.registry import Registry

HOOKIMPL = "from toolbrain_core.hookspecs import hookimpl\n"


def adds(kind, name, target="json:dumps"):
    """The source of a plugin that adds one name."""
    return (
        f"{HOOKIMPL}@hookimpl\ndef toolbrain_register_{kind}(registry):\n"
        f"    registry.add({name!r}, {target!r})\n"
    )


@pytest.fixture
def site(tmp_path, monkeypatch):
    """A folder on the import path that distributions are installed into as pip would."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delenv("TOOLBRAIN_BLOCK_PLUGINS", raising=False)
    made = []

    def install(name, source, *, entry="", version="1.0", requires=(), metadata=True):
        module = f"{name.replace('-', '_')}_{tmp_path.name.replace('-', '_')}"
        made.append(module)
        (tmp_path / f"{module}.py").write_text(source)
        info = tmp_path / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        (info / "entry_points.txt").write_text(f"[toolbrain]\n{entry or name} = {module}\n")
        lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}"]
        lines += [f"Requires-Dist: {line}" for line in requires]
        if metadata:
            (info / "METADATA").write_text("\n".join(lines) + "\n")
        return module

    yield install
    for module in made:
        sys.modules.pop(module, None)


def record(manager, name):
    (found,) = [r for r in manager.records if r.name == name]
    return found


def plugin(**hooks):
    """A plugin object; `rewards={"name": "module:attr"}` is short for a register hook."""
    module = types.ModuleType("a_plugin")
    for name, function in hooks.items():
        setattr(module, name, hookimpl(function))
    return module


def adder(kind, names):
    def register(registry):
        for name, target in names.items():
            registry.add(name, target)

    return plugin(**{f"toolbrain_register_{kind}": register})


def test_an_installed_plugin_is_ok_and_its_name_is_found(site):
    site("tb-good", adds("rewards", "good"), version="2.1")
    manager = PluginManager()
    good = record(manager, "tb-good")
    assert (good.status, good.reason) == ("ok", "")
    assert (good.distribution, good.version) == ("tb-good", "2.1")
    assert good.provides == {"rewards": ["good"]}
    assert manager.registries["rewards"].get("good") is json.dumps


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("import no_such_module_anywhere", "No module named 'no_such_module_anywhere'"),
        ("raise RuntimeError('boom at import')", "RuntimeError: boom at import"),
        ("raise SystemExit('gone')", "SystemExit: gone"),
        ("def broken(:", "SyntaxError"),
        ("x = 1", "implements no hook"),
        (
            f"{HOOKIMPL}@hookimpl\ndef toolbrain_register_algoritms(registry): pass\n",
            "toolbrain_register_algoritms",
        ),
        (
            f"{HOOKIMPL}@hookimpl\ndef toolbrain_register_rewards(registery): pass\n",
            "registery",
        ),
        (
            adds("rewards", "half") + "    raise ValueError('changed my mind')\n",
            "ValueError: changed my mind",
        ),
        (adds("rewards", "colonless", "json.dumps"), "'package.module:attribute' is needed"),
        (f"{HOOKIMPL}@hookimpl\ndef toolbrain_unavailable(): return 1\n", "not a reason"),
    ],
)
def test_a_broken_plugin_fails_with_its_reason_and_the_others_work(site, source, reason):
    site("tb-broken", source)
    site("tb-good", adds("rewards", "good"))
    manager = PluginManager()
    broken = record(manager, "tb-broken")
    assert broken.status == "failed"
    assert reason in broken.reason
    assert broken.provides == {}
    assert record(manager, "tb-good").status == "ok"
    assert manager.registries["rewards"].get("good") is json.dumps
    with pytest.raises(UnknownName, match="'tb-broken' failed to load: "):
        manager.registries["rewards"].get("half")


def test_a_distribution_without_metadata_does_not_stop_the_others(site):
    site("tb-bare", "import no_such_module_anywhere", metadata=False)
    site("tb-good", adds("rewards", "good"))
    manager = PluginManager()
    assert record(manager, "tb-bare").status == "failed"
    assert record(manager, "tb-good").status == "ok"


@pytest.mark.parametrize("need", ["toolbrain-core>=99", "ToolBrain_Core<0.0.1; python_version>'3'"])
def test_a_plugin_for_another_core_is_incompatible_and_not_imported(site, need):
    module = site("tb-future", adds("rewards", "future"), requires=[need])
    future = record(PluginManager(), "tb-future")
    assert future.status == "incompatible"
    assert "toolbrain-core 0." in future.reason
    assert module not in sys.modules


@pytest.mark.parametrize(
    "need", ["toolbrain-core>=0.0.1", "toolbrain-core>=99; extra=='later'", "anything>=99"]
)
def test_a_requirement_that_is_met_or_does_not_apply_is_no_obstacle(site, need):
    site("tb-now", adds("rewards", "now"), requires=[need])
    assert record(PluginManager(), "tb-now").status == "ok"


def test_a_requirement_that_cannot_be_read_is_a_failure_of_that_plugin(site):
    site("tb-odd", adds("rewards", "odd"), requires=["toolbrain-core>>>>1"])
    assert record(PluginManager(), "tb-odd").status == "failed"


@pytest.mark.parametrize("word", ["tb_entry", "tb-dist", "TB.Dist"])
def test_a_plugin_is_blocked_by_either_name_and_not_imported(site, monkeypatch, word):
    module = site("tb-dist", adds("rewards", "hidden"), entry="tb-entry")
    monkeypatch.setenv("TOOLBRAIN_BLOCK_PLUGINS", f"other, {word}")
    manager = PluginManager()
    assert record(manager, "tb-entry").status == "blocked"
    assert module not in sys.modules
    with pytest.raises(UnknownName, match="'tb-dist' is blocked: by TOOLBRAIN_BLOCK_PLUGINS"):
        manager.registries["rewards"].get("hidden")


def test_two_distributions_with_one_plugin_name_both_fail_and_are_named(site, monkeypatch):
    modules = [
        site("tb-one", adds("rewards", "one"), entry="same"),
        site("tb-two", adds("rewards", "two"), entry="same"),
    ]
    records = [r for r in PluginManager().records if r.name == "same"]
    assert [r.status for r in records] == ["failed", "failed"]
    assert all("tb-one 1.0 and tb-two 1.0" in r.reason for r in records)
    assert not set(modules) & set(sys.modules)

    monkeypatch.setenv("TOOLBRAIN_BLOCK_PLUGINS", "tb-two")
    manager = PluginManager()
    assert manager.registries["rewards"].get("one") is json.dumps


def test_a_plugin_that_cannot_work_here_keeps_its_names_and_refuses_them(site, caplog):
    site(
        "tb-gpu",
        adds("loaders", "four-bit")
        + "@hookimpl\ndef toolbrain_unavailable(): return 'needs a CUDA GPU'\n"
        + "@hookimpl\ndef toolbrain_run_started(run): raise RuntimeError('called')\n",
    )
    manager = PluginManager()
    gpu = record(manager, "tb-gpu")
    assert (gpu.status, gpu.reason) == ("unavailable", "needs a CUDA GPU")
    assert gpu.provides == {"loaders": ["four-bit"]}
    loaders = manager.registries["loaders"]
    with pytest.raises(ConfigurationError, match=r"'four-bit' of tb-gpu 1\.0 .*needs a CUDA GPU"):
        loaders.get("Four_Bit")
    assert "four-bit" not in loaders.names()
    manager.notify("toolbrain_run_started", run=None)
    assert not caplog.records


def test_a_name_that_two_plugins_add_is_refused_and_both_are_named(site):
    site("tb-one", adds("rewards", "same"))
    site("tb-two", adds("rewards", "SAME") + "    registry.add('second', 'json:loads')\n")
    manager = PluginManager()
    assert record(manager, "tb-one").status == "ok"
    assert "tb-one 1.0 and tb-two 1.0" in record(manager, "tb-two").reason
    with pytest.raises(PluginError, match=r"tb-one 1\.0 and tb-two 1\.0.*BLOCK_PLUGINS=tb-two"):
        manager.registries["rewards"].get("same")
    with pytest.raises(UnknownName):
        manager.registries["rewards"].get("second")


def test_names_ignore_case_and_take_hyphens_for_underscores():
    manager = PluginManager.with_plugins(adder("rewards", {"my_own-Reward": "json:loads"}))
    assert manager.registries["rewards"].get(" My-Own_reward ") is json.loads


def test_an_alias_finds_the_target_and_is_not_listed():
    registry = Registry("algorithm")
    registry.add("sft", "json:dumps", aliases=("supervised",))
    assert registry.get("Supervised") is json.dumps
    assert registry.names() == ["sft"]
    with pytest.raises(PluginError, match="'supervised'"):
        registry.add("supervised", "json:loads")


def test_an_unknown_name_says_what_was_meant_and_what_is_there():
    manager = PluginManager.with_plugins(
        adder("algorithms", {"grpo": "json:loads", "sft": "json:dumps"})
    )
    with pytest.raises(UnknownName) as caught:
        manager.registries["algorithms"].get("grop")
    assert str(caught.value) == (
        "no algorithm named 'grop' (did you mean 'grpo'?); "
        "installed: grpo (a_plugin), sft (a_plugin)"
    )


def test_where_nothing_is_installed_the_error_says_what_to_install():
    with pytest.raises(UnknownName, match="pip install toolbrain-grpo toolbrain-sft"):
        PluginManager.with_plugins().registries["algorithms"].get("grpo")


@pytest.mark.parametrize("target", ["no_such_module_anywhere:x", "json:no_such_function"])
def test_a_target_that_cannot_be_imported_names_itself_and_its_plugin(site, target):
    site("tb-hollow", adds("rewards", "hollow", target))
    manager = PluginManager()
    assert record(manager, "tb-hollow").status == "ok"
    with pytest.raises(ToolBrainError, match=r"'hollow' of tb-hollow 1\.0") as caught:
        manager.registries["rewards"].get("hollow")
    assert isinstance(caught.value.__cause__, ImportError | AttributeError)


def test_a_target_is_imported_only_when_its_name_is_used(site, tmp_path):
    (tmp_path / "heavy_target.py").write_text("thing = object()\n")
    site("tb-lazy", adds("rewards", "lazy", "heavy_target:thing"))
    manager = PluginManager()
    assert "heavy_target" not in sys.modules
    try:
        assert manager.registries["rewards"].get("lazy") is sys.modules["heavy_target"].thing
    finally:
        del sys.modules["heavy_target"]


def test_given_plugins_are_loaded_without_looking_for_installed_ones(site):
    site("tb-good", adds("rewards", "good"))
    manager = PluginManager.with_plugins(adder("rewards", {"mine": "json:loads"}))
    assert [r.name for r in manager.records] == ["core", "a_plugin"]
    assert "good" not in manager.registries["rewards"]


def test_the_core_registers_its_own_rewards():
    rewards = PluginManager.with_plugins().registries["rewards"]
    assert rewards.names() == ["exact-match", "step-efficiency", "tool-execution-success"]
    assert all(callable(rewards.get(name)) for name in rewards.names())


def test_a_removed_plugin_takes_its_names_along():
    extra = adder("rewards", {"mine": "json:loads"})
    manager = PluginManager.with_plugins(extra)
    manager.remove(extra)
    assert "mine" not in manager.registries["rewards"]
    assert [r.name for r in manager.records] == ["core"]


class Framework:
    """An agent framework's base class."""


class Special(Framework):
    """What a second framework builds on it."""


class Users(Special):
    """The user's own agent."""


def matcher(name, cls):
    return plugin(
        toolbrain_match_agent=lambda agent: (name, cls) if isinstance(agent, cls) else None
    )


@pytest.mark.parametrize("order", [1, -1])
def test_the_adapter_of_the_most_specific_class_wins(order):
    plugins = [matcher("base", Framework), matcher("special", Special)][::order]
    manager = PluginManager.with_plugins(*plugins)
    assert manager.match_agent(Users()) == "special"
    assert manager.match_agent(Framework()) == "base"
    assert manager.match_agent(object()) is None


def test_a_real_base_class_comes_before_a_virtual_one():
    class Virtual(ABC):  # noqa: B024
        pass

    Virtual.register(Framework)
    manager = PluginManager.with_plugins(matcher("virtual", Virtual), matcher("base", Framework))
    assert manager.match_agent(Users()) == "base"


def test_two_adapters_for_one_class_are_an_error_that_names_both():
    one, two = matcher("first", Special), matcher("second", Special)
    manager = PluginManager.with_plugins(one, two)
    with pytest.raises(PluginError, match=r"'first' \(a_plugin\) and 'second' \(a_plugin#2\)"):
        manager.match_agent(Users())


def test_a_matcher_that_breaks_is_logged_and_the_others_are_asked(caplog):
    def broken(agent):
        raise RuntimeError("not my agent")

    manager = PluginManager.with_plugins(
        plugin(toolbrain_match_agent=broken), matcher("base", Framework)
    )
    assert manager.match_agent(Users()) == "base"
    assert "not my agent" in caplog.text


def test_a_matcher_with_a_wrong_answer_is_named():
    manager = PluginManager.with_plugins(plugin(toolbrain_match_agent=lambda agent: "base"))
    with pytest.raises(PluginError, match="a_plugin: toolbrain_match_agent returned 'base'"):
        manager.match_agent(Users())


def test_an_agent_that_nothing_runs_is_told_what_to_install():
    agent = type("CodeAgent", (), {"__module__": "smolagents.agents"})()
    error = PluginManager.with_plugins().unmatched(agent)
    assert "smolagents.agents.CodeAgent: pip install toolbrain-smolagents" in str(error)


@pytest.mark.parametrize("kind", [RuntimeError, SystemExit])
def test_an_observer_that_raises_is_logged_and_the_others_still_hear(caplog, kind):
    heard = []

    def broken(run):
        raise kind("observer broke")

    manager = PluginManager.with_plugins(
        plugin(toolbrain_run_started=broken),
        plugin(toolbrain_run_started=lambda run: heard.append(run)),
    )
    manager.notify("toolbrain_run_started", run="a run")
    assert heard == ["a run"]
    assert "observer broke" in caplog.text


def test_an_interrupt_inside_an_observer_passes():
    def interrupted(run):
        raise KeyboardInterrupt

    manager = PluginManager.with_plugins(plugin(toolbrain_run_started=interrupted))
    with pytest.raises(KeyboardInterrupt):
        manager.notify("toolbrain_run_started", run=None)


def test_the_first_plugin_that_knows_a_chat_model_answers():
    model = object()
    manager = PluginManager.with_plugins(
        plugin(toolbrain_match_chat_model=lambda obj: None),
        plugin(toolbrain_match_chat_model=lambda obj: model if obj == "endpoint" else None),
    )
    assert manager.match_chat_model("endpoint") is model
    assert manager.match_chat_model("other") is None


def test_commands_of_a_failing_plugin_are_left_out_and_none_replaces_another(caplog):
    def half(cli):
        cli.add_command(click.Command("half"))
        raise RuntimeError("no commands today")

    def works(cli):
        cli.add_command(click.Command("works"))
        cli.add_command(click.Command("train"))

    cli = click.Group(commands={"train": (own := click.Command("train"))})
    manager = PluginManager.with_plugins(
        plugin(toolbrain_register_commands=half), plugin(toolbrain_register_commands=works)
    )
    with caplog.at_level(logging.ERROR):
        manager.commands(cli)
    assert set(cli.commands) == {"train", "works"}
    assert cli.commands["train"] is own
    assert "no commands today" in caplog.text
    assert "'train' exists already" in caplog.text


def test_a_broken_plugin_is_listed_by_the_command_with_its_reason(site, tmp_path):
    site("tb-broken", "raise RuntimeError('deliberately broken')")
    site("tb-good", adds("rewards", "good"))
    listed = subprocess.run(
        [sys.executable, "-m", "toolbrain_core.cli", "plugins", "list", "--json"],
        env={"PYTHONPATH": str(tmp_path), "PATH": ""},
        capture_output=True,
        text=True,
        check=True,
    )
    rows = {row["name"]: row for row in json.loads(listed.stdout)}
    assert rows["tb-broken"]["status"] == "failed"
    assert rows["tb-broken"]["reason"] == "RuntimeError: deliberately broken"
    assert rows["tb-good"]["status"] == "ok"
    assert rows["tb-good"]["provides"] == {"rewards": ["good"]}
    assert set(rows["core"]) == {
        "name",
        "distribution",
        "version",
        "status",
        "reason",
        "provides",
    }
