"""The gradients of one batch, against a plain padded implementation in fp32 and in float64."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from toolbrain_core.hookspecs import hookimpl
from toolbrain_core.traces import Group, read_rollouts

TWO_TURNS = {"max_steps": 2}  # and the request for a last answer: three model calls


def groups_of(result: Any) -> list[Group]:
    """The groups of a run, in order of rollout, from its journal."""
    groups: list[list[Any]] = []
    for rollout in read_rollouts(result.run_dir / "rollouts.jsonl"):
        if not groups or groups[-1][0].task != rollout.task:
            groups.append([])
        groups[-1].append(rollout)
    return [Group(group[0].task, tuple(group)) for group in groups]


def snapshot(model: Any) -> dict[str, Any]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def with_weights(model: Any, weights: dict[str, Any], dtype: Any = torch.float32) -> Any:
    """A copy of the model with these weights, which computes in `dtype` throughout."""
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for name, parameter in twin.named_parameters():
            parameter.copy_(weights[name])
    twin = twin.to(dtype).eval()
    for norm in twin.modules():
        if type(norm).__name__ == "LlamaRMSNorm":  # its own forward goes through fp32
            norm.forward = _rms_norm(norm)
    return twin


def _rms_norm(norm: Any) -> Any:
    return lambda x: torch.nn.functional.rms_norm(
        x, norm.weight.shape, norm.weight, norm.variance_epsilon
    )


def plain_rows(brain: Any, group: Group) -> dict[str, Any]:
    """Rows of a group, padded on the right: every tensor is (rows, tokens)."""
    scores = torch.tensor([r.reward.score for r in group.rollouts], dtype=torch.float64)
    advantages = (scores - scores.mean()) / (scores.std() + 1e-4)
    rows = [
        (row, float(advantage))
        for rollout, advantage in zip(group.rollouts, advantages, strict=True)
        for row in brain.policy.rows(rollout.trace)
    ]
    shape = (len(rows), max(len(row.ids) for row, _ in rows))
    table = {
        "ids": torch.zeros(shape, dtype=torch.long),
        "mask": torch.zeros(shape, dtype=torch.long),
        "trained": torch.zeros(shape, dtype=torch.float64),
        "recorded": torch.zeros(shape, dtype=torch.float64),
        "advantage": torch.zeros(shape, dtype=torch.float64),
    }
    for i, (row, advantage) in enumerate(rows):
        n = len(row.ids)
        table["ids"][i, :n] = torch.tensor(row.ids)
        table["mask"][i, :n] = 1
        table["trained"][i, :n] = torch.tensor(row.trained, dtype=torch.float64)
        table["recorded"][i, :n] = torch.tensor(row.logprobs, dtype=torch.float64)
        table["advantage"][i, :n] = advantage
    return table


def plain_logps(model: Any, rows: dict[str, Any], temperature: float) -> Any:
    """(rows, tokens - 1): log-probability of each trained token after the first; 0 elsewhere."""
    llama = model.get_base_model() if hasattr(model, "get_base_model") else model
    states = llama.model(rows["ids"], attention_mask=rows["mask"], use_cache=False)[0]
    wanted = rows["trained"][:, 1:].bool()
    logits = llama.lm_head(states[:, :-1][wanted])  # (trained, vocabulary)
    logps = (logits / temperature).log_softmax(-1)
    picked = logps.gather(1, rows["ids"][:, 1:][wanted].unsqueeze(1)).squeeze(1)
    return torch.zeros(wanted.shape, dtype=picked.dtype).masked_scatter(wanted, picked)


def plain_gradients(
    model: Any,
    rows: dict[str, Any],
    old: Any,
    reference: Any = None,
    beta: float = 0.0,
    unbiased_kl: bool = True,
    temperature: float = 1.0,
    cap: float = 3.0,
) -> dict[str, Any]:
    """Gradients of the DAPO loss (arXiv 2503.14476, eq. 8) with clip 0.2 and 0.28, a truncated
    importance weight (arXiv 2505.24034) and the k3 estimate of the KL divergence, with the ratio
    as a factor where its gradient is to be unbiased (arXiv 2512.02556)."""
    dtype = next(model.parameters()).dtype
    logps = plain_logps(model, rows, temperature)
    with torch.no_grad():
        old_logps = plain_logps(old, rows, temperature)
        weight = (old_logps - rows["recorded"][:, 1:].to(dtype)).exp().clamp(max=cap)
    advantage = rows["advantage"][:, 1:].to(dtype)
    ratio = (logps - old_logps).exp()
    loss = -torch.min(ratio * advantage, ratio.clamp(0.8, 1.28) * advantage) * weight
    if reference is not None:
        with torch.no_grad():
            gap = plain_logps(reference, rows, temperature)
        gap = gap - logps
        kl = gap.exp() - gap - 1
        loss = loss + beta * (kl * ratio if unbiased_kl else kl)
    trained = rows["trained"][:, 1:].to(dtype)
    ((loss * trained).sum() / trained.sum()).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def error(gradients: dict[str, Any], exact: dict[str, Any]) -> float:
    """The relative L2 error over all parameters."""
    assert gradients.keys() == exact.keys()
    wrong = sum(float((gradients[n].double() - exact[n]).square().sum()) for n in exact)
    return float((wrong / sum(float(g.square().sum()) for g in exact.values())) ** 0.5)


def check_update(
    brain: Any, updates: Any, step: int, group: Group, first: dict[str, Any], **options: Any
) -> dict[str, Any]:
    """Assert that ours are as exact as the plain ones. `first`: weights at the batch's first
    update; `options["reference"]`: weights of the reference. Returns the exact gradients."""
    rows = plain_rows(brain, group)
    assert int(rows["trained"].sum()) > 0
    both = {}
    for dtype in (torch.float32, torch.float64):
        models = {
            name: with_weights(brain.policy.model, weights, dtype)
            for name, weights in {
                "model": updates.weights[step],
                "old": first,
                "reference": options.get("reference"),
            }.items()
            if weights is not None
        }
        rest = {k: v for k, v in options.items() if k != "reference"}
        both[dtype] = plain_gradients(rows=rows, **models, **rest)
    exact = both[torch.float64]
    plain, ours = error(both[torch.float32], exact), error(updates.gradients[step], exact)
    assert plain < 1e-4, "the plain fp32 implementation itself is off"
    assert ours <= 2 * plain + 1e-6, f"ours is off by {ours:.2e}, the plain one by {plain:.2e}"
    return exact


class Shift:
    """Moves the weights after each rollout, so that what was recorded is off policy."""

    def __init__(self, model: Any, scale: float):
        self.model = model
        self.scale = scale

    @hookimpl
    def toolbrain_group_finished(self, run: Any, group: Any) -> None:
        generator = torch.Generator().manual_seed(len(group.rollouts))
        with torch.no_grad():
            for parameter in self.model.parameters():
                if parameter.requires_grad:
                    noise = torch.randn(parameter.shape, generator=generator)
                    parameter += self.scale * noise


@pytest.mark.parametrize("lora", ["adapter", None])
def test_gradients_equal_those_of_a_plain_padded_implementation(
    make_brain, tasks, watch, lora
) -> None:
    """Off policy, three turns, several rows a trace, the environment's tokens masked."""
    chosen = {} if lora else {"lora": None}
    brain = make_brain(TWO_TURNS, max_grad_norm=0, temperature=0.8, importance_cap=1.5, **chosen)
    updates = watch(brain.policy.model)
    with brain.plugins.observing(Shift(brain.policy.model, 3e-2 if lora else 1e-3)):
        result = brain.train(tasks(1), name="run")
    [group] = groups_of(result)

    rows = plain_rows(brain, group)
    assert len(rows["ids"]) > len(group.rollouts)
    changes = rows["trained"].diff(dim=1).clamp(min=0).sum(1)
    assert changes.max() > 1, "no row has a later turn behind what the environment wrote"
    logps = plain_logps(with_weights(brain.policy.model, updates.weights[0]), rows, 0.8)
    ratio = (logps.double() - rows["recorded"][:, 1:]).exp()[rows["trained"][:, 1:].bool()]
    assert ratio.min() < 0.9
    assert ratio.max() > 1.5

    assert len(updates.gradients) == 1
    check_update(brain, updates, 0, group, updates.weights[0], temperature=0.8, cap=1.5)


def test_the_second_update_of_a_batch_uses_it_again_with_the_first_ones_probabilities(
    make_brain, tasks, watch
) -> None:
    brain = make_brain(TWO_TURNS, max_grad_norm=0, updates_per_batch=2)
    updates = watch(brain.policy.model)
    result = brain.train(tasks(1), name="run")
    [group] = groups_of(result)  # one rollout for both
    assert result.steps == result.updates == len(updates.gradients) == 2
    first, second = updates.weights
    check_update(brain, updates, 0, group, first)
    exact = check_update(brain, updates, 1, group, first)
    on_policy = with_weights(brain.policy.model, second, torch.float64)
    unclipped = plain_gradients(on_policy, plain_rows(brain, group), on_policy)
    assert error(unclipped, exact) > 0.01, "the ratio of the second update is 1"


@pytest.mark.parametrize(("trained_before", "unbiased"), [(False, True), (True, False)])
def test_the_reference_is_the_policy_as_it_was_when_training_began(
    make_brain, tasks, watch, tmp_path, trained_before, unbiased
) -> None:
    trl = {"use_bias_correction_kl": unbiased}  # a field of TRL's that passes through
    brain = make_brain(TWO_TURNS, max_grad_norm=0, beta=0.5, trl=trl)
    if trained_before:
        brain.train(tasks(1), name="before", beta=0.0)
    assert brain.policy.is_fresh is not trained_before
    start = snapshot(brain.policy.model)
    updates = watch(brain.policy.model)
    result = brain.train(tasks(2), name="run", shuffle=False)
    group = groups_of(result)[1]  # at the first step policy and reference are the same
    now = updates.weights[1]
    options = {"reference": start, "beta": 0.5, "unbiased_kl": unbiased}
    exact = check_update(brain, updates, 1, group, now, **options)
    model = with_weights(brain.policy.model, now, torch.float64)
    without = plain_gradients(model, plain_rows(brain, group), model)
    assert error(without, exact) > 0.01, "the KL term has no weight in this test"

    assert list(brain.policy.model.peft_config) == ["default"]
    assert not [n for n, _ in brain.policy.model.named_parameters() if "reference" in n]
    brain.save(tmp_path / "saved")
    checkpoint = result.run_dir / "checkpoints" / "checkpoint-2"
    assert (tmp_path / "saved" / "adapter_model.safetensors").is_file()
    assert not list((tmp_path / "saved").rglob("*reference*"))
    # A checkpoint has it: a resumed run needs the reference that it began with.
    assert (checkpoint / "reference").is_dir() is trained_before


def test_full_fine_tuning_keeps_a_second_model_as_its_reference(
    make_brain, tasks, watch, caplog
) -> None:
    brain = make_brain(lora=None, max_grad_norm=0, beta=0.5, learning_rate=1e-3)
    start = snapshot(brain.policy.model)
    updates = watch(brain.policy.model)
    result = brain.train(tasks(2), name="run", shuffle=False)
    group = groups_of(result)[1]
    check_update(brain, updates, 1, group, updates.weights[1], reference=start, beta=0.5)
    assert "second copy of the model" in caplog.text


LOSS_TYPES = ["dapo", "grpo", "bnpo", "dr_grpo", "cispo", "sapo", "vespo", "luspo"]


def test_every_loss_type_of_trl_can_be_chosen() -> None:
    from toolbrain_grpo.algorithm import LossType
    from trl import GRPOConfig

    help_text = GRPOConfig.__dataclass_fields__["loss_type"].metadata["help"]
    assert all(f"'{name}'" in help_text or f'"{name}"' in help_text for name in LOSS_TYPES)
    assert set(LOSS_TYPES) == set(LossType.__args__)


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_micro_batches_do_not_change_the_gradient(make_brain, tasks, watch, loss_type) -> None:
    """Two groups, in one piece and in one piece a row; the second update of the batch."""
    gradients = []
    for max_tokens in (100_000, 1):
        brain = make_brain(
            TWO_TURNS,
            loss_type=loss_type,
            max_tokens_per_step=max_tokens,
            tasks_per_step=2,
            updates_per_batch=2,
            max_grad_norm=0,
            optimizer="sgd",
            learning_rate=1e-1,
        )
        updates = watch(brain.policy.model)
        result = brain.train(tasks(2), name=f"run-{max_tokens}")
        assert result.updates == 2
        gradients.append(updates.gradients)
    for whole, pieces in zip(*gradients, strict=True):
        assert any(g.abs().max() > 0 for g in whole.values())
        assert error(pieces, {n: g.double() for n, g in whole.items()}) < 1e-4
