"""Whether a server serves what the policy trains: found out by asking it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from toolbrain_transformers.scoring import PaddedForward

from toolbrain_core.errors import ConfigurationError
from toolbrain_core.roles import Row

if TYPE_CHECKING:
    from toolbrain_transformers.policy import TransformersPolicy

    from .client import BaseModel, VllmClient

#: What both are asked to score.
PROBE = "The quick brown fox jumps over the lazy dog. A kettle costs 12 euros, and two cost 24."
#: Mean difference of log-probabilities above which two models are not the same. Precisions and
#: kernels make some hundredths, other weights more than one.
_OTHER_MODEL = 0.25


def check_settings(client: VllmClient, base: BaseModel, policy: TransformersPolicy) -> None:
    """See that a server that somebody else started has settings as one of our own.

    Errors: as `VllmClient.base_model`; `ConfigurationError` where its sequences are too short, or
    its log-probabilities are those before temperature.
    """
    wanted = policy.context_length
    if base.context_length < wanted:
        raise ConfigurationError(
            f"the vLLM server at {client.url} holds {base.context_length} tokens in a sequence and "
            f"the policy {wanted}: start it with --max-model-len {wanted}, or give the Brain "
            f"max_context={base.context_length}"
        )
    ids = policy.encode(PROBE)[: wanted - 1]
    cold, hot = (client.ask(client.highest_logprob(base.name, ids, t)) for t in (1.0, 2.0))
    if abs(cold - hot) < 1e-4:
        raise ConfigurationError(
            f"the vLLM server at {client.url} gives log-probabilities before temperature: start it "
            "with --logprobs-mode processed_logprobs"
        )


def check_weights(client: VllmClient, served: str, policy: TransformersPolicy) -> None:
    """See that what is served under a name are the policy's weights.

    Errors: as `VllmClient.base_model`; `ConfigurationError` where they are others.
    """
    ids = policy.encode(PROBE)[: policy.context_length - 1]
    theirs = client.ask(client.prompt_logprobs(served, ids))
    ours = _logprobs(policy, ids)
    difference = sum(abs(a - b) for a, b in zip(ours, theirs, strict=True)) / len(ours)
    if not difference < _OTHER_MODEL:  # NaN too
        raise ConfigurationError(
            f"the vLLM server at {client.url} does not serve the agent's model "
            f"({policy.ref.model.name_or_path or 'built in memory'}): log-probabilities of the "
            f"same text differ by {difference:.2g} on average. Start it on the same weights; a "
            "model whose weights were changed after it was loaded is saved and loaded again first."
        )


def _logprobs(policy: TransformersPolicy, ids: tuple[int, ...]) -> list[float]:
    """Of all ids but the first, by the policy as it is."""
    length = len(ids)
    row = Row(ids, (False, *[True] * (length - 1)), (0.0,) * length, (-1,) * length)
    forward = PaddedForward.of([row], policy.ref.model.device, pad_id=0)
    with torch.no_grad(), policy.autocast():
        return [float(value) for value in forward.score(policy.model).logprobs]
