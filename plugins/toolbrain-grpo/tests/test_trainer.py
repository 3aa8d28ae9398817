"""GRPO through `Brain.train`: options, signal, what is kept, what `save` and `merge` write."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from toolbrain_grpo import Grpo

from toolbrain_core import Brain
from toolbrain_core.errors import ConfigurationError
from toolbrain_core.traces import read_rollouts


def snapshot(brain: Any) -> dict[str, Any]:
    return {n: p.detach().clone() for n, p in brain.policy.model.named_parameters()}


def changed(brain: Any, before: dict[str, Any]) -> list[str]:
    now = snapshot(brain)
    assert now.keys() == before.keys()
    return [name for name in now if not torch.equal(now[name], before[name])]


def distance(a: dict[str, Any], b: dict[str, Any]) -> float:
    """The relative L2 distance over all parameters."""
    apart = sum(float((a[n] - b[n]).square().sum()) for n in b)
    return float((apart / sum(float(w.square().sum()) for w in b.values())) ** 0.5)


def metrics_of(result: Any) -> list[dict[str, Any]]:
    lines = (result.run_dir / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["metrics"] for line in lines]


def index_reward(traces: list) -> list[float]:
    return [float(i % 2) for i in range(len(traces))]


def test_training_changes_the_adapter_and_nothing_else(make_brain, tasks) -> None:
    brain = make_brain(tasks_per_step=2, reward_func=index_reward)
    agent = brain.agent
    before, version = snapshot(brain), brain.policy.weights_version
    result = brain.train(tasks(3), name="run", num_iterations=2)
    assert result.algorithm == "grpo"
    assert result.steps == 4  # two passes of two and one task
    assert result.updates == 4
    assert result.no_signal is None
    moved = changed(brain, before)
    assert moved
    assert all(".lora_" in name for name in moved)
    assert brain.policy.weights_version > version
    assert brain.agent is agent
    rollouts = read_rollouts(result.run_dir / "rollouts.jsonl")
    assert len(rollouts) == 2 * 3 * 4
    assert {r.trace.turns[0].sampling.temperature for r in rollouts} == {1.0}
    logged = metrics_of(result)
    assert [m["updates"] for m in logged] == [1, 2, 3, 4]
    assert all(0 <= m["logprob_difference_max"] < 1e-3 for m in logged)
    assert all(m["grad_norm"] > 0 for m in logged)
    checkpoints = result.run_dir / "checkpoints"
    assert [path.name for path in checkpoints.iterdir()] == ["checkpoint-4"]


def test_two_runs_with_one_seed_are_the_same_and_another_seed_is_not(make_brain, tasks) -> None:
    """One attempt at a time: what else is in a batch of the sampler changes the last bits."""
    sampled, weights = [], []
    for seed, name in ((1, "a"), (1, "b"), (2, "c")):
        brain = make_brain(seed=seed, reward_func=index_reward, concurrency=1)
        result = brain.train(tasks(2), name=name)
        rollouts = read_rollouts(result.run_dir / "rollouts.jsonl")
        sampled.append([r.trace.turns[0].completion_ids for r in rollouts])
        weights.append({n: p for n, p in snapshot(brain).items() if "lora" in n})
    assert sampled[0] == sampled[1]
    assert sampled[0] != sampled[2]
    assert distance(weights[0], weights[1]) < 1e-5
    assert distance(weights[0], weights[2]) > 1e-2


def test_a_typed_algorithm_and_options_of_one_call(make_brain, tasks) -> None:
    brain = make_brain(algorithm=Grpo(learning_rate=5e-3, attempts=2), attempts=3)
    result = brain.train(tasks(1), name="run", updates_per_batch=2)
    config = json.loads((result.run_dir / "config.json").read_text())
    assert config["options"]["learning_rate"] == 1e-2  # the fixture's keyword
    assert config["options"]["attempts"] == 3
    assert config["options"]["updates_per_batch"] == 2
    assert len(read_rollouts(result.run_dir / "rollouts.jsonl")) == 3


# Signal ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [0.0, 1.0])
def test_groups_without_signal_are_sampled_again_with_other_seeds_then_skipped(
    make_brain, tasks, caplog, value
) -> None:
    brain = make_brain(reward_func=lambda trace: value, resample=2)
    before = snapshot(brain)
    result = brain.train(tasks(1), name="run")
    assert result.updates == 0
    assert result.steps == 1
    assert f"all 4 rewards were {value:g}" in result.no_signal
    assert any("nothing was learned" in w for w in result.warnings)
    assert "nothing was learned" in caplog.text
    assert changed(brain, before) == []
    [metrics] = metrics_of(result)
    assert metrics["groups"] == 1
    assert metrics["groups_with_signal"] == 0
    rollouts = read_rollouts(result.run_dir / "rollouts.jsonl")
    assert [r.attempt for r in rollouts] == list(range(12))
    assert len({r.trace.turns[0].completion_ids for r in rollouts}) > 4


def test_a_group_that_finds_signal_when_sampled_again_is_trained_on(make_brain, tasks) -> None:
    seen = []

    def second_time_lucky(traces: list) -> list[float]:
        seen.append(len(traces))
        return index_reward(traces) if len(seen) > 1 else [0.0] * len(traces)

    brain = make_brain(reward_func=second_time_lucky)
    result = brain.train(tasks(1), name="run")
    assert result.updates == 1
    assert seen == [4, 4]
    assert metrics_of(result)[0]["groups_with_signal"] == 1


def test_a_step_without_signal_between_others_changes_nothing(make_brain, tasks, watch) -> None:
    def only_some(traces: list, query: str) -> list[float]:
        return [0.5] * len(traces) if "1 + 2" in query else index_reward(traces)

    brain = make_brain(reward_func=only_some, resample=0, shuffle=False)
    updates = watch(brain.policy.model)
    result = brain.train(tasks(3), name="run")
    assert (result.steps, result.updates) == (3, 2)
    assert result.no_signal is None
    assert [bool(g) for g in updates.gradients] == [True, False, True]
    for name, weight in updates.weights[1].items():
        assert torch.equal(weight, updates.weights[2][name])


def test_why_nothing_was_learned_takes_every_step_into_account(make_brain, tasks) -> None:
    def by_task(trace: Any, query: str) -> float:
        return float("1 + 2" in query)

    brain = make_brain(reward_func=by_task, resample=0)
    result = brain.train(tasks(2), name="run")
    assert result.updates == 0
    assert "never within a group" in result.no_signal


# TRL's own fields --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "instead"),
    [
        ("num_generations", "attempts="),
        ("num_iterations", "updates_per_batch="),
        ("learning_rate", "learning_rate="),
        ("max_completion_length", "max_new_tokens="),
        ("use_vllm", "a sampler plugin"),
        ("top_p", "whole distribution"),
        ("output_dir", "run_dir="),
        ("bf16", "dtype="),
        ("seed", "seed="),
    ],
)
def test_a_field_that_toolbrain_owns_is_refused_with_what_to_use(
    make_brain, tasks, field, instead
) -> None:
    with pytest.raises(ConfigurationError) as refused:
        make_brain().train(tasks(1), name="run", trl={field: 1})
    assert f"'{field}'" in str(refused.value)
    assert instead in str(refused.value)


def test_a_field_that_trl_does_not_have_is_refused(make_brain, tasks) -> None:
    with pytest.raises(ConfigurationError, match=r"'learning_rat'.*GRPOConfig has no such field"):
        make_brain().train(tasks(1), name="run", trl={"learning_rat": 1})


def test_a_value_that_trl_refuses_is_one_message(make_brain, tasks) -> None:
    with pytest.raises(ConfigurationError, match="GRPOConfig refuses these options"):
        make_brain().train(tasks(1), name="run", schedule="no such schedule")


def test_fields_of_trl_pass_through(make_brain, tasks, watch) -> None:
    """One ratio for a whole sequence changes the gradient of a batch's second update."""
    gradients = []
    for level in ("token", "sequence"):
        brain = make_brain(updates_per_batch=2, trl={"importance_sampling_level": level})
        updates = watch(brain.policy.model)
        brain.train(tasks(1), name=level)
        gradients.append(updates.gradients)
    first, second = zip(*gradients, strict=True)
    assert distance(*first) < 1e-4
    assert distance(*second) > 1e-2


def test_schedule_and_warmup_reach_the_optimiser(make_brain, tasks) -> None:
    brain = make_brain(reward_func=index_reward, schedule="linear", warmup_steps=1)
    result = brain.train(tasks(3), name="run")
    assert [m["learning_rate"] for m in metrics_of(result)] == pytest.approx([0.0, 1e-2, 5e-3])


def test_a_checkpoint_may_not_split_a_batch(make_brain, tasks) -> None:
    with pytest.raises(ConfigurationError, match="checkpoint_every=3 must be a multiple of"):
        make_brain(checkpoint_every=3, updates_per_batch=2).train(tasks(1), name="run")


# What is kept ------------------------------------------------------------------------------------


def answers(agent: Any, tasks: list[dict[str, Any]]) -> list[str]:
    return [str(agent.run(task["query"])) for task in tasks]


def test_evaluation_and_the_agent_itself_give_the_same_greedy_answers(make_brain, tasks) -> None:
    brain = make_brain({"max_steps": 2})
    brain.train(tasks(1), name="run", learning_rate=2e-3)
    dozen = tasks(12)
    groups = brain.rollout(dozen)
    evaluated = [str(g.rollouts[0].trace.final_answer) for g in groups]
    assert evaluated == answers(brain.agent, dozen)
    assert len(set(evaluated)) > 3  # else it says little that they are the same


def test_what_was_saved_answers_the_same_when_loaded_and_when_merged(
    make_brain, make_agent, tasks, tmp_path
) -> None:
    from transformers import AutoModelForCausalLM

    brain = make_brain()
    untrained = answers(brain.agent, tasks(4))
    brain.train(tasks(1), name="run", learning_rate=5e-2)
    trained = answers(brain.agent, tasks(4))
    assert trained != untrained

    brain.save(tmp_path / "saved")
    facts = json.loads((tmp_path / "saved" / "toolbrain.json").read_text())
    assert facts["policy"]["lora"]["r"] == 16
    assert (tmp_path / "saved" / "tokenizer.json").is_file()
    loaded = Brain.load(tmp_path / "saved", make_agent(), progress=False)
    assert answers(loaded.agent, tasks(4)) == trained

    brain.merge(tmp_path / "merged")
    merged = make_agent()
    merged.model.model = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert answers(merged, tasks(4)) == trained
    assert answers(brain.agent, tasks(4)) == trained  # merging left the policy as it was


def test_nothing_of_the_trainer_stays_on_the_agents_model(make_brain, tasks) -> None:
    brain = make_brain(gradient_checkpointing=True)
    model, tokenizer = brain.agent.model.model, brain.agent.model.tokenizer
    before = (set(model.__dict__), tokenizer.padding_side, model.generation_config.to_dict())
    brain.train(tasks(1), name="run")
    after = (set(model.__dict__), tokenizer.padding_side, model.generation_config.to_dict())
    assert after == before
    assert not model.training
    assert not model.is_gradient_checkpointing
    brain.train(tasks(1), name="again")  # a second trainer on the same model
