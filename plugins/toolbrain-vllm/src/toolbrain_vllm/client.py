"""What the sampler asks of a vLLM server, over HTTP."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

import httpx2
from attrs import frozen

from toolbrain_core.errors import ConfigurationError, SamplerFailure

T = TypeVar("T")

#: Seconds that a server may take to answer what needs little of the model; completions may take
#: any time.
_PATIENCE = 60.0
#: Characters that are quoted of an answer that nobody expected.
_QUOTED = 500


@frozen
class BaseModel:
    """The model that a server loaded: its name in requests, and the longest sequence in tokens."""

    name: str
    context_length: int


class VllmClient:
    """One server's endpoints. Requests run on an event loop in a thread of its own: cancelling one
    closes its connection, which makes the server drop it.

    `direct` passes by the proxies of the environment.
    """

    def __init__(self, url: str, api_key: str | None, direct: bool):
        self.url = url
        self._http = httpx2.AsyncClient(
            base_url=url,
            headers={"Authorization": f"Bearer {api_key}"} if api_key else {},
            trust_env=not direct,
            timeout=_PATIENCE,
            # Servers close idle connections, and a request may be on its way just then.
            limits=httpx2.Limits(max_connections=None, max_keepalive_connections=0),
        )
        self._tasks: set[asyncio.Task[Any]] = set()
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._run, name="toolbrain-vllm", daemon=True).start()

    def submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Run a coroutine on the loop."""
        return asyncio.run_coroutine_threadsafe(self._tracked(work), self._loop)

    def ask(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the loop, and wait for its result."""
        return self.submit(work).result()

    def cancel_all(self) -> None:
        """Cancel what was submitted, and wait until it has ended."""
        asyncio.run_coroutine_threadsafe(self._cancel_all(), self._loop).result()

    def close(self) -> None:
        """Close every connection, and end the thread."""
        self.cancel_all()
        asyncio.run_coroutine_threadsafe(self._http.aclose(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)

    async def is_healthy(self) -> bool:
        """Whether the server answers and its engine works."""
        return await self._succeeds("/health")

    async def is_ready(self) -> bool:
        """Whether the server answers and takes our key, so that it is not somebody else's."""
        return await self._succeeds("/v1/models")

    async def complete(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """The answer to a completion request. Errors: `httpx2.HTTPError`; `ConfigurationError` for
        an answer that is no JSON."""
        response = await self._http.post("/v1/completions", json=request, timeout=None)
        return self._json(response.raise_for_status())

    async def base_model(self) -> BaseModel:
        """Errors: `SamplerFailure` where no server answers, `ConfigurationError` where it refuses
        the key or is not vLLM."""
        answer = self._json(await self._request("/v1/models"))
        # Adapters have no length of their own.
        lengths = {
            model["id"]: length
            for model in answer.get("data", [])
            if (length := model.get("max_model_len"))
        }
        if not lengths:
            raise self._not_vllm(str(answer))
        return BaseModel(*next(iter(lengths.items())))

    async def prompt_logprobs(self, model: str, ids: Sequence[int]) -> list[float]:
        """Log-probabilities of all ids but the first by `model`, the base or an adapter.

        Errors: as `base_model`.
        """
        ask = {"model": model, "prompt": list(ids), "max_tokens": 1, "prompt_logprobs": 0}
        answer = self._json(await self._request("/v1/completions", ask))
        try:
            places = answer["choices"][0]["prompt_logprobs"]
            pairs = zip(ids[1:], places[1:], strict=True)
            return [float(place[str(token)]["logprob"]) for token, place in pairs]
        except (LookupError, TypeError, ValueError):
            raise self._not_vllm(str(answer)) from None

    async def highest_logprob(self, model: str, ids: Sequence[int], temperature: float) -> float:
        """The log-probability of the most probable next token. Errors: as `base_model`."""
        ask = {"model": model, "prompt": list(ids), "max_tokens": 1, "temperature": temperature}
        answer = self._json(await self._request("/v1/completions", {**ask, "logprobs": 1}))
        try:
            return float(max(answer["choices"][0]["logprobs"]["top_logprobs"][0].values()))
        except (LookupError, TypeError, AttributeError):
            raise self._not_vllm(str(answer)) from None

    async def load_adapter(self, path: str) -> None:
        """Load the adapter in a folder, under its path as name.

        Errors: as `base_model`; `ConfigurationError` where the server refuses the adapter.
        """
        await self._request("/v1/load_lora_adapter", {"lora_name": path, "lora_path": path})

    async def unload_adapter(self, path: str) -> None:
        """Forget an adapter. A server that does not know it has been started anew meanwhile."""
        await self._succeeds("/v1/unload_lora_adapter", {"lora_name": path})

    async def _send(self, path: str, body: Mapping[str, Any] | None) -> httpx2.Response:
        return await self._http.request("GET" if body is None else "POST", path, json=body)

    async def _succeeds(self, path: str, body: Mapping[str, Any] | None = None) -> bool:
        try:
            return (await self._send(path, body)).is_success
        except httpx2.HTTPError:
            return False

    async def _request(self, path: str, body: Mapping[str, Any] | None = None) -> httpx2.Response:
        """A response that is a success. Errors: as `base_model`."""
        try:
            response = await self._send(path, body)
        except httpx2.HTTPError as error:
            raise SamplerFailure(
                f"no vLLM server answers at {self.url}: {type(error).__name__}: {error}"
            ) from error
        if response.is_success:
            return response
        said = _quoted(response.text)
        if response.is_server_error and not await self.is_healthy():
            raise SamplerFailure(f"the vLLM server at {self.url} broke down: {said}")
        if response.status_code in (401, 403):
            raise ConfigurationError(
                f"the vLLM server at {self.url} refuses the API key: give VllmSampler(api_key=…)"
            )
        raise ConfigurationError(
            f"the vLLM server at {self.url} refuses {path}: HTTP {response.status_code}: {said}. "
            "What it must be started with is in toolbrain-vllm's README."
        )

    def _json(self, response: httpx2.Response) -> dict[str, Any]:
        try:
            answer = response.json()
        except ValueError:
            raise self._not_vllm(response.text) from None
        if not isinstance(answer, dict):
            raise self._not_vllm(response.text)
        return answer

    def _not_vllm(self, said: str) -> ConfigurationError:
        return ConfigurationError(f"what answers at {self.url} is not vLLM: {_quoted(said)}")

    def _run(self) -> None:
        self._loop.run_forever()
        self._loop.close()

    async def _tracked(self, work: Coroutine[Any, Any, T]) -> T:
        task = asyncio.current_task()
        assert task is not None  # we run on the loop
        self._tasks.add(task)
        try:
            return await work
        finally:
            self._tasks.discard(task)

    async def _cancel_all(self) -> None:
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _quoted(text: str) -> str:
    """The beginning of what a server said."""
    text = text.strip()
    return text if len(text) <= _QUOTED else f"{text[:_QUOTED]}…"
