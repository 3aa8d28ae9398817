"""The policy: a Hugging Face model with its tokenizer and adapter, sampled from and trained."""

from __future__ import annotations

import logging
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import deepcopy
from pathlib import Path
from typing import Any, Literal

import peft
import torch
from attrs import asdict, field, frozen, validators

from toolbrain_core.errors import ConfigurationError, ContextOverflow, DataError, NotServed
from toolbrain_core.options import build, option_names, refuse_unknown
from toolbrain_core.roles import AttemptKey, ChatRequest, ModelRef, Row, Sampler
from toolbrain_core.saving import check_replaceable, whole_directory
from toolbrain_core.traces import Sampling, Trace, Turn

from .drawing import Batch, Drawer
from .generation import eos_ids_of, sampling_of
from .lean_layers import lean_layers
from .padded_batch import PaddedBatch
from .precision import cast_weights, settle_precision
from .rows import rows_of
from .sampler import InProcessSampler
from .scoring import Forward, cost_of, forward_of
from .session import PolicySession
from .templates import ChatTemplate
from .tool_formats import ToolFormat
from .tree_attention import tree_attending
from .tree_batch import TreeBatch
from .tree_check import tree_problem

log = logging.getLogger(__name__)

#: Towers of image-text models, and what joins them to the language model.
_NOT_LANGUAGE = r".*(vision|visual|image|audio|multi_modal|connector|projector).*"


@frozen
class Lora:
    """Low-rank adapters (Hu et al., 2021, arXiv 2106.09685) on linear layers, not on the head."""

    r: int = field(default=16, validator=validators.gt(0))
    alpha: float = field(default=32, validator=validators.gt(0))
    target_modules: str | tuple[str, ...] = "all-linear"


class TransformersPolicy:
    """Trains the model in `ref` in place: the agent that owns it serves with the same weights.

    `lora=None` trains every weight (of an image-text model: of its language model); `adapter` is
    the directory of a saved adapter to start from. `dtype`: what is computed in; "auto" is bf16
    where the hardware has it, else as the model was loaded. The model's weights are cast to it, in
    place and for good; with `lora=None` they are fp32, and "bf16" computes under autocast. What is
    trained is fp32 always. See docs/guides/precision.md.
    `max_context` in tokens, by default the model's own. `max_batch` sequences are sampled at once;
    `max_cache_bytes` bounds the keys and values kept between turns. `tree="auto"` computes shared
    prefixes once where the model's attention can serve it and says so once where it cannot,
    "require" makes that an error, "off" pads. `sampler` is in-process where none is given. `seed`
    draws the adapter's first weights.
    Errors: `NotServed` (no chat template, generation options that the sampler lacks, a policy that
    it cannot serve).
    """

    def __init__(
        self,
        ref: ModelRef,
        *,
        lora: Lora | Mapping[str, Any] | None = Lora(),
        adapter: str | Path | None = None,
        dtype: Literal["auto", "fp32", "bf16"] = "auto",
        max_context: int | None = None,
        max_batch: int = 64,
        max_cache_bytes: int = 1 << 30,
        tree: Literal["auto", "require", "off"] = "auto",
        sampler: Sampler | None = None,
        seed: int = 0,
    ):
        for name, value, least in (
            ("max_context", max_context, 1),
            ("max_batch", max_batch, 1),
            ("max_cache_bytes", max_cache_bytes, 0),
        ):
            if value is not None and value < least:
                raise ConfigurationError(f"{name} must be at least {least}, not {value}")
        self.ref = ref
        self.processor = ref.processor
        self.tokenizer = getattr(ref.processor, "tokenizer", ref.processor)
        self.template = ChatTemplate(ref.processor, ref.name, ref.template_options)
        self.tool_format = ToolFormat.of(ref.processor)
        self.dtype = dtype
        self.weights_version = 0
        base = ref.model
        self.eos_ids = eos_ids_of(base, self.tokenizer)
        self._own_sampling = sampling_of(base, ref)
        self.context_length = max_context or _context_length(base)
        self.lora = _lora(lora)
        _check_bare(base)
        self.precision = settle_precision(base, dtype, full=self.lora is None and adapter is None)
        base.eval()
        self.tree = self._tree(tree)
        self.max_batch = max_batch
        self.max_cache_bytes = max_cache_bytes
        self.sampler: Sampler = sampler or InProcessSampler()
        self._serving = 0
        self._training = False
        # Last, and undone where the sampler refuses: the agent's model is left as it was found.
        self.model = self._with_adapter(base, adapter, seed)
        self.model.eval()
        try:
            self.sampler.check(self)
        except BaseException:
            if self.is_adapted:
                vars(self.model.unload()).pop("peft_config", None)
            raise
        cast_weights(base, self.precision)

    # Serving ---------------------------------------------------------------------------------

    def session(
        self,
        key: AttemptKey,
        sampling: Sampling | None = None,
        purpose: Literal["train", "use"] = "train",
    ) -> PolicySession:
        """See `Policy.session`."""
        return PolicySession(self, key, sampling, keep_ids=purpose == "train")

    @contextmanager
    def serving(self) -> Iterator[None]:
        """Sessions may chat inside. The model belongs to the sampler until the block ends."""
        if not self._serving:
            self.model.eval()
            self.weights_version += self._training  # its trainer may have changed them
            self.sampler.update_weights(self)
            self.sampler.start()
        self._serving += 1
        try:
            yield
        finally:
            self._serving -= 1
            if not self._serving:
                self.sampler.stop()
        if not self._serving and self.sampler.failure:
            raise self.sampler.failure

    def own_sampling(self) -> Sampling:
        """The agent's own sampling: its generation options over the model's defaults."""
        return self._own_sampling

    def check_fits(self, prompt_tokens: int) -> None:
        """Errors: `ContextOverflow` where no token could follow the prompt."""
        if prompt_tokens >= self.context_length:
            raise ContextOverflow(
                f"the prompt has {prompt_tokens} tokens and the context {self.context_length}. "
                "Shorten the agent's prompt or history (compact prompts, observe=, fewer tools)."
            )

    def encode(self, text: str) -> tuple[int, ...]:
        """Ids of rendered text; special tokens in it are recognised, none are added."""
        return tuple(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def decode(self, ids: Sequence[int]) -> str:
        """The exact text of ids, special tokens included."""
        return str(self.tokenizer.decode(list(ids), clean_up_tokenization_spaces=False))

    def visible_text(self, ids: Sequence[int]) -> str:
        """The text of ids as agents see it: without special tokens."""
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=True))

    def preflight(self) -> list[str]:
        """What is wrong, in words, from one dummy turn; empty when nothing is."""
        problems = self.template.notes()
        size = self.ref.model.get_input_embeddings().num_embeddings
        if len(self.tokenizer) > size:
            problems.append(
                f"the tokenizer has {len(self.tokenizer)} tokens and the model {size} embeddings: "
                "call model.resize_token_embeddings(len(tokenizer)) before building the Brain"
            )
        if not self.eos_ids:
            problems.append("the model has no end-of-sequence token: every turn runs to its limit")
        session = self.session(
            AttemptKey("preflight", 0, "preflight", 0), Sampling(max_new_tokens=2)
        )
        with self.serving():
            session.chat(ChatRequest(({"role": "user", "content": "Say hello."},)))
        logprobs = session.transcript.turns[0].logprobs
        if not all(lp == lp and lp > float("-inf") for lp in logprobs):
            problems.append("the model's log-probabilities are not finite: are its weights intact?")
        return problems

    def new_batch(self) -> Batch:
        """What the in-process sampler decodes in, until serving ends."""
        drawer = Drawer(self.eos_ids, self.visible_text)
        if self.tree:
            return TreeBatch(self.ref.model, drawer, self.max_cache_bytes)
        return PaddedBatch(self.ref.model, drawer)

    @contextmanager
    def sampling_context(self) -> Iterator[None]:
        """Holds while the in-process sampler serves, on its thread."""
        base = self.ref.model
        with (
            self.autocast(),
            lean_layers(base, fixed=True),
            tree_attending(base) if self.tree else nullcontext(),
        ):
            yield

    def _tree(self, wanted: str) -> bool:
        """Whether shared prefixes are computed once."""
        if wanted == "off":
            return False
        problem = tree_problem(self.ref.model)
        if problem and wanted == "require":
            raise NotServed(f"tree='require', but {problem}. Use tree='auto'.")
        if problem:
            log.warning("%s: shared prefixes are computed again for every attempt", problem)
        return not problem

    # Training --------------------------------------------------------------------------------

    def rows(self, trace: Trace) -> list[Row]:
        """See `Policy.rows`."""
        return self.rows_of_turns(trace.turns)

    def rows_of_turns(self, turns: Sequence[Turn]) -> list[Row]:
        """Rows of turns that need not have been sampled (demonstrations)."""
        return rows_of(turns, self.eos_ids)

    def autocast(self) -> AbstractContextManager[Any]:
        """The autocast of sampler and trainer; nothing where the weights have the dtype."""
        if self.precision.weights == self.precision.compute:
            return nullcontext()
        return torch.autocast(self.ref.model.device.type, dtype=self.precision.compute)

    @contextmanager
    def training(self) -> Iterator[Any]:
        """The model for a trainer. Afterwards it is as it was but for its weights.

        Trainers leave things behind: a replaced `forward`, training mode, checkpointing, pad ids.
        Leaving bumps `weights_version`, also where training was cut short.
        """
        base = self.ref.model
        text_config = base.config.get_text_config()
        before = (text_config.pad_token_id, base.generation_config.pad_token_id)
        pad_token, side = self.tokenizer.pad_token, self.tokenizer.padding_side
        attributes = set(base.__dict__)
        self._training = True
        try:
            with (
                lean_layers(base, fixed=False),
                tree_attending(base) if self.tree else nullcontext(),
            ):
                yield self.model
        finally:
            base.activation_checkpointing_disable()
            for name in set(base.__dict__) - attributes:
                delattr(base, name)
            text_config.pad_token_id, base.generation_config.pad_token_id = before
            self.tokenizer.pad_token, self.tokenizer.padding_side = pad_token, side
            self.model.zero_grad(set_to_none=True)
            self.model.eval()
            self._training = False
            self.weights_version += 1

    def forward_of(self, rows: Sequence[Row]) -> Forward:
        """The forward pass that scores these rows; see `scoring`."""
        pad_id = self.tokenizer.pad_token_id or 0
        return forward_of(rows, self.ref.model.device, self.tree, pad_id)

    def cost_of(self, rows: Sequence[Row]) -> int:
        """Tokens in that forward pass."""
        return cost_of(rows, self.tree)

    @property
    def is_adapted(self) -> bool:
        """Whether an adapter is trained, rather than every weight."""
        return isinstance(self.model, peft.PeftModel)

    @property
    def is_fresh(self) -> bool:
        """Whether the adapter still does nothing, so that the bare base is the policy."""
        return self.is_adapted and not any(
            bool(p.any()) for name, p in self.model.named_parameters() if "lora_B.default" in name
        )

    # Saving ----------------------------------------------------------------------------------

    def save(self, path: str | Path) -> None:
        """Write adapter (or all weights), tokenizer and `toolbrain.json`; all or nothing.

        Errors: see `whole_directory`: only an earlier save is replaced.
        """
        with whole_directory(path, {"policy": self.describe()}) as folder:
            if self.is_adapted:
                self.model.save_pretrained(folder, selected_adapters=["default"])
            else:
                self.model.save_pretrained(folder)
            self.processor.save_pretrained(folder)

    def load(self, path: str | Path) -> None:
        """Take the weights of a saved adapter of the same shape. Errors: `DataError`."""
        if not self.is_adapted:
            raise NotServed("lora=None: load all weights by giving the agent the saved model")
        if not (Path(path) / "adapter_config.json").is_file():
            raise DataError(f"{path} holds no adapter (no adapter_config.json)")
        saved = peft.PeftConfig.from_pretrained(str(path))
        own = self.model.peft_config["default"]
        if (saved.r, saved.lora_alpha) != (own.r, own.lora_alpha):
            raise DataError(
                f"the adapter in {path} has r={saved.r}, alpha={saved.lora_alpha}; this policy "
                f"r={own.r}, alpha={own.lora_alpha}. Build it with Brain.load(path, agent)."
            )
        weights = peft.load_peft_weights(str(path), device=str(self.ref.model.device))
        outcome: Any = peft.set_peft_model_state_dict(self.model, weights)
        missing = [key for key in outcome.missing_keys if ".lora_" in key]
        if missing or outcome.unexpected_keys:
            odd = (missing + list(outcome.unexpected_keys))[0]
            raise DataError(f"the adapter in {path} does not fit this model: {odd}")
        self.weights_version += 1

    def merge(self, path: str | Path) -> None:
        """Write a plain model with the adapter merged in. Needs memory for a second model.

        Errors: as `save`.
        """
        check_replaceable(path)
        model = deepcopy(self.model)
        merged = model.merge_and_unload() if self.is_adapted else model
        with whole_directory(path, {"merged": self.describe()}) as folder:
            merged.save_pretrained(folder)
            self.processor.save_pretrained(folder)

    def describe(self) -> dict[str, Any]:
        """See `Policy.describe`."""
        return {
            "model": self.ref.name,
            "class": type(self.ref.model).__name__,
            **self.precision.as_dict(),
            "device": str(self.ref.model.device),
            "context_length": self.context_length,
            "lora": asdict(self.lora) if self.is_adapted and self.lora else None,
            "sampler": type(self.sampler).__name__,
            "trainable_parameters": sum(
                p.numel() for p in self.model.parameters() if p.requires_grad
            ),
            "weights_version": self.weights_version,
        }

    def _with_adapter(self, base: Any, adapter: str | Path | None, seed: int) -> Any:
        if adapter is not None:
            if not (Path(adapter) / "adapter_config.json").is_file():
                raise DataError(
                    f"{adapter} holds no adapter (no adapter_config.json). A whole model (saved "
                    "with lora=None, or merged) is given to the agent instead"
                )
            model = peft.PeftModel.from_pretrained(base, str(adapter), is_trainable=True)
            self.lora = _lora_of(model.peft_config["default"])
            return model
        if self.lora is None:
            for name, parameter in base.named_parameters():
                tower = _sees(base) and re.fullmatch(_NOT_LANGUAGE, name)
                parameter.requires_grad_(not tower)
            return base
        targets = self.lora.target_modules
        config = peft.LoraConfig(
            r=self.lora.r,
            lora_alpha=self.lora.alpha,  # type: ignore[arg-type]  # PEFT takes fractions too
            lora_dropout=0.0,  # dropout would make sampled and trained probabilities differ
            target_modules=targets if isinstance(targets, str) else list(targets),
            exclude_modules=_NOT_LANGUAGE if _sees(base) else None,
            task_type="CAUSAL_LM",
        )
        with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # peft 0.21 asks by an old name
            torch.manual_seed(seed)
            try:
                return peft.get_peft_model(base, config)
            except ValueError as error:
                raise ConfigurationError(f"{self.lora}: {error}") from error


def _lora(given: Lora | Mapping[str, Any] | None) -> Lora | None:
    if not isinstance(given, Mapping):
        return given
    refuse_unknown(given, {"lora": option_names(Lora)}, "lora")
    made: Lora = build(Lora, "lora", given)
    return made


def _lora_of(config: Any) -> Lora:
    """What a saved adapter is, which counts more than what was asked for."""
    targets = config.target_modules
    named = targets if isinstance(targets, str) else tuple(sorted(targets or ()))
    return Lora(config.r, config.lora_alpha, named)


def _check_bare(base: Any) -> None:
    lora = any(isinstance(module, peft.tuners.lora.LoraLayer) for module in base.modules())
    if lora or getattr(base, "peft_config", None):
        raise NotServed(
            "the agent's model already carries an adapter (it was given to a Brain before?). "
            "Reuse that Brain, load the model afresh, or merge the adapter first."
        )


def _sees(base: Any) -> bool:
    return getattr(base.config, "vision_config", None) is not None


def _context_length(base: Any) -> int:
    length = getattr(base.config.get_text_config(), "max_position_embeddings", None)
    if not length:
        raise NotServed("the model's config has no max_position_embeddings: pass max_context=…")
    return int(length)
