"""What a policy computes in: decided once, for sampler and trainer alike."""

from __future__ import annotations

import logging
from typing import Any

import torch
from attrs import frozen
from transformers import PreTrainedConfig

from toolbrain_core.errors import ConfigurationError

log = logging.getLogger(__name__)

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@frozen
class Precision:
    """`weights` is the dtype of the model's weights (LoRA's and other trained ones are fp32 in any
    case), `compute` that of its products, which differs under autocast only. `reason` in words."""

    weights: torch.dtype
    compute: torch.dtype
    reason: str

    def as_dict(self) -> dict[str, str]:
        """For a policy's description; `compute_dtype` as the option `dtype` spells it."""
        spelled = {dtype: word for word, dtype in _DTYPES.items()}
        return {
            "dtype": _name(self.weights),
            "compute_dtype": spelled.get(self.compute, _name(self.compute)),
            "precision": self.reason,
        }


def settle_precision(model: Any, asked: str, full: bool) -> Precision:
    """What a model (a Hugging Face one, as it was loaded) is to compute in.

    `full`: every weight is trained. Optimiser steps are too small for half-precision weights, so
    these are fp32. Errors: `ConfigurationError` for a word that is none of "auto", "fp32", "bf16".
    """
    if asked != "auto" and asked not in _DTYPES:
        raise ConfigurationError(f"dtype={asked!r}: give one of 'auto', 'fp32', 'bf16'")
    if full:
        compute = _DTYPES.get(asked, torch.float32)
        return Precision(torch.float32, compute, f"dtype={asked!r}: all weights are trained")
    if asked != "auto":
        return Precision(_DTYPES[asked], _DTYPES[asked], f"dtype={asked!r}")
    dtype, reason = _auto(model)
    return Precision(dtype, dtype, f"dtype='auto': {reason}")


def cast_weights(model: Any, precision: Precision) -> None:
    """Put the model's weights into the dtype that was settled on, in place, as loading it so would.

    Tied weights stay tied; LoRA matrices, buffers (of rotary positions) and what the model keeps in
    fp32 keep their own.
    """
    loaded, wanted = model.dtype, precision.weights
    if loaded == wanted:
        return
    rounds = precision.reason.startswith("dtype='auto'") and wanted.itemsize < loaded.itemsize
    log.log(
        logging.WARNING if rounds else logging.INFO,
        f"the model's weights, loaded in {_name(loaded)}, are now {_name(wanted)} "
        f"({precision.reason})" + (". dtype='fp32' keeps them." if rounds else ""),
    )
    kept = model._keep_in_fp32_modules_strict or ()
    for name, parameter in model.named_parameters():
        if ".lora_" in name or any(f".{part}." in f".{name}." for part in kept):
            continue
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(wanted)
    model.config.dtype = wanted


def _auto(model: Any) -> tuple[torch.dtype, str]:
    if model.dtype != torch.float32:
        return model.dtype, "as the model was loaded"
    stored = _checkpoint_dtype(model)
    if stored not in (None, torch.float32):
        return model.dtype, f"the model was loaded so on purpose, from {_name(stored)}"
    if not multiplies_bf16(model.device):
        return model.dtype, f"this {model.device.type} does not multiply in bfloat16"
    return torch.bfloat16, f"this {model.device.type} multiplies in bfloat16"


def multiplies_bf16(device: torch.device) -> bool:
    """Whether the hardware has bfloat16 products, so that they are no slower than fp32's."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    # Private, and alike in all torch versions that are supported.
    return device.type == "cpu" and (
        torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    )


def _checkpoint_dtype(model: Any) -> torch.dtype | None:
    """The dtype that transformers loads a model's checkpoint in by itself; None where there is no
    checkpoint at hand, or it does not say."""
    origin = model.config._name_or_path
    if not origin:
        return None
    try:
        stored, _ = PreTrainedConfig.get_config_dict(origin, local_files_only=True)
    except OSError:
        return None
    name = stored.get("dtype") or stored.get("torch_dtype")
    dtype = getattr(torch, str(name), None)
    return dtype if isinstance(dtype, torch.dtype) else None


def _name(dtype: torch.dtype | None) -> str:
    return str(dtype).removeprefix("torch.")
