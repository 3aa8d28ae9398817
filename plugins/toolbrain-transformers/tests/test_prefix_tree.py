"""The prefix tree against the naive expansion, and attention over it against padded rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from toolbrain_transformers import flex_attention
from toolbrain_transformers.prefix_tree import PrefixTree
from toolbrain_transformers.scoring import PaddedForward, TreeForward, cost_of
from toolbrain_transformers.tree_attention import tree_attending
from toolbrain_transformers.tree_check import tree_problem
from transformers import GPT2Config, GPT2LMHeadModel

from toolbrain_core.roles import Row

sequences = st.lists(st.lists(st.integers(0, 2), max_size=8), max_size=8)


@given(sequences)
def test_every_sequence_is_found_along_its_path(rows: list[list[int]]) -> None:
    tree = PrefixTree.of(rows)
    for number, row in enumerate(rows):
        places = tree.places(number)
        assert [tree.ids[place] for place in places] == row
        assert [tree.positions[place] for place in places] == list(range(len(row)))


@given(sequences)
def test_every_distinct_token_stands_there_once(rows: list[list[int]]) -> None:
    distinct = {tuple(row[: end + 1]) for row in rows for end in range(len(row))}
    assert len(PrefixTree.of(rows)) == len(distinct)


@given(sequences)
def test_nodes_lie_in_line_after_their_parents_and_part_only_where_sequences_do(
    rows: list[list[int]],
) -> None:
    tree = PrefixTree.of(rows)
    ends = [0, *(node.end for node in tree.nodes)]
    assert [node.start for node in tree.nodes] == ends[:-1]
    for index, node in enumerate(tree.nodes):
        assert node.parent < index
        assert len(node) > 0
        children = [n for n in tree.nodes if n.parent == index]
        assert len(children) != 1 or index in tree.leaves


def rows_of(prompt: int, answers: int, length: int, seed: int = 0) -> list[Row]:
    draw = torch.Generator().manual_seed(seed)

    def ids(count: int) -> list[int]:
        return torch.randint(5, 90, (count,), generator=draw).tolist()

    shared, rows = ids(prompt), []
    for number in range(answers):
        told, more = ids(number), ids(length)  # rows of different lengths, two turns each
        row = [*shared, *more, *told, *ids(3)]
        trained = [False] * prompt + [True] * length + [False] * number + [True] * 3
        rows.append(Row(tuple(row), tuple(trained), (0.0,) * len(row), (0,) * len(row)))
    return rows


@pytest.fixture
def model(make_small: Callable[..., Any]) -> Any:
    return make_small(max_position_embeddings=512)


def gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    found = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_tree_gives_the_log_probabilities_and_gradients_of_padded_rows(
    model: torch.nn.Module, checkpointing: bool
) -> None:
    rows = rows_of(prompt=20, answers=4, length=6)
    if checkpointing:
        model.activation_checkpointing_enable()
    model.train()
    weights = torch.linspace(-1, 1, sum(sum(row.trained) for row in rows))
    plain = PaddedForward.of(rows, "cpu", 0).score(model, temperature=0.7)
    (plain.logprobs * weights).sum().backward()
    expected = gradients(model)
    with tree_attending(model):
        tree = TreeForward.of(rows, "cpu").score(model, temperature=0.7)
        (tree.logprobs * weights).sum().backward()
    found = gradients(model)
    assert torch.allclose(tree.logprobs, plain.logprobs, atol=1e-5)
    assert torch.allclose(tree.entropies, plain.entropies, atol=1e-5)
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        assert torch.allclose(found[name], gradient, atol=2e-5), name


@pytest.mark.parametrize("make_small", ["gemma3"], indirect=True)
def test_scores_are_those_of_the_models_own_logits(
    make_small: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Scaled and capped ones too; the head sees a chunk at a time, and its weights are trained."""
    monkeypatch.setattr("toolbrain_transformers.scoring._CHUNK", 8)
    model = make_small(max_position_embeddings=256, final_logit_softcapping=0.5)
    rows = rows_of(prompt=12, answers=3, length=6)
    logps = []
    for row in rows:
        logits = model(torch.tensor([row.ids])).logits[0, :-1] / 0.7
        targets = torch.tensor(row.ids[1:]).unsqueeze(1)
        of_row = logits.log_softmax(-1).gather(1, targets).squeeze(1)
        logps.append(of_row[torch.tensor(row.trained[1:])])
    expected = torch.cat(logps)
    weights = torch.linspace(-1, 1, len(expected))
    (expected * weights).sum().backward()
    plain = gradients(model)
    seen: list[int] = []
    model.lm_head.register_forward_pre_hook(lambda _, args: seen.append(args[0].shape[1]))
    with tree_attending(model):
        scores = TreeForward.of(rows, "cpu").score(model, temperature=0.7)
        (scores.logprobs * weights).sum().backward()
    assert torch.allclose(scores.logprobs, expected, atol=1e-5)
    assert max(seen) == 8
    found = gradients(model)
    assert found.keys() == plain.keys()
    for name, gradient in plain.items():
        assert torch.allclose(found[name], gradient, atol=2e-5), name


@pytest.mark.parametrize("make_small", ["mistral"], indirect=True)
def test_long_nodes_are_attended_to_in_blocks(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = rows_of(prompt=60, answers=2, length=30)
    plain = PaddedForward.of(rows, "cpu", 0).score(model).logprobs
    monkeypatch.setattr("toolbrain_transformers.tree_attention._QUERY_BLOCK", 16)
    with torch.no_grad(), tree_attending(model):
        tree = TreeForward.of(rows, "cpu").score(model).logprobs
    assert torch.allclose(tree, plain, atol=1e-5)


@given(
    st.lists(st.lists(st.integers(0, 1), max_size=12), min_size=1, max_size=6).filter(any),
    st.sampled_from([None, 1, 3]),
)
def test_the_blocks_of_a_gpus_mask_cover_what_is_on_the_path(
    rows: list[list[int]], window: int | None
) -> None:
    tree = PrefixTree.of(rows)
    size = 4
    mask = flex_attention.block_mask(tree, window, "cpu", size)
    tokens = len(tree)
    paths: dict[int, set[int]] = {}
    for number in range(len(rows)):
        for end, place in enumerate(places := tree.places(number)):
            first = 0 if window is None else max(0, end + 1 - window)
            paths[place] = set(places[first : end + 1])
    q, k = torch.arange(tokens).unsqueeze(1), torch.arange(tokens)
    seen = mask.mask_mod(0, 0, q, k)
    for place, path in paths.items():
        assert set(seen[place].nonzero().flatten().tolist()) == path
    partial = _blocks(mask.kv_num_blocks, mask.kv_indices)
    whole = _blocks(mask.full_kv_num_blocks, mask.full_kv_indices)
    assert not partial & whole
    for block in {(i // size, j // size) for i, path in paths.items() for j in path}:
        assert block in partial | whole
    for i, j in whole:
        assert seen[i * size : i * size + size, j * size : j * size + size].all()


def _blocks(counts: Any, indices: Any) -> set[tuple[int, int]]:
    return {
        (row, int(column))
        for row, count in enumerate(counts[0, 0].tolist())
        for column in indices[0, 0, row, :count]
    }


def test_a_gpus_attention_is_that_of_the_branches(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FlexAttention as it is on a CPU: without being compiled, and without a backward pass."""
    rows = rows_of(prompt=20, answers=4, length=6)
    logprobs = []
    for used in (False, True):
        monkeypatch.setattr(flex_attention, "is_usable", lambda _device, used=used: used)
        with torch.no_grad(), tree_attending(model):
            logprobs.append(TreeForward.of(rows, "cpu").score(model).logprobs)
    assert torch.allclose(logprobs[1], logprobs[0], atol=1e-5)


@pytest.mark.gpu
def test_flex_attention_on_a_gpu(model: Any) -> None:
    device = torch.device("cuda")
    assert flex_attention.is_usable(device)
    model.to(device)
    for answers in (4, 6):  # other lengths
        rows = rows_of(prompt=300, answers=answers, length=6)
        plain = PaddedForward.of(rows, device, 0).score(model).logprobs
        plain.sum().backward()
        expected = gradients(model)
        with tree_attending(model):
            tree = TreeForward.of(rows, device).score(model).logprobs
            tree.sum().backward()
        found = gradients(model)
        assert torch.allclose(tree, plain, atol=1e-3)
        for name, gradient in expected.items():
            assert torch.allclose(found[name], gradient, atol=1e-2), name


def test_a_shared_prompt_costs_once() -> None:
    rows = rows_of(prompt=100, answers=8, length=5)
    assert cost_of(rows, tree=True) < 100 + 8 * 20
    assert cost_of(rows, tree=False) >= 8 * 100


def test_outside_of_a_tree_the_model_attends_as_before(model: torch.nn.Module) -> None:
    ids = torch.tensor([[7, 8, 9, 10, 11, 12, 13, 14, 15, 16]])
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    before = model(ids, attention_mask=mask).logits[:, 3:]
    implementation = model.config._attn_implementation
    with tree_attending(model):
        inside = model(ids, attention_mask=mask).logits[:, 3:]
    assert torch.allclose(before, inside, atol=1e-6)
    assert model.config._attn_implementation == implementation


def test_the_tree_serves_common_models(model: torch.nn.Module) -> None:
    assert tree_problem(model) == ""


def test_a_model_with_capped_attention_scores_cannot_serve_the_tree() -> None:
    from transformers import Gemma2Config, Gemma2ForCausalLM

    torch.manual_seed(0)
    config = Gemma2Config(
        vocab_size=96,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        attn_logit_softcapping=50.0,
    )
    capped = Gemma2ForCausalLM(config).eval()
    assert "Gemma2ForCausalLM" in tree_problem(capped)


def test_learned_positions_are_served_since_they_are_given() -> None:
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=96, n_embd=32, n_layer=2, n_head=4, n_positions=64)
    model = GPT2LMHeadModel(config).eval()
    problem = tree_problem(model)
    rows = rows_of(prompt=12, answers=3, length=4)
    plain = PaddedForward.of(rows, "cpu", 0).score(model).logprobs
    if not problem:
        with torch.no_grad(), tree_attending(model):
            tree = TreeForward.of(rows, "cpu").score(model).logprobs
        assert torch.allclose(plain, tree, atol=1e-5)
