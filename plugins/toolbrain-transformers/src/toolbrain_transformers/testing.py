"""A tiny random model with a real tokenizer: what tests train in seconds, without a hub.

model = TransformersModel(model_id=str(save_tiny_model(tmp_path)), max_new_tokens=8)
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from .embedded import embedded_model_path


def tiny_tokenizer() -> Any:
    """SmolLM2's tokenizer (49,152 tokens), whose pad token is its end-of-sequence token."""
    return AutoTokenizer.from_pretrained(embedded_model_path())


def tiny_config(tokenizer: Any, **options: Any) -> LlamaConfig:
    """Two layers of 64 channels with the tokenizer's vocabulary; `options` are `LlamaConfig`'s."""
    defaults = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
        "eos_token_id": tokenizer.eos_token_id,
        "bos_token_id": tokenizer.bos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    return LlamaConfig(vocab_size=len(tokenizer), **{**defaults, **options})


def tiny_model(
    tokenizer: Any = None,
    *,
    spread: float = 4.0,
    eos_logit: float | None = None,
    seed: int = 0,
    **config: Any,
) -> LlamaForCausalLM:
    """A random Llama; `config` are further options of `tiny_config`.

    Its logits have mean 0 and standard deviation `spread`: 4 gives a few tokens most of the
    probability, so that LoRA, which leaves the head alone, can change which ones. `eos_logit` is
    roughly the logit of the end-of-sequence token at every position (None: random like others);
    it needs an `initializer_range` of 0.2.
    """
    tokenizer = tokenizer or tiny_tokenizer()
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        model = LlamaForCausalLM(tiny_config(tokenizer, **config)).eval()
        model.lm_head.weight.normal_(0, spread / 8)
        if eos_logit is not None:
            # Channel 0 of the residual stream is made nearly constant, so a head row that reads
            # only it is a bias.
            model.model.embed_tokens.weight[:, 0] = 8.0
            model.lm_head.weight[:, 0] = 0
            model.lm_head.weight[tokenizer.eos_token_id] = 0
            model.lm_head.weight[tokenizer.eos_token_id, 0] = eos_logit / 2.5
    return model


def save_tiny_model(folder: str | Path, **options: Any) -> Path:
    """Write `tiny_model(**options)` with its tokenizer to `folder`; the folder."""
    tokenizer = tiny_tokenizer()
    tiny_model(tokenizer, **options).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return Path(folder)


__all__ = ["save_tiny_model", "tiny_config", "tiny_model", "tiny_tokenizer"]
