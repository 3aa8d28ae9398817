"""Supervised fine-tuning through `Brain.train`."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from toolbrain_transformers.demonstrations import demonstration_rows
from torch.optim.optimizer import register_optimizer_step_pre_hook

from toolbrain_core.errors import (
    ConfigurationError,
    DataError,
    RunDirectoryError,
    TrainingError,
)
from toolbrain_core.hookspecs import hookimpl
from toolbrain_core.report import read_metrics
from toolbrain_core.traces import Demonstration, Rollout, Task, Trace, read_rollouts

ANSWER = "<code>\nfinal_answer(add(2, 2))\n</code>"
COMPLETION = {"query": "What is 2 + 2?", "completion": ANSWER}
MESSAGES = {
    "query": "What is 2 + 2?",
    "messages": [
        {"role": "system", "content": "Use tools."},
        {"role": "user", "content": "What is 2 + 2?"},
        {"role": "assistant", "content": "First I add."},
        {"role": "user", "content": "Go on."},
        {"role": "assistant", "content": ANSWER},
    ],
}


def conversation(*lengths: int, query: str = "?") -> dict[str, Any]:
    """A conversation whose answers have about these numbers of tokens."""
    messages = []
    for n in lengths:
        messages += [
            {"role": "user", "content": "Count."},
            {"role": "assistant", "content": " ".join(["one"] * n)},
        ]
    return {"query": query, "messages": messages}


class Batches:
    """What the model is shown where rows go to it padded (`tree="off"`): every row and its labels.
    That the prefix tree trains the same is a test of its own."""

    def __init__(self, model: Any):
        self.rows: list[tuple[list[int], list[int]]] = []
        model.register_forward_pre_hook(self.note, with_kwargs=True)

    def note(self, _module: Any, args: Any, kwargs: Any) -> None:
        if "labels" in kwargs:
            rows = zip(kwargs["input_ids"], kwargs["attention_mask"], kwargs["labels"], strict=True)
            for ids, mask, labels in rows:
                self.rows.append((ids[mask.bool()].tolist(), labels[mask.bool()].tolist()))


@contextmanager
def gradients_of(brain: Any) -> Iterator[list[Any]]:
    """The gradients, as one vector, that each optimiser step inside gets."""
    noted: list[Any] = []

    def note(optimizer: Any, args: Any, kwargs: Any) -> None:
        parameters = [p.grad for p in brain.policy.model.parameters() if p.grad is not None]
        noted.append(torch.cat([gradient.flatten() for gradient in parameters]))

    handle = register_optimizer_step_pre_hook(note)
    try:
        yield noted
    finally:
        handle.remove()


def trained_texts(brain: Any, seen: Batches) -> list[str]:
    return [
        brain.policy.decode([token for token in labels if token != -100]) for _, labels in seen.rows
    ]


# Rows --------------------------------------------------------------------------------------------


def test_a_completion_is_trained_on_as_the_answer_to_the_agents_own_prompt(make_brain) -> None:
    brain = make_brain(tree="off")
    seen = Batches(brain.policy.model)
    result = brain.train([COMPLETION], name="run")
    assert result.updates == result.steps == 1
    assert trained_texts(brain, seen) == [f"{ANSWER}<|im_end|>"]
    [(ids, labels)] = seen.rows
    prompt = brain.policy.decode(ids[: labels.index(next(t for t in labels if t != -100))])
    assert "Solve the task by writing Python" in prompt
    assert prompt.endswith("<|im_start|>assistant\n")


def test_a_conversation_trains_all_that_the_assistant_wrote_and_nothing_else(make_brain) -> None:
    brain = make_brain(tree="off")
    seen = Batches(brain.policy.model)
    result = brain.train([MESSAGES], name="run")
    texts = "".join(trained_texts(brain, seen))
    assert texts.count("First I add.") == 1
    assert texts.count(ANSWER) == 1
    for other in ("Use tools.", "What is 2", "Go on."):
        assert other not in texts
    assert result.metrics["trained_tokens"] == sum(t != -100 for _, ls in seen.rows for t in ls)


def test_rollouts_train_their_recorded_tokens(make_brain) -> None:
    brain = make_brain({"max_steps": 2}, seed=3, tree="off")
    groups = brain.rollout([{"query": "What is 2 + 2?"}], 3, purpose="train")
    rollouts = groups[0].rollouts
    seen = Batches(brain.policy.model)
    brain.train(rollouts, name="run")
    sampled = sum(len(t.completion_ids) for r in rollouts for t in r.trace.turns)
    assert sum(label != -100 for _, labels in seen.rows for label in labels) == sampled
    rows = {(r.ids, r.trained) for x in rollouts for r in brain.policy.rows(x.trace)}
    assert rows == {
        (tuple(ids), tuple(label != -100 for label in labels)) for ids, labels in seen.rows
    }


def test_a_plan_that_the_agent_carried_out_is_a_demonstration(make_brain) -> None:
    from toolbrain_core.traces import ToolCall

    brain = make_brain(tree="off")
    task = Task("t", "What is 2 + 2?")
    demonstration = brain.demonstrate(task, [ToolCall("1", "add", {"a": 2, "b": 2}, via="code")])
    assert isinstance(demonstration, Demonstration)
    seen = Batches(brain.policy.model)
    brain.train([demonstration, COMPLETION], name="run")
    assert any("add(" in text and "final_answer(" in text for text in trained_texts(brain, seen))
    assert len(seen.rows) >= 2


def test_rows_in_are_rows_trained_whatever_their_length(make_brain) -> None:
    """TRL's default length is 1024, and it keeps the start: labels at the end would be lost."""
    brain = make_brain(tree="off")
    data = [conversation(n, query=f"q{n}") for n in (1, 3, 20, 150, 1100)]
    seen = Batches(brain.policy.model)
    result = brain.train(data, name="run", rows_per_step=2)
    assert result.metrics["rows"] == len(seen.rows) == 5
    assert result.steps == 3
    wanted = [r for d in data for r in _rows(brain, d)]
    assert sorted(len(row.ids) for row in wanted) == sorted(len(ids) for ids, _ in seen.rows)
    assert max(len(ids) for ids, _ in seen.rows) > 1100
    labelled = sorted(sum(label != -100 for label in labels) for _, labels in seen.rows)
    assert labelled == sorted(sum(row.trained) for row in wanted)
    assert labelled[-1] > 1100


def _rows(brain: Any, item: dict[str, Any]) -> Any:
    demonstration = Demonstration(Task("t", item["query"]), tuple(item["messages"]))
    return demonstration_rows(brain.policy, demonstration)


def test_the_prefix_tree_trains_the_same_rows_as_padded_batches(make_brain) -> None:
    """Rows that share a beginning, rows that do not, and one of more than 1024 tokens."""
    data = [COMPLETION, MESSAGES, {**MESSAGES, "query": "again"}, conversation(3, 9, 1100)]
    data = [{**item, "id": str(index)} for index, item in enumerate(data)]
    updates = []
    for tree in ("off", "require"):
        brain = make_brain(tree=tree)
        with gradients_of(brain) as gradients:
            result = brain.train(data, name=tree, max_grad_norm=0, rows_per_step=8)
        assert result.steps == len(gradients) == 1
        [row] = read_metrics(result.run_dir)
        updates.append((gradients[0], row["metrics"]["loss"]))
    (padded, padded_loss), (tree_like, tree_loss) = updates
    assert tree_loss == pytest.approx(padded_loss, rel=1e-5)
    assert (padded - tree_like).norm() < 1e-4 * padded.norm()


def test_a_row_beyond_the_context_is_named_before_any_training(make_brain) -> None:
    brain = make_brain(max_context=200)
    before = [p.detach().clone() for p in brain.policy.model.parameters()]
    long = {**conversation(500), "id": "the-long-one"}
    with pytest.raises(DataError, match=r"'the-long-one'.*beyond the context of 200"):
        brain.train([conversation(5), long], name="run")
    now = brain.policy.model.parameters()
    assert all(torch.equal(a, b) for a, b in zip(before, now, strict=True))


@pytest.mark.parametrize(
    "item",
    [
        {"query": "?", "messages": [{"role": "user", "content": "only a question"}]},
        Rollout(Task("0", "?"), Trace()),
    ],
)
def test_what_holds_nothing_to_learn_is_named(make_brain, item) -> None:
    with pytest.raises(DataError, match="'0' has no assistant text to train on"):
        make_brain().train([item], name="run")


# The run -----------------------------------------------------------------------------------------


def test_the_loss_falls_and_the_agent_does_as_it_was_shown(make_brain) -> None:
    brain = make_brain({"max_new_tokens": 24})
    result = brain.train([COMPLETION], name="run", num_iterations=40, learning_rate=1e-2)
    losses = [row["metrics"]["loss"] for row in read_metrics(result.run_dir)]
    assert len(losses) == 40
    assert losses[-1] < 0.2 * losses[0]
    assert brain.agent.run("What is 2 + 2?") == 4
    assert result.metrics["loss"] == pytest.approx(losses[-1])


@contextmanager
def optimizer_of() -> Iterator[dict[str, Any]]:
    """The optimiser that makes steps inside, under "it"."""
    found: dict[str, Any] = {}
    handle = register_optimizer_step_pre_hook(
        lambda optimizer, args, kwargs: found.update(it=optimizer)
    )
    try:
        yield found
    finally:
        handle.remove()


def test_in_bf16_the_agent_learns_with_fp32_lora_and_its_model_stays_in_bf16(make_brain) -> None:
    brain = make_brain({"max_new_tokens": 24}, dtype="bf16")
    base = brain.agent.model.model
    before = {n: p.detach().clone() for n, p in base.named_parameters() if ".lora_" not in n}
    with optimizer_of() as optimizer:
        brain.train([COMPLETION], name="run", num_iterations=40, learning_rate=1e-2)
    states = [state["exp_avg_sq"] for state in optimizer["it"].state.values()]
    assert states
    assert {state.dtype for state in states} == {torch.float32}
    after = dict(base.named_parameters())
    assert {after[name].dtype for name in before} == {torch.bfloat16}
    assert all(torch.equal(after[name], weight) for name, weight in before.items())
    assert brain.agent.run("What is 2 + 2?") == 4
    [group] = brain.rollout([COMPLETION])
    assert group.rollouts[0].trace.final_answer == 4


def test_a_run_is_not_resumed_in_another_precision(make_brain) -> None:
    brain = make_brain()
    brain.train([COMPLETION], name="run", max_updates=1)
    with pytest.raises(RunDirectoryError, match=r"compute_dtype \(was 'fp32', now 'bf16'\)"):
        make_brain(dtype="bf16").train([COMPLETION], name="run", max_updates=1, resume=True)


def test_max_updates_ends_the_run(make_brain) -> None:
    data = [conversation(n) | {"id": str(n)} for n in range(1, 7)]
    brain = make_brain()
    result = brain.train(data, name="short", rows_per_step=2, num_iterations=5, max_updates=4)
    assert result.updates == result.steps == 4
    result = brain.train(data, name="all", rows_per_step=2, num_iterations=2)
    assert result.steps == 6


@pytest.mark.parametrize("tree", ["off", "require"])
def test_micro_batches_do_not_change_the_gradient(make_brain, tree) -> None:
    data = [conversation(n) | {"id": str(n)} for n in (2, 30, 7, 60)]
    gradients: list[Any] = []
    for tokens in (100_000, 1):
        brain = make_brain(tree=tree)
        options = {"rows_per_step": 4, "max_grad_norm": 0, "shuffle": False}
        with gradients_of(brain) as noted:
            brain.train(data, name=f"run-{tokens}", max_tokens_per_step=tokens, **options)
        gradients += noted
    whole, pieces = gradients
    assert whole.norm() > 0
    assert (whole - pieces).norm() < 1e-4 * whole.norm()


def test_sft_and_then_grpo_is_two_calls_on_one_brain(make_brain, tmp_path) -> None:
    """The policy survives; the reference of GRPO is what SFT made of it."""
    brain = make_brain(reward_func=lambda traces: [float(i) for i in range(len(traces))])
    brain.train([COMPLETION], name="sft", num_iterations=3, learning_rate=1e-2)
    learned = {n: p.detach().clone() for n, p in brain.policy.model.named_parameters()}
    result = brain.train(
        [{"query": "What is 2 + 2?"}],
        algorithm="grpo",
        name="grpo",
        attempts=4,
        beta=0.1,
        learning_rate=1e-4,
    )
    assert result.updates == 1
    [row] = read_metrics(result.run_dir)
    assert row["metrics"]["kl"] == pytest.approx(0, abs=1e-5)  # it began as its own reference
    now = dict(brain.policy.model.named_parameters())
    assert now.keys() == learned.keys()
    apart = max(float((now[n].detach() - learned[n]).abs().max()) for n in now)
    assert 0 < apart < 2e-4  # one small step from what was learned
    rollouts = read_rollouts(result.run_dir / "rollouts.jsonl")
    versions = {r.trace.turns[0].weights_version for r in rollouts}
    assert len(versions) == 1
    assert min(versions) > 0  # those after SFT


class Stop:
    @hookimpl
    def toolbrain_step_finished(self, run: Any, step: int, metrics: Any) -> None:
        if step == 3:
            run.stop.set()


def test_an_interrupted_run_goes_on_to_the_same_end(make_brain) -> None:
    data = [conversation(n) | {"id": str(n)} for n in range(1, 7)]
    options = {
        "rows_per_step": 2,
        "num_iterations": 2,
        "learning_rate": 1e-3,
        "schedule": "linear",
    }
    ends = []
    for name, interrupt in (("whole", False), ("stopped", True)):
        brain = make_brain()
        if interrupt:
            with brain.plugins.observing(Stop()), pytest.raises(KeyboardInterrupt):
                brain.train(data, name=name, **options)
            brain = make_brain()
        result = brain.train(data, name=name, resume=interrupt, **options)
        assert result.steps == 6
        rows = read_metrics(result.run_dir)
        named = brain.policy.model.named_parameters()
        ends.append(
            (
                torch.cat([p.detach().flatten() for n, p in named if ".lora_" in n]),
                [row["metrics"]["learning_rate"] for row in rows],
                [row["metrics"]["loss"] for row in rows],
            )
        )
    (whole, rates, losses), (stopped, other_rates, other_losses) = ends
    assert other_rates == rates
    assert other_losses == pytest.approx(losses, rel=1e-4)
    assert (whole - stopped).norm() < 1e-3 * whole.norm()


class Poison:
    """Makes one weight infinite after the first step."""

    def __init__(self, model: Any):
        self.parameter = next(p for n, p in model.named_parameters() if "lora_B" in n)

    @hookimpl
    def toolbrain_step_finished(self, run: Any, step: int, metrics: Any) -> None:
        with torch.no_grad():
            self.parameter[0, 0] = math.inf


def test_a_loss_that_is_not_finite_stops_and_keeps_the_last_checkpoint(
    make_brain, tmp_path
) -> None:
    brain = make_brain()
    poison = Poison(brain.policy.model)
    options = {"checkpoint_every": 1, "num_iterations": 3, "learning_rate": 1e-3}
    with (
        brain.plugins.observing(poison),
        pytest.raises(TrainingError, match=r"loss of step 2 is not finite.*checkpoint"),
    ):
        brain.train([COMPLETION], name="run", **options)
    run = tmp_path / "runs" / "run"
    assert len((run / "metrics.jsonl").read_text().splitlines()) == 1
    assert json.loads((run / "report.json").read_text())["steps"] == 1


# Options -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "says"),
    [
        ("max_length", "the rows"),
        ("packing", "the rows"),
        ("assistant_only_loss", "the rows"),
        ("learning_rate", "learning_rate="),
        ("per_device_train_batch_size", "rows_per_step="),
        ("no_such_field", "SFTConfig has no such field"),
    ],
)
def test_fields_of_trl_that_cannot_be_given_say_why(make_brain, field, says) -> None:
    with pytest.raises(ConfigurationError, match=f"'{field}'.*{says}"):
        make_brain().train([COMPLETION], name="run", trl={field: 1})


def test_fields_of_trl_pass_through(make_brain) -> None:
    """Another loss gives another gradient, and so other figures, of the same rows."""
    losses = []
    for trl in ({}, {"loss_type": "dft"}):
        result = make_brain().train([COMPLETION], name=f"run{len(losses)}", trl=trl)
        losses.append(read_metrics(result.run_dir)[0]["metrics"]["loss"])
    assert abs(losses[0] - losses[1]) > 0.1


@pytest.mark.parametrize("name", ["sft", "SFT", "supervised", "Supervised"])
def test_supervised_is_another_name_for_sft(make_brain, name) -> None:
    brain = make_brain(algorithm=name, max_updates=1)
    assert brain.train([COMPLETION], name="run").algorithm == "sft"
