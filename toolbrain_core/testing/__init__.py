"""Real, tiny parts and contract tests for plugin authors (extra: `toolbrain-core[testing]`)."""
