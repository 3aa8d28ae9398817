"""The plugin as toolbrain sees it."""

import pytest
from toolbrain_hello import plugin

from toolbrain_core import PluginManager, Trace


@pytest.mark.parametrize(
    ("answer", "score"), [("Hello, Ada!", 1.0), ("Good bye", 0.0), (None, 0.0), (12, 0.0)]
)
def test_the_reward_is_found_by_name_and_pays_for_a_greeting(answer, score):
    manager = PluginManager.with_plugins(plugin)
    reward = manager.registries["rewards"].get("hello")
    assert reward(Trace(final_answer=answer)) == score
