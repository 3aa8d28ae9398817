"""What an agent's generation options mean for our sampler."""

from __future__ import annotations

from typing import Any

from toolbrain_core.errors import NotServed
from toolbrain_core.roles import ModelRef
from toolbrain_core.traces import Sampling

_SERVED = {
    "max_new_tokens",
    "max_tokens",
    "do_sample",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "stop_strings",
}
#: Options that say how to compute, not what to draw.
_HARMLESS = {"use_cache", "pad_token_id", "eos_token_id", "bos_token_id", "device", "max_length"}
#: Fields of a generation config that change what is drawn, with the values that change nothing.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "num_beams": (None, 1),
    "no_repeat_ngram_size": (None, 0),
    "bad_words_ids": (None,),
    "force_words_ids": (None,),
    "suppress_tokens": (None, []),
    "begin_suppress_tokens": (None, []),
    "typical_p": (None, 1.0),
    "epsilon_cutoff": (None, 0.0),
    "eta_cutoff": (None, 0.0),
    "min_new_tokens": (None, 0),
    "guidance_scale": (None, 1.0),
    "penalty_alpha": (None, 0.0),
}


def eos_ids_of(model: Any, tokenizer: Any) -> frozenset[int]:
    """The ids at which `model.generate` ends a sequence; the tokenizer's where it names none."""
    eos = model.generation_config.eos_token_id
    if eos is None:
        eos = tokenizer.eos_token_id
    if eos is None:
        return frozenset()
    return frozenset([eos] if isinstance(eos, int) else eos)


def sampling_of(model: Any, ref: ModelRef) -> Sampling:
    """The agent's options over the model's generation config, as `model.generate` reads them.

    Errors: `NotServed` for an option that would change what is drawn and that the sampler lacks.
    """
    unknown = set(ref.defaults) - _SERVED - _HARMLESS - set(_NEUTRAL)
    config = {**model.generation_config.to_dict(), **ref.defaults}
    changed = [k for k, neutral in _NEUTRAL.items() if config.get(k) not in neutral]
    if unknown or changed:
        odd = ", ".join(sorted({*unknown, *changed}))
        raise NotServed(
            f"the agent's model generates with {odd}, which the in-process "
            f"sampler does not serve. Served: {', '.join(sorted(_SERVED))}. Remove the "
            "option from the model (or from its generation_config)."
        )
    sampled = bool(config.get("do_sample"))
    limit = ref.defaults.get("max_new_tokens") or ref.defaults.get("max_tokens")
    stops = config.get("stop_strings") or ()
    return Sampling(
        temperature=_number(config, "temperature", 1.0) if sampled else 0.0,
        top_p=_number(config, "top_p", 1.0) if sampled else 1.0,
        top_k=int(_number(config, "top_k", 50)) if sampled else 0,
        min_p=_number(config, "min_p", 0.0) if sampled else 0.0,
        repetition_penalty=_number(config, "repetition_penalty", 1.0),
        max_new_tokens=int(limit or config.get("max_new_tokens") or 1024),
        stop=(stops,) if isinstance(stops, str) else tuple(stops),
    )


def _number(config: dict[str, Any], name: str, default: float) -> float:
    value = config.get(name)
    return default if value is None else float(value)
