"""On a real vLLM server: exact tokens, their log-probabilities, adapters, training."""

from __future__ import annotations

import itertools
import subprocess
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import httpx2
import pytest
import torch
from toolbrain_vllm.sampler import VllmSampler

from toolbrain_core.errors import ConfigurationError
from toolbrain_core.roles import Sampled
from toolbrain_core.traces import Sampling

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

PROMPT = tuple(range(100, 140))


@pytest.fixture(scope="module")
def policy(make_policy: Callable[..., Any], make_vllm: Callable[..., Any]) -> Any:
    """A policy in fp32 whose adapter does nothing, on a server."""
    return make_policy(sampler=make_vllm(), dtype="fp32")


def sample(
    policy: Any, seed: int = 0, prompt: tuple[int, ...] = PROMPT, **sampling: Any
) -> Sampled:
    future: Future[Sampled] = policy.sampler.generate(prompt, Sampling(**sampling), seed)
    return future.result(300)


def scored(policy: Any, sampled: Sampled, temperature: float) -> torch.Tensor:
    """Log-probabilities (tokens,) of what was sampled, by one plain forward pass."""
    ids = torch.tensor([[*PROMPT, *sampled.ids]])
    with torch.no_grad():
        logits = policy.model(input_ids=ids).logits[0].double() / temperature
    before = logits.log_softmax(-1)[len(PROMPT) - 1 : -1]
    return before.gather(1, ids[0, len(PROMPT) :, None])[:, 0]


def perturb(policy: Any, seed: int) -> None:
    torch.manual_seed(seed)
    with policy.training() as model, torch.no_grad():
        for name, weight in model.named_parameters():
            if "lora_B" in name:
                weight.normal_(0, 0.3)


@pytest.mark.parametrize("temperature", [1.0, 0.5, 1.7])
def test_log_probabilities_are_those_of_a_forward_pass_after_temperature(
    policy, temperature
) -> None:
    with policy.serving():
        sampled = sample(policy, temperature=temperature, max_new_tokens=16)
    assert len(sampled.ids) == 16 or sampled.finish_reason == "eos"
    ours = scored(policy, sampled, temperature)
    assert torch.allclose(ours, torch.tensor(sampled.logprobs).double(), atol=1e-3)


def test_greedy_decoding_is_that_of_generate_with_log_probabilities_at_temperature_1(
    policy,
) -> None:
    with policy.serving():
        sampled = sample(policy, temperature=0.0, max_new_tokens=16)
    whole = policy.model.generate(
        input_ids=torch.tensor([PROMPT]), do_sample=False, max_new_tokens=16
    )
    assert sampled.ids == tuple(whole[0, len(PROMPT) :].tolist())
    ours = scored(policy, sampled, 1.0)
    assert torch.allclose(ours, torch.tensor(sampled.logprobs).double(), atol=1e-3)


def test_a_seed_draws_the_same_tokens_and_another_seed_others(policy) -> None:
    with policy.serving():
        one, again, other = (sample(policy, seed, max_new_tokens=16) for seed in (1, 1, 2))
    assert one.ids == again.ids
    assert one.ids != other.ids


def test_completions_end_as_the_in_process_sampler_ends_them(policy) -> None:
    with policy.serving():
        free = sample(policy, temperature=0.0, max_new_tokens=12)
        assert (free.finish_reason, len(free.ids)) == ("length", 12)

        stop = policy.visible_text(free.ids[:5])[-3:]
        stopped = sample(policy, temperature=0.0, max_new_tokens=12, stop=("nowhere", stop))
        kept = next(n for n in range(1, 13) if stop in policy.visible_text(free.ids[:n]))
        assert (stopped.finish_reason, stopped.ids) == ("stop", free.ids[:kept])

        long = tuple(itertools.islice(itertools.cycle(PROMPT), policy.context_length - 4))
        full = sample(policy, prompt=long, temperature=0.0, max_new_tokens=12)
        assert (full.finish_reason, len(full.ids)) == ("context", 4)

        eos, policy.eos_ids = policy.eos_ids, frozenset({free.ids[3]})
        try:
            ended = sample(policy, temperature=0.0, max_new_tokens=12)
        finally:
            policy.eos_ids = eos
        first = free.ids.index(free.ids[3])
        assert (ended.finish_reason, ended.ids) == ("eos", free.ids[: first + 1])


def metric(policy: Any, name: str) -> float:
    text = httpx2.get(f"{policy.sampler._client.url}/metrics", trust_env=False).text
    lines = [line for line in text.splitlines() if line.startswith(f"vllm:{name}{{")]
    return sum(float(line.rpartition(" ")[2]) for line in lines)


def test_what_prompts_share_is_computed_once(policy) -> None:
    prompt = tuple(itertools.islice(itertools.cycle(PROMPT), 300))
    with policy.serving():
        sample(policy, prompt=prompt, max_new_tokens=1)
        before = metric(policy, "prefix_cache_hits_total")
        sample(policy, prompt=(*prompt, 5), max_new_tokens=1)
        assert metric(policy, "prefix_cache_hits_total") - before >= 128


def test_cancelling_frees_the_requests_place(policy) -> None:
    def running() -> float:
        return metric(policy, "num_requests_running")

    with policy.serving():
        eos, policy.eos_ids = policy.eos_ids, frozenset()
        future = policy.sampler.generate(PROMPT, Sampling(max_new_tokens=980), 0)
        policy.eos_ids = eos
        deadline = time.monotonic() + 60
        while not running():
            assert time.monotonic() < deadline
        assert future.cancel()
        while running():
            assert time.monotonic() < deadline


def test_each_update_is_what_the_server_samples_with(policy) -> None:
    with policy.serving():
        fresh = sample(policy, temperature=0.0, max_new_tokens=16)
    seen = [fresh.ids]
    for update in (1, 2):
        perturb(policy, update)
        with policy.serving():
            sampled = sample(policy, temperature=0.0, max_new_tokens=16)
        assert sampled.weights_version == policy.weights_version
        ours = scored(policy, sampled, 1.0)
        assert torch.allclose(ours, torch.tensor(sampled.logprobs).double(), atol=1e-3)
        seen.append(sampled.ids)
    assert len(set(seen)) == 3


def test_a_server_that_runs_already_serves_another_policy_if_it_is_on_the_same_model(
    policy, make_policy
) -> None:
    with policy.serving():
        own = policy.sampler._server
    given = {"url": own.url, "api_key": own.api_key}

    other = make_policy(sampler=VllmSampler(**given), dtype="fp32", lora={"r": 8})
    perturb(other, 3)
    with other.serving():
        sampled = sample(other, temperature=0.0, max_new_tokens=16)
    ours = scored(other, sampled, 1.0)
    assert torch.allclose(ours, torch.tensor(sampled.logprobs).double(), atol=1e-3)
    other.sampler.close()
    named = httpx2.get(f"{own.url}/v1/models", headers=bearer(own.api_key), trust_env=False).json()
    assert str(other.sampler._folder) not in str(named)

    changed = make_policy(sampler=VllmSampler(**given), weights=1)
    with pytest.raises(ConfigurationError, match="does not serve the agent's"), changed.serving():
        pass
    large = make_policy(sampler=VllmSampler(**given), lora={"r": 32})
    with pytest.raises(ConfigurationError, match=r"(?i)HTTP \d+.*rank"), large.serving():
        pass
    with pytest.raises(ConfigurationError, match="the API key"):
        make_policy(sampler=VllmSampler(url=own.url)).serving().__enter__()
    with policy.serving():  # which none of this has disturbed
        assert sample(policy, max_new_tokens=4).ids


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def test_grpo_trains_on_the_server_and_a_run_that_lost_it_goes_on_with_a_new_one(
    make_vllm, lose_and_resume
) -> None:
    sampler = make_vllm()
    run = lose_and_resume(sampler)
    assert (run.checkpoint / "toolbrain.json").is_file()
    assert str(run.checkpoint) in str(run.failure)
    [log] = [word for word in str(run.failure).split() if word.endswith(".log,")]
    written = Path(log.strip(",")).read_text()
    assert not any(key in written for key in run.keys)

    assert (run.result.steps, run.result.updates) == (4, 4)
    assert [step["attempts_masked"] for step in run.metrics] == [0, 0, 0, 0]
    assert max(step["logprob_difference_max"] for step in run.metrics) < 1e-2

    assert sampler._server is not None
    group = sampler._server.process.pid
    assert members(group)
    sampler.close()
    deadline = time.monotonic() + 30
    while members(group):
        assert time.monotonic() < deadline, "the server's processes are still there"


def members(group: int) -> list[str]:
    """The processes of a group that have not ended."""
    shown = subprocess.run(
        ["pgrep", "-r", "D,R,S", "-g", str(group)], capture_output=True, text=True
    )
    return shown.stdout.split()
