"""The errors of toolbrain, as one tree.

    ToolBrainError
    ├── ConfigurationError     an argument, option or name that cannot be used
    │   ├── UnknownName        a name that no installed plugin provides
    │   ├── UnsupportedAgent   an agent, or a part of one, that no adapter can run
    │   └── NotServed          a request that the model cannot be asked (no template, …)
    ├── DataError              a task, demonstration or recorded line that cannot be read
    ├── PluginError            two plugins that provide one name, a plugin that breaks its contract
    ├── RunDirectoryError      a run directory that cannot be written or resumed
    ├── TrainingError          training cannot go on (a loss that is not finite, …)
    ├── ContextOverflow        one attempt's prompt leaves no room to answer
    └── SamplerFailure         the sampler could not answer (infrastructure)

    AttemptClosed (BaseException)   an abandoned attempt called its session again

A subclass exists only where a caller would act differently. Every message names the thing, who
provided it and the next step.
"""

from __future__ import annotations


class ToolBrainError(Exception):
    """Root of everything that toolbrain raises on purpose."""


class ConfigurationError(ToolBrainError):
    """An argument, option or name that cannot be used."""


class UnknownName(ConfigurationError):
    """A name that no installed plugin provides."""


class UnsupportedAgent(ConfigurationError):
    """An agent, or a part of one, that no adapter can run."""


class NotServed(ConfigurationError):
    """A request that the model cannot be asked: no chat template, an option the sampler lacks."""


class DataError(ToolBrainError):
    """A task, demonstration or recorded line that cannot be read."""


class PluginError(ToolBrainError):
    """Two plugins that provide one name, or a plugin that breaks its contract."""


class RunDirectoryError(ToolBrainError):
    """A run directory that cannot be written or resumed."""


class TrainingError(ToolBrainError):
    """Training cannot go on: a loss or gradient that is not finite, a row that does not fit."""


class ContextOverflow(ToolBrainError):
    """The prompt of one turn leaves no room for an answer in the model's context."""


class SamplerFailure(ToolBrainError):
    """The sampler could not answer: it stopped, or its process or server is gone."""


class AttemptClosed(BaseException):
    """Raised inside an attempt that was abandoned, to unwind it.

    Not an ``Exception``: agents catch those and carry on, and an abandoned attempt must not.
    """
