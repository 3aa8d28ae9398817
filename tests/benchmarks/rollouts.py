"""Rollouts: a group of attempts, sampled by us and by others.

    python tests/benchmarks/rollouts.py [--prompt 1800] [--group 8] [--new 64] [--turns 1]
                                        [--dtype fp32|bf16] [--vllm PYTHON] [--repeats 3]

All attempts begin with the same prompt and sample exactly `new` tokens at temperature 1, with a
LoRA of rank 16 on all linear layers. With several turns, each attempt gets 40 tokens of its own
after each answer. The others are transformers' `generate` on the whole batch, and its continuous
batching with prefix sharing, on the same model. `--vllm` names the Python of an environment that
has vLLM; handing the adapter over to it counts as well, as entering `serving()` does for us.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from prompts import OBSERVATION, observation_ids, prompt_ids
from sides import Measure, Side, measured_in_turn, ours_against, parser, run, running

OTHERS = ("generate", "continuous_batching")

Ids = list[list[int]]
#: Prompts in, as many completions out.
Generate = Callable[[Ids], Ids]


def main() -> None:
    run(parse(), SIDES, compare)


def parse() -> argparse.Namespace:
    made = parser(__doc__ or "")
    made.add_argument("--prompt", type=int, default=1800, help="tokens of the prompt")
    made.add_argument("--group", type=int, default=8, help="attempts")
    made.add_argument("--new", type=int, default=64, help="tokens sampled in each turn")
    made.add_argument("--turns", type=int, default=1)
    made.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32")
    made.add_argument("--vllm", metavar="PYTHON", help="the Python that has vLLM")
    return made.parse_args()


def compare(options: argparse.Namespace) -> dict[str, Any]:
    shapes = {key: getattr(options, key) for key in ("prompt", "group", "new", "turns", "dtype")}
    with tempfile.TemporaryDirectory() as directory:
        sides = [Side(name, directory) for name in ("ours", *OTHERS)]
        with running(*sides):
            if not options.vllm:
                measured = measured_in_turn(sides, options.repeats)
            else:
                vllm = Side("vllm", directory, options.vllm, vllm_environment(options.vllm))
                with running(vllm):  # after ours, which left the adapter
                    measured = measured_in_turn([*sides, vllm], options.repeats)
    line = {"name": "rollouts", **shapes, **ours_against(OTHERS, measured), "sides": measured}
    return {**line, "vllm_s": measured["vllm"]["median_s"]} if options.vllm else line


def conversation(
    options: argparse.Namespace, tokenizer: Any, repeat: int, generate: Generate
) -> None:
    """All turns of all attempts; every turn waits for the whole group."""
    prompts = [prompt_ids(tokenizer, options.prompt, repeat)] * options.group
    for turn in range(options.turns):
        answers = generate(prompts)
        lengths = {len(answer) for answer in answers}
        assert lengths == {options.new}, f"answers of {lengths} tokens, not of {options.new}"
        prompts = [
            [*prompt, *answer, *observation_ids(tokenizer, attempt, turn)]
            for attempt, (prompt, answer) in enumerate(zip(prompts, answers, strict=True))
        ]


def longest(options: argparse.Namespace) -> int:
    """Tokens of an attempt at its end."""
    length: int = options.prompt + options.turns * (options.new + OBSERVATION)
    return length


def ours(options: argparse.Namespace) -> Measure:
    from policies import load_policy, shake

    from toolbrain_core.traces import Sampling

    policy = load_policy(options.dtype)
    shake(policy.model)
    policy.save(options.directory / "adapter")
    sampling = Sampling(temperature=1.0, max_new_tokens=options.new)

    def generate(prompts: Ids) -> Ids:
        seeded = enumerate(prompts)
        futures = [policy.sampler.generate(prompt, sampling, seed) for seed, prompt in seeded]
        return [list(future.result().ids) for future in futures]

    def measure(repeat: int) -> dict[str, float]:
        started = time.perf_counter()
        with policy.serving():
            conversation(options, policy.tokenizer, repeat, generate)
        return {"seconds": time.perf_counter() - started}

    return measure


def by_generate(options: argparse.Namespace) -> Measure:
    import torch
    from policies import load_policy, shake

    policy = load_policy(options.dtype)
    shake(policy.model)

    def generate(prompts: Ids) -> Ids:
        ids = torch.tensor(prompts)
        out = policy.model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            pad_token_id=policy.tokenizer.pad_token_id,
            max_new_tokens=options.new,
            min_new_tokens=options.new,
            **SAMPLING,
        )
        answers: Ids = out[:, ids.shape[1] :].tolist()
        return answers

    def measure(repeat: int) -> dict[str, float]:
        started = time.perf_counter()
        with torch.no_grad():
            conversation(options, policy.tokenizer, repeat, generate)
        return {"seconds": time.perf_counter() - started}

    return measure


#: The whole distribution, for transformers' generation config.
SAMPLING = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}


def by_continuous_batching(options: argparse.Namespace) -> Measure:
    from policies import load_policy, shake
    from transformers import ContinuousBatchingConfig, GenerationConfig

    policy = load_policy(options.dtype)
    shake(policy.model)
    # Its own choice would fill most of the machine's memory with keys and values.
    pages = -(-longest(options) // PAGE) + 1
    manager = policy.ref.model.init_continuous_batching(
        GenerationConfig(eos_token_id=-1, max_new_tokens=options.new, **SAMPLING),
        ContinuousBatchingConfig(
            page_size=PAGE,
            num_blocks=pages * options.group,
            max_batch_tokens=max(2048, options.group),
        ),
    )
    manager.start()

    def generate(prompts: Ids) -> Ids:
        names = manager.add_requests(prompts, max_new_tokens=options.new)
        answers: dict[str, list[int]] = {}
        while len(answers) < len(names):
            result = manager.get_result(timeout=1)
            if result is not None and result.error:
                raise RuntimeError(f"continuous batching failed: {result.error}")
            if result is not None and result.is_finished():
                answers[result.request_id] = result.generated_tokens
            elif not manager.is_running():
                raise RuntimeError("continuous batching stopped; see its log above")
        return [answers[name] for name in names]

    def measure(repeat: int) -> dict[str, float]:
        started = time.perf_counter()
        conversation(options, policy.tokenizer, repeat, generate)
        return {"seconds": time.perf_counter() - started}

    return measure


PAGE = 64  # tokens, of keys and values that are shared or not


def vllm_environment(python: str) -> dict[str, str]:
    """What vLLM needs to run well on two cores and in one process."""
    openmp = Path(python).parent.parent / "lib" / "libiomp5.so"
    return {
        **({"LD_PRELOAD": str(openmp)} if openmp.exists() else {}),
        "KMP_BLOCKTIME": "0",  # idle threads sleep: the other sides are measured meanwhile
        "OMP_WAIT_POLICY": "PASSIVE",
        "VLLM_CPU_OMP_THREADS_BIND": "0-1",
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    }


def by_vllm(options: argparse.Namespace) -> Measure:
    from transformers import AutoTokenizer
    from vllm import LLM, SamplingParams
    from vllm.lora.request import LoRARequest

    adapter = options.directory / "adapter"
    config = json.loads((adapter / "adapter_config.json").read_text(encoding="utf-8"))
    tokenizer = AutoTokenizer.from_pretrained(adapter)
    engine = LLM(
        model=config["base_model_name_or_path"],
        dtype={"fp32": "float32", "bf16": "bfloat16"}[options.dtype],
        max_model_len=longest(options),
        enable_prefix_caching=True,
        enable_lora=True,
        max_lora_rank=config["r"],
        max_loras=1,
    )
    sampling = SamplingParams(
        temperature=1.0, max_tokens=options.new, ignore_eos=True, logprobs=0, detokenize=False
    )

    def measure(repeat: int) -> dict[str, float]:
        def generate(prompts: Ids) -> Ids:
            requests = [{"prompt_token_ids": prompt} for prompt in prompts]
            outputs = engine.generate(requests, sampling, lora_request=weights, use_tqdm=False)
            return [list(output.outputs[0].token_ids) for output in outputs]

        started = time.perf_counter()
        handed_over = shutil.copytree(adapter, options.directory / f"adapter-{repeat}")
        weights = LoRARequest(f"adapter-{repeat}", repeat + 1, str(handed_over))
        conversation(options, tokenizer, repeat, generate)
        return {"seconds": time.perf_counter() - started}

    return measure


SIDES = {
    "ours": ours,
    "generate": by_generate,
    "continuous_batching": by_continuous_batching,
    "vllm": by_vllm,
}

if __name__ == "__main__":
    main()
