"""Discovers every installed plugin, in a process of its own, and checks that nothing heavy came in.

Prints the distributions found. Needs nothing but what is installed beside the plugins.
"""

import sys

import click

import toolbrain_core  # noqa: F401
from toolbrain_core.plugins import default_manager

HEAVY = "torch transformers trl peft accelerate datasets smolagents langchain numpy matplotlib"

manager = default_manager()
for registry in manager.registries.values():
    registry.describe()
manager.match_agent(object())
manager.commands(click.Group())

heavy = sorted(set(HEAVY.split()) & set(sys.modules))
if heavy:
    sys.exit(f"discovery imported {heavy}")
if failed := [record for record in manager.records if record.status == "failed"]:
    sys.exit(f"plugins failed to load: {failed}")
print(" ".join(record.distribution for record in manager.records))
