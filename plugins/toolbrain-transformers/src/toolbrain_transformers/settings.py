"""Options that every algorithm on a TRL trainer shares, and how they reach the trainer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attrs import field, frozen, validators

from toolbrain_core.errors import ConfigurationError

_positive = validators.gt(0)

#: Fields of TRL's configs that toolbrain sets itself, with what to use instead.
OWNED = {
    "output_dir": "the run directory (run_dir=, name=)",
    "learning_rate": "learning_rate=",
    "num_train_epochs": "num_iterations=",
    "max_steps": "num_iterations=",
    "per_device_train_batch_size": "tasks_per_step= or rows_per_step=",
    "gradient_accumulation_steps": "max_tokens_per_step=",
    "gradient_checkpointing": "gradient_checkpointing=",
    "activation_checkpointing": "gradient_checkpointing=",
    "lr_scheduler_type": "schedule=",
    "warmup_steps": "warmup_steps=",
    "weight_decay": "weight_decay=",
    "max_grad_norm": "max_grad_norm=",
    "optim": "optimizer=",
    "seed": "seed= of the Brain",
    "data_seed": "seed= of the Brain",
    "report_to": "report_to=",
    "bf16": "dtype= of the Brain",
    "fp16": "dtype= of the Brain",
    "save_strategy": "checkpoint_every=",
    "save_steps": "checkpoint_every=",
    "save_total_limit": "keep_checkpoints=",
    "logging_steps": "the journal, which has every step",
    "logging_nan_inf_filter": "nothing: a loss that is not finite stops the run",
    "disable_tqdm": "progress= of the Brain",
    "remove_unused_columns": "nothing",
    "auto_find_batch_size": "max_tokens_per_step=",
    "use_cpu": "the device of the agent's model",
}


@frozen(kw_only=True)
class TrainerSettings:
    """Options of every algorithm here.

    `num_iterations`: passes over the data. `learning_rate` with `schedule` (a name of
    transformers' `SchedulerType`) and `warmup_steps`; `optimizer` a name of transformers'
    `OptimizerNames`. `max_tokens_per_step`: tokens (padding counted) in one forward pass.
    `checkpoint_every`: updates between checkpoints, 0 for none but the last;
    `keep_checkpoints`: how many stay. `report_to`: names of transformers' trackers. `trl`: further
    fields of TRL's config.
    """

    num_iterations: int = field(default=1, validator=_positive)
    learning_rate: float = field(default=2e-4, validator=validators.gt(0.0))
    schedule: str = "constant"
    warmup_steps: int = field(default=0, validator=validators.ge(0))
    weight_decay: float = field(default=0.0, validator=validators.ge(0))
    max_grad_norm: float = field(default=1.0, validator=validators.ge(0))
    optimizer: str = "adamw_torch"
    max_tokens_per_step: int = field(default=8192, validator=_positive)
    gradient_checkpointing: bool = False
    checkpoint_every: int = field(default=20, validator=validators.ge(0))
    keep_checkpoints: int = field(default=2, validator=_positive)
    report_to: str | tuple[str, ...] = "none"
    trl: Mapping[str, Any] = field(factory=dict, validator=validators.instance_of(Mapping))


def trainer_arguments(
    settings: TrainerSettings, config_class: Any, owned: Mapping[str, str], **ours: Any
) -> Any:
    """A TRL config of `config_class`: our values, then the user's further fields.

    Errors: `ConfigurationError` for a field that toolbrain owns (`OWNED` and `owned`), for one
    that TRL does not have, and for values that TRL refuses.
    """
    refused = {**OWNED, **owned}
    for name in settings.trl:
        if name in refused:
            raise ConfigurationError(
                f"trl={{{name!r}: …}}: toolbrain sets this field itself; use {refused[name]}"
            )
        if name not in config_class.__dataclass_fields__:
            raise ConfigurationError(
                f"trl={{{name!r}: …}}: {config_class.__name__} has no such field"
            )
    report_to = settings.report_to
    values = {
        "learning_rate": settings.learning_rate,
        "lr_scheduler_type": settings.schedule,
        "warmup_steps": settings.warmup_steps,
        "weight_decay": settings.weight_decay,
        "max_grad_norm": settings.max_grad_norm,
        "optim": settings.optimizer,
        "activation_checkpointing": settings.gradient_checkpointing,
        "save_strategy": "steps" if settings.checkpoint_every else "no",
        "save_steps": settings.checkpoint_every or 1,
        "report_to": report_to if isinstance(report_to, str) else list(report_to),
        "bf16": False,  # the policy's autocast is the only one
        "fp16": False,
        "logging_steps": 1,
        "logging_nan_inf_filter": False,
        "disable_tqdm": True,
        "remove_unused_columns": False,
        "gradient_accumulation_steps": 1,
        **ours,
        **settings.trl,
    }
    try:
        return config_class(**values)
    except (ValueError, TypeError) as error:
        raise ConfigurationError(
            f"{config_class.__name__} refuses these options: {error}"
        ) from error
