"""The plugin as toolbrain sees it, whatever else is installed."""

from toolbrain_template import plugin

from toolbrain_core import PluginManager, Trace


def test_the_plugin_loads_and_its_reward_works():
    manager = PluginManager.with_plugins(plugin)
    assert [record.status for record in manager.records] == ["ok", "ok"], manager.records
    reward = manager.registries["rewards"].get("template")
    assert reward(Trace(final_answer=12), gold_answer="12") == 1.0
    assert reward(Trace(), gold_answer="12") == 0.0
