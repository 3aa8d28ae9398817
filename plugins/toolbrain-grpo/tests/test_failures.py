"""What goes wrong in a run, and what it costs."""

from __future__ import annotations

import itertools
import json
import math
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from smolagents import CodeAgent, TransformersModel

from toolbrain_core import Brain
from toolbrain_core.errors import (
    ConfigurationError,
    DataError,
    NotServed,
    RunDirectoryError,
    SamplerFailure,
    TrainingError,
)
from toolbrain_core.hookspecs import hookimpl
from toolbrain_core.traces import read_rollouts


def metrics_of(result: Any) -> list[dict[str, Any]]:
    lines = (result.run_dir / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["metrics"] for line in lines]


def index_reward(traces: list) -> list[float]:
    return [float(i + 1) for i in range(len(traces))]


def first_attempt_only(act: Any) -> Any:
    """A `setup` that does something in the first attempt of the run."""
    count = itertools.count()
    return lambda task: act() if next(count) == 0 else None


def broken() -> None:
    raise OSError("the database is down")


@pytest.mark.parametrize("on_error", ["mask", "zero"])
def test_an_attempt_lost_to_infrastructure_adds_nothing_to_train_on(
    make_brain, tasks, on_error
) -> None:
    brain = make_brain(
        reward_func=index_reward, setup=first_attempt_only(broken), on_error=on_error, resample=0
    )
    result = brain.train(tasks(1), name="run")
    assert result.updates == 1
    [metrics] = metrics_of(result)
    assert metrics["attempts_masked"] == 1
    rollouts = read_rollouts(result.run_dir / "rollouts.jsonl")
    sampled = sum(len(t.completion_ids) for r in rollouts for t in r.trace.turns)
    assert metrics["trained_tokens"] == sampled
    lost = [r for r in rollouts if r.trace.error]
    assert [r.trace.error.kind for r in lost] == ["infrastructure"]
    assert "the database is down" in lost[0].trace.error.message


def test_zero_for_lost_attempts_makes_a_group_of_equal_scores_teach(make_brain, tasks) -> None:
    updates = {}
    for on_error in ("mask", "zero"):
        brain = make_brain(
            reward_func=lambda trace: 1.0,
            setup=first_attempt_only(broken),
            on_error=on_error,
            resample=0,
        )
        updates[on_error] = brain.train(tasks(1), name=on_error).updates
    assert updates == {"mask": 0, "zero": 1}


def test_an_attempt_beyond_the_time_limit_is_masked_and_delays_nobody(make_brain, tasks) -> None:
    brain = make_brain(
        reward_func=index_reward,
        setup=first_attempt_only(lambda: time.sleep(60)),
        time_limit=5,
        resample=0,
    )
    started = time.monotonic()
    result = brain.train(tasks(1), name="run")
    assert time.monotonic() - started < 30
    assert result.updates == 1
    assert metrics_of(result)[0]["attempts_masked"] == 1
    rollouts = read_rollouts(result.run_dir / "rollouts.jsonl")
    assert [r.trace.error.kind for r in rollouts if r.trace.error] == ["time_limit"]


def test_the_policys_own_mistakes_are_trained_on(make_brain, tasks) -> None:
    """A random model writes nothing that an agent could parse."""
    result = make_brain({"max_steps": 2}).train(tasks(1), name="run")
    rollouts = read_rollouts(result.run_dir / "rollouts.jsonl")
    assert all(r.trace.turns[0].error.kind == "format" for r in rollouts)
    [metrics] = metrics_of(result)
    assert metrics["attempts_masked"] == 0
    sampled = sum(len(t.completion_ids) for r in rollouts for t in r.trace.turns)
    assert metrics["trained_tokens"] == sampled


def test_a_reward_that_fails_masks_its_attempt_and_says_so(make_brain, tasks) -> None:
    def picky(traces: list) -> list[Any]:
        return [math.nan, 1.0, 2.0, 3.0]

    result = make_brain(reward_func=picky, resample=0).train(tasks(1), name="run")
    assert result.updates == 1
    assert metrics_of(result)[0]["attempts_masked"] == 1
    rewards = [r.reward for r in read_rollouts(result.run_dir / "rollouts.jsonl")]
    assert rewards[0].score is None
    assert rewards[0].failure.kind == "reward"


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"reward_func": lambda trace: 1 / 0}, "most often: the reward failed"),
        ({"setup": lambda task: broken()}, "most often: infrastructure"),
    ],
)
def test_a_run_in_which_nothing_could_be_scored_says_what_happened(
    make_brain, tasks, options, says
) -> None:
    result = make_brain(resample=0, **options).train(tasks(2), name="run")
    assert result.updates == 0
    assert "no attempt could be scored (8 attempts" in result.no_signal
    assert says in result.no_signal
    assert any(says in warning for warning in result.warnings)


class Poison:
    """Makes one weight infinite once the rollouts of the second step are done."""

    def __init__(self, model: Any):
        self.parameter = next(p for n, p in model.named_parameters() if "lora_B" in n)
        self.groups = 0
        self.before: Any = None

    @hookimpl
    def toolbrain_group_finished(self, run: Any, group: Any) -> None:
        self.groups += 1
        if self.groups == 2:
            self.before = self.parameter.detach().clone()
            with torch.no_grad():
                self.parameter[0, 0] = math.inf


def test_a_loss_that_is_not_finite_stops_before_the_step_and_keeps_the_last_checkpoint(
    make_brain, make_agent, tasks, tmp_path, watch
) -> None:
    brain = make_brain(reward_func=index_reward, checkpoint_every=1)
    updates = watch(brain.policy.model)
    poison = Poison(brain.policy.model)
    with (
        brain.plugins.observing(poison),
        pytest.raises(TrainingError, match="loss of step 2 is not finite") as stopped,
    ):
        brain.train(tasks(3), name="run")
    assert len(updates.weights) == 1  # the optimiser took the first step only
    poisoned = poison.before.clone()
    poisoned[0, 0] = math.inf
    assert torch.equal(poison.parameter, poisoned)  # and the failed step changed nothing

    run = tmp_path / "runs" / "run"
    assert [p.name for p in (run / "checkpoints").glob("*-*")] == ["checkpoint-1"]
    assert str(run / "checkpoints" / "checkpoint-1") in str(stopped.value)
    kept = Brain.load(run / "checkpoints" / "checkpoint-1", make_agent(), progress=False)
    weights = dict(kept.policy.model.named_parameters())
    name = next(n for n in weights if "lora_B" in n)
    assert torch.equal(weights[name], poison.before)
    assert len((run / "metrics.jsonl").read_text().splitlines()) == 1
    assert (run / "report.json").is_file()


def test_a_sampler_that_breaks_down_ends_the_run_which_can_be_resumed(
    make_brain, tasks, tmp_path
) -> None:
    attempts = itertools.count(1)
    device: dict[str, str] = {}

    def break_down(task: Any) -> None:
        if next(attempts) == 10:  # the second of the third step
            device["state"] = "on fire"

    def look(*_: Any) -> None:
        if device:
            raise RuntimeError(f"the device is {device['state']}")

    options = {"reward_func": index_reward, "resample": 0, "checkpoint_every": 0}
    brain = make_brain(setup=break_down, concurrency=1, **options)
    brain.policy.ref.model.register_forward_pre_hook(look)
    with pytest.raises(SamplerFailure, match="the device is on fire") as lost:
        brain.train(tasks(4), name="run")
    kept = tmp_path / "runs" / "run" / "checkpoints" / "checkpoint-2"
    assert (kept / "toolbrain.json").is_file()
    assert f"The last good checkpoint is {kept}" in str(lost.value)
    assert "resume=True" in str(lost.value)

    device.clear()
    result = brain.train(tasks(4), name="run", resume=True)
    assert (result.steps, result.updates) == (4, 4)
    assert [m["attempts_masked"] for m in metrics_of(result)] == [0, 0, 0, 0]


def huge_reward(traces: list) -> list[float]:
    return [1e37, -1e37, 1e37, -1e37]


def test_a_gradient_that_is_not_finite_stops_too_and_what_was_learned_is_saved(
    make_brain, tasks, tmp_path
) -> None:
    def reward(traces: list, query: str) -> list[float]:
        return huge_reward(traces) if "1 + 2" in query else index_reward(traces)

    brain = make_brain(reward_func=reward, scale_rewards="none", shuffle=False, max_grad_norm=0)
    with pytest.raises(TrainingError, match="of step 2 is not finite") as stopped:
        brain.train(tasks(2), name="run")
    checkpoint = tmp_path / "runs" / "run" / "checkpoints" / "checkpoint-1"  # not asked for
    assert str(checkpoint) in str(stopped.value)
    marker = json.loads((checkpoint / "toolbrain.json").read_text())
    assert (marker["step"], marker["metrics"]["updates"]) == (1, 1)


# Bad input ---------------------------------------------------------------------------------------


def test_a_checkpoint_that_cannot_be_written_is_one_message_and_the_last_one_stays(
    make_brain, tasks, tmp_path, monkeypatch
) -> None:
    brain = make_brain(checkpoint_every=1, keep_checkpoints=1)
    tokenizer, write = type(brain.policy.tokenizer), type(brain.policy.tokenizer).save_pretrained
    calls = itertools.count()

    def full_at_the_second(*args: Any, **kwargs: Any) -> Any:
        if next(calls):
            raise Exception("No space left on device (os error 28)")  # as tokenizers does
        return write(*args, **kwargs)

    monkeypatch.setattr(tokenizer, "save_pretrained", full_at_the_second)
    with pytest.raises(RunDirectoryError, match=r"checkpoint-2: No space.*checkpoint-1\. Make"):
        brain.train(tasks(3), name="run")
    checkpoints = tmp_path / "runs" / "run" / "checkpoints"
    assert [path.name for path in checkpoints.iterdir()] == ["checkpoint-1"]
    monkeypatch.setattr(tokenizer, "save_pretrained", write)
    assert brain.train(tasks(3), name="run", resume=True).steps == 3
    assert [path.name for path in checkpoints.iterdir()] == ["checkpoint-3"]


def test_a_model_without_a_template_is_refused_before_the_first_rollout(make_agent) -> None:
    agent = make_agent()
    agent.model.tokenizer.chat_template = None
    with pytest.raises(NotServed, match="has no chat template"):
        Brain(agent, algorithm="grpo", reward_func=index_reward)


def test_a_model_that_has_a_brain_already_is_refused(make_brain) -> None:
    brain = make_brain()
    with pytest.raises(NotServed, match="already carries an adapter"):
        Brain(brain.agent, algorithm="grpo", reward_func=index_reward)


def test_an_option_of_nobody_lists_those_of_the_algorithm_and_of_the_policy(make_brain) -> None:
    with pytest.raises(ConfigurationError) as refused:
        make_brain(learning_rat=1e-3)
    message = str(refused.value)
    assert "no option 'learning_rat' (did you mean 'learning_rate'?)" in message
    assert "updates_per_batch" in message.split("grpo: ")[1].split(";")[0]
    assert "lora" in message.split("the policy: ")[1]


@pytest.mark.parametrize(
    "options",
    [
        {"attempts": 1},
        {"attempts": 2.5},
        {"loss_type": "ppo"},
        {"temperature": 0},
        {"beta": -1},
        {"trl": None},
        {"max_new_tokens": 0},
        {"shuffle": "False"},
        {"epsilon": "x"},
        {"dtype": "fp8"},
        {"tree": "banana"},
        {"max_batch": 0},
        {"max_context": -1},
        {"lora": True},
        {"lora": {"rank": 8}},
        {"lora": {"r": 0}},
        {"lora": {"target_modules": "nope"}},
        {"sampler": 5},
        {"concurrency": 0},
    ],
    ids=str,
)
def test_a_value_that_cannot_be_used_names_the_option_and_leaves_the_agent_alone(
    agent, options
) -> None:
    settings = {"algorithm": "grpo", "progress": False}
    with pytest.raises(ConfigurationError, match=f"(?i){next(iter(options))}"):
        Brain(agent, **{**settings, **options})
    assert not getattr(agent.model.model, "peft_config", None)


@pytest.fixture(scope="module")
def agent(model_dir: Path) -> CodeAgent:
    """One that no Brain is made of."""
    model = TransformersModel(model_id=str(model_dir), device_map="cpu", max_new_tokens=8)
    return CodeAgent(tools=[], model=model)


def test_a_folder_that_is_no_save_is_refused(make_agent, tmp_path) -> None:
    with pytest.raises(DataError, match=r"was not written by Brain.save"):
        Brain.load(tmp_path, make_agent())
