"""One training step against loops written out: which positions count, which teacher and label each depth uses."""

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from specheads.errors import UserError
from specheads.head import DraftHead
from specheads.registry import get_head_type
from specheads.target import TargetModel
from specheads.train.config import LossConfig
from specheads.train.data import Example
from specheads.train.evaluate import evaluate
from specheads.train.features import CachedFeatures, LiveFeatures, fill_store
from specheads.train.losses import expected_tokens
from specheads.train.packing import PackedRows, pack
from specheads.train.step import TrainingStep, counted_rows
from specheads.train.store import FeatureStore

DEPTH = 2
DRAFT_IDS = torch.arange(0, 60, 2)


@pytest.fixture(scope="module")
def target(make_llama: Callable[..., Any]) -> TargetModel:
    return TargetModel(make_llama(num_hidden_layers=3))


@pytest.fixture(scope="module")
def examples() -> list[Example]:
    generator = np.random.default_rng(1)
    examples = []
    for number, length in enumerate([12, 7, 5, 9, 3, 11, 8, 4]):
        mask = np.arange(length) >= 2
        mask[length // 2] = False  # a token that does not count between those that do
        examples.append(Example(generator.integers(2, 61, length).astype(np.int32), mask, str(number), length))
    return examples


@pytest.fixture(scope="module")
def rows(examples: list[Example]) -> PackedRows:
    packed = pack(examples, 14, seed=0)
    assert any(len(members) > 1 for members in packed.members)
    return packed


def make_head(target: TargetModel, name: str = "eagle3", **options: Any) -> DraftHead:
    head_type = get_head_type(name)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        head = head_type(head_type.derive_config(target, options)).double()
    if head.draft_vocab_ids is not None:
        head.set_draft_vocabulary(DRAFT_IDS)
    return head.bind(target)


# What counts


def test_counted_rows_by_hand() -> None:
    # row t drafts token t+2 at depth 1 and t+3 at depth 2; it counts where that token does, in the same document
    document_BL = torch.tensor([[0, 0, 0, 0, 0, 1, 1, 1, 1, -1, -1]])
    loss_mask_BL = torch.tensor([[0, 0, 1, 1, 1, 0, 1, 0, 1, 0, 0]]).bool()
    assert counted_rows(loss_mask_BL, document_BL, 1).int().tolist() == [[1, 1, 1, 0, 0, 0, 1, 0, 0, 0, 0]]
    assert counted_rows(loss_mask_BL, document_BL, 2).int().tolist() == [[1, 1, 0, 0, 0, 1, 0, 0, 0, 0, 0]]
    assert counted_rows(loss_mask_BL, document_BL, 4).int().tolist() == [[0] * 11]
    assert counted_rows(loss_mask_BL, document_BL, 20).int().tolist() == [[0] * 11]


def test_padding_that_claims_to_count_does_not() -> None:
    document_BL = torch.tensor([[0, 0, 0, -1, -1, -1, -1]])
    assert counted_rows(torch.ones(1, 7).bool(), document_BL, 1).int().tolist() == [[1, 0, 0, 0, 0, 0, 0]]


def places(rows: PackedRows, chosen: list[int], depth: int) -> list[tuple[int, int]]:
    """(row in the batch, t) that count at a depth, one by one."""
    found = []
    for b, row in enumerate(chosen):
        document, mask = rows.document_RL[row], rows.loss_mask_RL[row]
        for t in range(len(mask) - depth - 1):
            inside = document[t] == document[t + depth + 1] >= 0
            if inside and mask[t + depth + 1]:
                found.append((b, t))
    return found


def test_counts(target: TargetModel, rows: PackedRows) -> None:
    step = TrainingStep(make_head(target), LossConfig(depth=4))
    chosen = [2, 0, 1]
    assert step.counts(rows, chosen) == [len(places(rows, chosen, depth)) for depth in (1, 2, 3, 4)]
    assert step.counts(rows, np.array(chosen)) == step.counts(rows, chosen)
    assert step.counts(rows, [1]) != step.counts(rows, [0])


# The loss by hand


def by_hand(head: DraftHead, rows: PackedRows, chosen: list[int], config: LossConfig) -> tuple[Tensor, Tensor]:
    """Loss and (alpha, agreement, count) by depth: p from the target's own forward over each document alone."""
    inputs, target = LiveFeatures(head.target, rows, head.tap_layers).batch(chosen).inputs, head.target
    ids = list(range(61)) if head.draft_vocab_ids is None else head.draft_vocab_ids.tolist()
    hidden_by_depth = head(inputs, config.depth)
    weights = [config.depth_decay**k for k in range(config.depth)]
    loss, sums = torch.zeros((), dtype=torch.float64), torch.zeros(config.depth, 3, dtype=torch.float64)
    for depth in range(1, config.depth + 1):
        found, total = places(rows, chosen, depth), torch.zeros((), dtype=torch.float64)
        for b, t in found:
            own = (inputs.document_BL[b] == inputs.document_BL[b, t]).nonzero()[:, 0]
            start = int(own[0])
            document = inputs.ids_BL[b, own]
            label_place = t + depth + 1 - start
            # The target predicts the label after it has read all tokens before it, those drafted among them.
            p = target.model(document[None, :label_place]).logits[0, -1].softmax(-1)
            q = head.project(hidden_by_depth[depth - 1][b, t], depth).softmax(-1)
            label = int(document[label_place])
            if config.kind == "ce":
                total = total - (q[ids.index(label)].log() if label in ids else 0)
            else:
                total = total + sum(p[x] * (p[x].log() - q[i].log()) for i, x in enumerate(ids))
            sums[depth - 1, 0] += sum(min(float(p[x]), share) for x, share in zip(ids, q.tolist(), strict=True))
            sums[depth - 1, 1] += float(ids[int(q.argmax())] == int(p.argmax()))
            sums[depth - 1, 2] += 1
        anywhere = dataclasses.replace(rows, loss_mask_RL=np.ones_like(rows.loss_mask_RL))
        regressed = places(anywhere, chosen, depth) if config.feature_positions == "all" and depth == 1 else found
        for b, t in regressed if config.feature_weight else []:
            own = (inputs.document_BL[b] == inputs.document_BL[b, t]).nonzero()[:, 0]
            read = inputs.ids_BL[b, own][None, : t + depth + 1 - int(own[0])]
            teacher = target.states(read)[1][0, -1]
            far = (hidden_by_depth[depth - 1][b, t] - teacher).square().sum() / teacher.square().sum()
            total = total + config.feature_weight * far
        loss = loss + weights[depth - 1] / sum(weights) * total / len(found)
    return loss, sums


@pytest.mark.parametrize(
    ("options", "settings"),
    [
        ({}, {"kind": "kl"}),
        ({}, {"kind": "ce", "depth_decay": 0.5}),
        ({"draft_vocab_size": len(DRAFT_IDS)}, {"kind": "kl", "depth_decay": 1.0}),
        ({"draft_vocab_size": len(DRAFT_IDS), "projection": "own"}, {"kind": "ce"}),
        ({}, {"kind": "kl", "feature_weight": 0.7}),
        ({}, {"kind": "kl", "feature_weight": 0.7, "feature_positions": "all"}),
    ],
    ids=str,
)
def test_eagle3_at_two_depths(
    options: dict[str, Any], settings: dict[str, Any], target: TargetModel, rows: PackedRows
) -> None:
    head, config, chosen = make_head(target, **options), LossConfig(depth=DEPTH, **settings), [1, 0, 2]
    step = TrainingStep(head, config)
    batch = LiveFeatures(target, rows, head.tap_layers).batch(chosen)
    result = step(batch, step.counts(rows, chosen))
    loss, sums = by_hand(head, rows, chosen, config)
    torch.testing.assert_close(result.sums_K3, sums, atol=1e-9, rtol=0)
    torch.testing.assert_close(result.loss.double(), loss, atol=1e-9, rtol=1e-6)
    wanted = torch.autograd.grad(loss, list(head.parameters()), allow_unused=True)
    got = torch.autograd.grad(result.loss, list(head.parameters()), allow_unused=True)
    for one, other in zip(got, wanted, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-5)


def test_a_medusa_head_by_hand(target: TargetModel, rows: PackedRows) -> None:
    head, config, chosen = make_head(target, "medusa", num_heads=3), LossConfig(depth=3), [0, 3]
    with torch.no_grad():
        for parameter in head.parameters():
            parameter += 0.1
    step = TrainingStep(head, config)
    result = step(LiveFeatures(target, rows, head.tap_layers).batch(chosen), step.counts(rows, chosen))
    loss, sums = by_hand(head, rows, chosen, config)
    torch.testing.assert_close(result.sums_K3, sums, atol=1e-9, rtol=0)
    torch.testing.assert_close(result.loss.double(), loss, atol=1e-9, rtol=1e-6)


# Parts of a batch


def test_parts_of_a_batch_add_up(target: TargetModel, rows: PackedRows) -> None:
    head = make_head(target)
    step = TrainingStep(head, LossConfig(depth=DEPTH, feature_weight=0.3, feature_positions="all")).double()
    features, whole = LiveFeatures(target, rows, head.tap_layers), [0, 1, 2, 3]
    counts = step.counts(rows, whole)
    parameters = list(head.parameters())
    at_once = step(features.batch(whole), counts)
    expected = torch.autograd.grad(at_once.loss, parameters)
    sums, loss = torch.zeros_like(at_once.sums_K3), 0.0
    gradients = [torch.zeros_like(p) for p in parameters]
    for part in ([0], [1, 2], [3]):
        assert step.counts(rows, part) != counts
        result = step(features.batch(part), counts)
        loss += float(result.loss.detach())
        sums += result.sums_K3
        for total, gradient in zip(gradients, torch.autograd.grad(result.loss, parameters), strict=True):
            total += gradient
    assert loss == pytest.approx(float(at_once.loss.detach()), rel=1e-6)
    torch.testing.assert_close(sums, at_once.sums_K3, atol=1e-9, rtol=0)
    assert at_once.sums_K3[:, 2].tolist() == counts
    for total, gradient in zip(gradients, expected, strict=True):
        torch.testing.assert_close(total, gradient, atol=1e-7, rtol=1e-5)


def test_a_part_without_counted_positions(target: TargetModel) -> None:
    ids = np.array([5, 6, 7, 8], np.int32)
    short = Example(ids, np.array([False, True, False, False]), "short", 4)  # token 1 is never drafted
    rows = pack([short], 4, seed=0)
    head = make_head(target)
    step = TrainingStep(head, LossConfig(depth=DEPTH))
    counts = step.counts(rows, [0])
    assert counts == [0, 0]
    result = step(LiveFeatures(target, rows, head.tap_layers).batch([0]), counts)
    result.loss.backward()
    assert result.loss.item() == 0
    assert result.sums_K3.tolist() == [[0, 0, 0]] * DEPTH
    assert all(p.grad is None or not p.grad.any() for p in head.parameters())


def test_cached_features_give_the_same_loss(
    target: TargetModel, examples: list[Example], rows: PackedRows, tmp_path: Any
) -> None:
    """With a draft vocabulary only its rows of the target's projection are evaluated; the sums must be the same."""
    head = make_head(target, draft_vocab_size=len(DRAFT_IDS))
    step = TrainingStep(head, LossConfig(depth=DEPTH))
    store = FeatureStore(tmp_path, target, head.tap_layers)
    fill_store(target, examples, store, row_length=14, rows_per_shard=3)
    cached = CachedFeatures(target, examples, rows, head.tap_layers, store)
    chosen = [0, 2]
    counts = step.counts(rows, chosen)
    one = step(LiveFeatures(target, rows, head.tap_layers).batch(chosen), counts)
    other = step(cached.batch(chosen), counts)
    torch.testing.assert_close(other.sums_K3, one.sums_K3, atol=1e-4, rtol=0)
    torch.testing.assert_close(other.loss, one.loss, atol=1e-5, rtol=0)


def test_a_feature_loss_between_other_widths_is_refused(target: TargetModel, rows: PackedRows) -> None:
    narrow = {"hidden_size": 16, "intermediate_size": 24}
    head = make_head(target, "draft_model", start_from="random", overrides=narrow)
    step = TrainingStep(head, LossConfig(depth=1, feature_weight=1.0))
    batch = LiveFeatures(target, rows, head.tap_layers).batch([0])
    with pytest.raises(UserError, match=r"16 wide, with the target's, 32 wide; set it to 0"):
        step(batch, step.counts(rows, [0]))


# Evaluation


@pytest.mark.parametrize("rows_per_batch", [1, 3])
def test_evaluation_by_hand(rows_per_batch: int, target: TargetModel, rows: PackedRows) -> None:
    head, config, chosen = make_head(target), LossConfig(depth=DEPTH), [3, 1, 0, 2]
    step = TrainingStep(head, config)
    step.train()
    features = LiveFeatures(target, rows, head.tap_layers)
    got = evaluate(step, features, chosen, rows_per_batch=rows_per_batch)
    loss, sums = by_hand(head, rows, chosen, config)
    alpha = (sums[:, 0] / sums[:, 2]).tolist()
    assert got.loss == pytest.approx(float(loss.detach()), rel=1e-5)
    assert got.alpha == pytest.approx(alpha, rel=1e-9)
    assert got.agreement == pytest.approx((sums[:, 1] / sums[:, 2]).tolist())
    assert got.expected_tokens == pytest.approx(1 + alpha[0] + alpha[0] * alpha[1]) == expected_tokens(got.alpha)
    assert step.training
    assert head.training
    step.eval()
    evaluate(step, features, chosen)
    assert not head.training
