"""The reference of the KL term: the policy as it was when the run began."""

from __future__ import annotations

import copy
import hashlib
import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from toolbrain_transformers.policy import TransformersPolicy

from toolbrain_core.errors import RunDirectoryError
from toolbrain_core.runs import Run

from .algorithm import Grpo

log = logging.getLogger(__name__)

#: In the run directory of full fine-tuning: which weights the reference has.
_FINGERPRINT = "reference.json"


@contextmanager
def reference_of(policy: TransformersPolicy, settings: Grpo, run: Run) -> Iterator[Any]:
    """A function that scores like the policy as the run began with it, or None where `beta` is 0.

    A fresh adapter is switched off; a trained one is copied (adapter-sized, frozen) and the copy
    removed afterwards; checkpoints have the copy too, so that a resumed run keeps its reference.
    Full fine-tuning needs a second model, and the log says so. Checkpoints do not have it: a run
    is resumed by a policy with the weights that it began with.
    Errors: `RunDirectoryError` where a policy with other weights resumes such a run.
    """
    if not settings.beta:
        yield None
    elif _began_fresh(policy, run):
        yield lambda model: (model, unwrapped_peft(model).disable_adapter())
    elif policy.is_adapted:
        peft_model = policy.model
        # Trainer gives it the checkpoint's weights where a run is resumed.
        peft_model.add_adapter("reference", peft_model.peft_config["default"])
        weights = dict(peft_model.named_parameters())
        for name, parameter in weights.items():
            if ".default." in name:
                weights[name.replace(".default.", ".reference.")].data.copy_(parameter.data)
        peft_model.set_adapter("default")
        try:
            yield lambda model: (model, _adapter(unwrapped_peft(model), "reference"))
        finally:
            peft_model.delete_adapter("reference")
    else:
        _check_start(policy.model, run)
        log.warning("beta > 0 with full fine-tuning: a second copy of the model is kept in memory")
        frozen = copy.deepcopy(policy.model).requires_grad_(False).eval()
        yield lambda model: (frozen, nullcontext())


def _began_fresh(policy: TransformersPolicy, run: Run) -> bool:
    """Whether the run began with an adapter that did nothing, whatever it has learned since."""
    if run.resume_from is None:
        return policy.is_fresh
    return policy.is_adapted and not (run.resume_from / "reference").is_dir()


def _check_start(model: Any, run: Run) -> None:
    """Note which weights the run begins with; where it is resumed, the model must have them."""
    fingerprint = _fingerprint(model)
    if run.resume_from is None:
        if run.rank == 0:
            run.directory.write_json(_FINGERPRINT, {"sha256": fingerprint})
        return
    path = run.directory.path / _FINGERPRINT
    noted = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    if noted.get("sha256") != fingerprint:
        raise RunDirectoryError(
            f"cannot resume {run.directory.path} with this Brain: beta > 0 compares the policy "
            "with the weights that the run began with; checkpoints of full fine-tuning do not "
            "hold them, and this Brain's are others. Resume with a new Brain on that model, "
            "loaded afresh, or train under another name, with the present weights as reference"
        )


def _fingerprint(model: Any) -> str:
    digest = hashlib.sha256()
    for name, weight in model.state_dict().items():
        digest.update(f"{name} {weight.dtype} {tuple(weight.shape)}".encode())
        digest.update(weight.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    return digest.hexdigest()


@contextmanager
def _adapter(model: Any, name: str) -> Iterator[None]:
    model.set_adapter(name, inference_mode=True)
    try:
        yield
    finally:
        model.set_adapter("default")


def unwrapped_peft(model: Any) -> Any:
    """The PEFT model inside a DDP wrapper."""
    return model.module if isinstance(model, torch.nn.parallel.DistributedDataParallel) else model
