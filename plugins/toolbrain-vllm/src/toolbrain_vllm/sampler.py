"""The sampler: a vLLM server that is started, or given, and handed the adapter as it is trained."""

from __future__ import annotations

import asyncio
import secrets
import shutil
import tempfile
import threading
import weakref
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import httpx2
from attrs import define, field

from toolbrain_core.errors import ConfigurationError, NotServed, SamplerFailure
from toolbrain_core.roles import Sampled
from toolbrain_core.traces import Sampling

from .checks import check_settings, check_weights
from .client import VllmClient
from .completions import request_of, sampled_of
from .server import VllmServer, launch

if TYPE_CHECKING:
    from toolbrain_transformers.policy import TransformersPolicy


#: Arguments of the server that are ours to choose.
_OURS = ("--host", "--port", "--api-key")
#: Answers to a request by which a server says that it is not the one that took our adapter.
_STRANGER = (401, 403, 404)


@define(eq=False, kw_only=True)
class VllmSampler:
    """Samples a `TransformersPolicy` with an adapter on vLLM (`Brain(agent, sampler="vllm")`).

    Without `url` it starts a server of its own when it is first needed, on the loopback interface
    with a random key: by `python`, of an environment with vLLM (by default this one, or that of the
    `vllm` on the PATH), with further `args` and `env`. It must answer within `startup_seconds`, and
    is stopped when the program ends, however it ends, or by `close()`. With `url`, the root of a
    server that runs already, and its `api_key`, that one is used: see the README for how it is
    started.

    Adapters are handed over as files in `directory` (by default a temporary one), which only this
    user can read. The log of a server of ours is there too, and stays if it fails.

    Log-probabilities are after temperature. Where top-p, top-k, min-p or a repetition penalty are
    used, which training never does, they are those of what these leave.

    Errors: `NotServed` for a policy without an adapter; `ConfigurationError` for options that make
    no sense, where vLLM is not installed, and where a server serves something else than the policy;
    `SamplerFailure` with the end of the server's log. Requests that were in flight when a server
    was lost fail, and `failure` is set; the next time that the policy serves, a new one is started.
    """

    url: str | None = None
    api_key: str | None = field(default=None, repr=False)
    python: str | Path | None = None
    args: Sequence[str] = ()
    env: Mapping[str, str] = field(factory=dict)
    startup_seconds: float = 300
    directory: str | Path | None = None
    failure: SamplerFailure | None = field(default=None, init=False)
    _policy: TransformersPolicy | None = field(default=None, init=False)
    _folder: Path | None = field(default=None, init=False)
    _server: VllmServer | None = field(default=None, init=False)
    _client: VllmClient | None = field(default=None, init=False)
    #: The adapter that is served: its folder, which is also its name.
    _adapter: Path | None = field(default=None, init=False)
    _version: int = field(default=0, init=False)
    _serving: bool = field(default=False, init=False)
    #: Held while a request is submitted or serving ends, so that none is submitted afterwards.
    _lock: threading.Lock = field(factory=threading.Lock, init=False, repr=False)

    def __attrs_post_init__(self) -> None:
        if any((self.python, self.args, self.env) if self.url else (self.api_key,)):
            raise ConfigurationError(
                "VllmSampler: python=, args= and env= are of a server that is started, api_key= is "
                "of one that runs already, at url="
            )
        if self.url is not None:
            _check_url(self.url)
        if isinstance(self.args, str):
            raise ConfigurationError(f"VllmSampler(args={self.args!r}): give a list of words")
        if taken := [word for word in self.args if word.partition("=")[0] in _OURS]:
            raise ConfigurationError(
                f"VllmSampler(args=…): {taken[0]} is chosen by the sampler. To choose it yourself, "
                "start the server, and give url= and api_key="
            )

    def check(self, policy: TransformersPolicy) -> None:
        """See `Sampler.check`."""
        if not policy.is_adapted:
            raise NotServed(
                "vLLM is handed adapters, and with lora=None every weight is trained: use lora=…, "
                "or sampler='in-process'"
            )

    def update_weights(self, policy: TransformersPolicy) -> None:
        """See `Sampler.update_weights`. The first call starts the server."""
        if self._policy not in (None, policy):
            raise ConfigurationError(
                "this VllmSampler serves another Brain already: give each Brain one of its own"
            )
        self._policy = policy
        try:
            if self._client is None:
                client = self._connect(policy)
                check_weights(client, self._hand_over(client, policy), policy)
            elif not self._client.ask(self._client.is_healthy()):
                raise self._lost("it does not answer")
            elif policy.weights_version != self._version:
                self._hand_over(self._client, policy)
        except BaseException as error:  # Ctrl-C too: no broken server must stay
            self.failure = error if isinstance(error, SamplerFailure) else None
            self.close()
            raise

    def start(self) -> None:
        """Begin to serve."""
        self.failure, self._serving = None, True

    def generate(self, prompt_ids: Sequence[int], sampling: Sampling, seed: int) -> Future[Sampled]:
        """See `Sampler.generate`."""
        with self._lock:
            if self.failure is not None:
                raise self.failure
            if not self._serving or self._client is None or self._policy is None:
                raise SamplerFailure(
                    "the sampler is not serving: chat inside `with policy.serving():`"
                )
            work = self._sample(self._client, self._policy, prompt_ids, sampling, seed)
            return self._client.submit(work)

    def stop(self) -> None:
        """End serving; the server stays for the next time, unless it is broken."""
        with self._lock:
            self._serving = False
        if self._client is not None:
            self._client.cancel_all()
        if self.failure is not None:
            self.close()

    def close(self) -> None:
        """Stop the server, if it is ours. The next time that the policy serves starts a new one."""
        if self._client is not None:
            self._withdraw(self._client)
            self._client.close()
        if self._server is not None:
            self._server.stop(keep_log=self.failure is not None)
        self._client = self._server = None

    def _connect(self, policy: TransformersPolicy) -> VllmClient:
        """Start the server, or reach the one that was given."""
        if self.url is None:
            own = launch(policy, self._own_folder(), self.python, self.args, self.env)
            weakref.finalize(self, own.stop)
            client = VllmClient(own.url, own.api_key, direct=True)
            self._server, self._client = own, client
            own.wait_until(lambda: client.ask(client.is_ready()), self.startup_seconds)
        else:
            self._client = client = VllmClient(self.url, self.api_key, direct=False)
            check_settings(client, client.ask(client.base_model()), policy)
        return client

    def _hand_over(self, client: VllmClient, policy: TransformersPolicy) -> str:
        """The policy's adapter takes the place of the one before; its name."""
        self._withdraw(client)
        # Other weights get another name, which also keeps apart what the server caches.
        name = f"weights-{policy.weights_version}-{secrets.token_hex(4)}"
        new = self._own_folder() / name
        policy.model.save_pretrained(new, selected_adapters=["default"])
        client.ask(client.load_adapter(str(new)))
        self._adapter, self._version = new, policy.weights_version
        return str(new)

    def _withdraw(self, client: VllmClient) -> None:
        """Take the adapter from the server, and remove its files."""
        old, self._adapter = self._adapter, None
        if old is not None:
            if self.failure is None:
                client.ask(client.unload_adapter(str(old)))
            shutil.rmtree(old)

    async def _sample(
        self,
        client: VllmClient,
        policy: TransformersPolicy,
        prompt_ids: Sequence[int],
        sampling: Sampling,
        seed: int,
    ) -> Sampled:
        version = self._version
        room = policy.context_length - len(prompt_ids)
        request = request_of(prompt_ids, sampling, seed, room, policy.eos_ids)
        try:
            answer = await client.complete({**request, "model": str(self._adapter)})
        except asyncio.CancelledError:
            if self._serving:
                raise
            raise SamplerFailure("the sampler was stopped") from None
        except httpx2.HTTPError as error:
            raise await self._why(client, error) from error
        return sampled_of(answer, sampling, policy.eos_ids, version)

    async def _why(self, client: VllmClient, error: httpx2.HTTPError) -> SamplerFailure:
        """What a request that failed means: one lost answer, or a lost server."""
        words, stranger = f"{type(error).__name__}: {error}", False
        if isinstance(error, httpx2.HTTPStatusError):
            words = f"HTTP {error.response.status_code}: {error.response.text.strip()}"
            stranger = error.response.status_code in _STRANGER
        if self.failure is None and not stranger and await client.is_healthy():
            return SamplerFailure(f"the vLLM server could not answer a request: {words}")
        self.failure = self.failure or self._lost(words)
        return self.failure

    def _lost(self, words: str) -> SamplerFailure:
        if self._server is None:
            return SamplerFailure(f"the vLLM server at {self.url} was lost: {words}.")
        return SamplerFailure(f"the vLLM server was lost: {words}. {self._server.last_words()}\n")

    def _own_folder(self) -> Path:
        """A folder of our own; at the program's end only the log of a failure is left of it."""
        if self._folder is None:
            if self.directory is not None:
                Path(self.directory).mkdir(parents=True, exist_ok=True)
            made = tempfile.mkdtemp(prefix="toolbrain-vllm-", dir=self.directory)
            self._folder = Path(made).resolve()
            weakref.finalize(self, _tidy, self._folder)
        return self._folder


def _check_url(url: str) -> None:
    """Errors: `ConfigurationError` for what is not the root of a server."""
    with suppress(ValueError):  # of the port
        parts = urlsplit(url)
        named = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
        if named and parts.username is None and not parts.path.rstrip("/").endswith("/v1"):
            return
    raise ConfigurationError(
        "VllmSampler(url=…) must be the root of a server, as in http://localhost:8000: without "
        "/v1, and with the key as api_key="
    )


def _tidy(folder: Path) -> None:
    for part in folder.glob("*/"):
        shutil.rmtree(part, ignore_errors=True)
    with suppress(OSError):  # not empty: it holds the log of a failure
        folder.rmdir()
