"""Losses against dense ones written out in float64, chunking, gradients, the draft vocabulary, and memory."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck
from torch.utils._python_dispatch import TorchDispatchMode

from specheads.errors import UserError
from specheads.train.losses import LOSSES, depth_weights, draft_loss, expected_tokens, feature_loss, teacher_summary

WIDTH, VOCABULARY = 8, 23
DRAFT_IDS = torch.tensor([0, 2, 3, 7, 11, 12, 19, 22])


class Case:
    """A random draft and target; the draft's projection is over the draft vocabulary, where there is one."""

    def __init__(
        self, count: int = 11, *, ids: Tensor | None = None, seed: int = 0, dtype: torch.dtype = torch.float64
    ):
        generator = torch.Generator().manual_seed(seed)

        def draw(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

        self.ids = ids
        self.hidden = draw(count, WIDTH).requires_grad_()
        self.weight = draw(VOCABULARY if ids is None else len(ids), WIDTH).requires_grad_()
        self.teacher_hidden, self.teacher_weight = draw(count, WIDTH), draw(VOCABULARY, WIDTH)
        self.labels = torch.randint(VOCABULARY, (count,), generator=generator)

    def teacher(self, hidden: Tensor) -> Tensor:
        return hidden @ self.teacher_weight.T

    def teacher_draft_rows(self, hidden: Tensor) -> Tensor:
        assert self.ids is not None
        return hidden @ self.teacher_weight[self.ids].T

    def loss(self, **options: Any) -> Any:
        return draft_loss(
            self.hidden,
            lambda hidden: hidden @ self.weight.T,
            **{
                "teacher_hidden_ND": self.teacher_hidden,
                "teacher": self.teacher,
                "labels_N": self.labels,
                "draft_vocab_ids": self.ids,
                **options,
            },
        )

    def gradients(self, loss: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(loss, [self.hidden, self.weight])

    def naive(self, kind: str, eta: float = 3.0) -> tuple[Tensor, float, int]:
        """Loss, alpha and argmax agreement token by token, over dense distributions on the full vocabulary."""
        ids = list(range(VOCABULARY)) if self.ids is None else self.ids.tolist()
        p_NV = torch.softmax(self.teacher_hidden @ self.teacher_weight.T, -1)
        q_Nd = torch.softmax(self.hidden @ self.weight.T, -1)
        loss, alpha_sum, agreed = torch.zeros((), dtype=torch.float64), 0.0, 0
        for n, label in enumerate(self.labels.tolist()):
            q = {token: q_Nd[n, i] for i, token in enumerate(ids)}
            alpha = torch.stack([torch.minimum(p_NV[n, x], q[x]) for x in ids]).sum()
            kl = sum(p_NV[n, x] * (p_NV[n, x].log() - q[x].log()) for x in ids)
            share = math.exp(-eta * float(alpha.detach()))
            values = {
                "ce": -q[label].log() if label in q else torch.zeros(()),
                "kl": kl,
                "tv": 1 - alpha,
                "lk": share * kl + (1 - share) * (1 - alpha),
                "nla": -alpha.log(),
            }
            loss = loss + values[kind]
            alpha_sum += float(alpha.detach())
            agreed += ids[int(q_Nd[n].argmax())] == int(p_NV[n].argmax())
        return loss, alpha_sum, agreed


@pytest.mark.parametrize("ids", [None, DRAFT_IDS], ids=["full", "subset"])
@pytest.mark.parametrize("chunk", [1, 4, 11, 512])
@pytest.mark.parametrize("kind", LOSSES)
def test_equals_the_dense_loss_with_its_gradient_in_any_chunks(kind: str, chunk: int, ids: Tensor | None) -> None:
    case = Case(ids=ids)
    sums = case.loss(kind=kind, chunk=chunk, lk_eta=2.0)
    loss, alpha, agreed = case.naive(kind, eta=2.0)
    torch.testing.assert_close(sums.loss, loss, rtol=1e-12, atol=1e-12)
    assert float(sums.alpha_sum) == pytest.approx(alpha, rel=1e-12)
    assert float(sums.accuracy_sum) == agreed
    assert sums.count == 11
    assert not sums.alpha_sum.requires_grad
    assert not sums.accuracy_sum.requires_grad
    for ours, dense in zip(case.gradients(sums.loss), case.gradients(loss), strict=True):
        torch.testing.assert_close(ours, dense, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("kind", LOSSES)
def test_only_the_draft_rows_of_the_target_are_needed(kind: str) -> None:
    case = Case(ids=DRAFT_IDS)
    whole = case.loss(kind=kind)
    logsumexp, argmax = teacher_summary(case.teacher_hidden, case.teacher, chunk=3)

    def forbidden(hidden: Tensor) -> Tensor:
        raise AssertionError("the full projection was evaluated")

    options = {"teacher": forbidden, "teacher_draft_rows": case.teacher_draft_rows, "teacher_logsumexp_N": logsumexp}
    rows = case.loss(kind=kind, chunk=4, **options, teacher_argmax_N=argmax)
    torch.testing.assert_close(rows.loss, whole.loss, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(rows.alpha_sum, whole.alpha_sum, rtol=1e-12, atol=1e-12)
    assert rows.accuracy_sum == whole.accuracy_sum
    for ours, expected in zip(case.gradients(rows.loss), case.gradients(whole.loss), strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-10, atol=1e-12)
    unknown = case.loss(kind=kind, **options)
    assert math.isnan(unknown.accuracy_sum)  # not known is not zero
    assert all(torch.isfinite(gradient).all() for gradient in case.gradients(unknown.loss))


def test_alpha_with_a_draft_vocabulary_is_not_renormalised() -> None:
    # The draft knows tokens 0 and 2: min((.2, .5), (.4, .6)) sums to .7. Renormalised p = (.29, .71) would report .89.
    logits = {"p": torch.tensor([[0.2, 0.3, 0.5]]).log(), "q": torch.tensor([[0.4, 0.6]]).log()}
    sums = draft_loss(
        logits["q"],
        lambda x: x,
        teacher_hidden_ND=logits["p"],
        teacher=lambda x: x,
        labels_N=torch.tensor([1]),
        draft_vocab_ids=torch.tensor([0, 2]),
        kind="ce",
    )
    assert float(sums.alpha_sum) == pytest.approx(0.7, abs=1e-6)
    assert float(sums.loss) == 0.0  # the label cannot be drafted
    assert sums.count == 1
    assert float(sums.accuracy_sum) == 1.0  # the draft's second token is the target's third


def test_total_variation_is_half_the_distance_and_one_minus_alpha() -> None:
    case = Case()
    sums = case.loss(kind="tv")
    p_NV = torch.softmax(case.teacher(case.teacher_hidden), -1)
    q_NV = torch.softmax(case.hidden @ case.weight.T, -1)
    assert float(sums.loss.detach()) == pytest.approx(sums.count - float(sums.alpha_sum), rel=1e-12)
    assert float(sums.loss.detach()) == pytest.approx(0.5 * float((p_NV - q_NV).detach().abs().sum()), rel=1e-12)


def test_a_perfect_draft_is_always_accepted() -> None:
    case = Case()
    for kind, value in [("kl", 0.0), ("tv", 0.0), ("lk", 0.0), ("nla", 0.0)]:
        sums = draft_loss(
            case.teacher_hidden,
            case.teacher,
            teacher_hidden_ND=case.teacher_hidden,
            teacher=case.teacher,
            labels_N=case.labels,
            kind=kind,
        )
        assert float(sums.loss) == pytest.approx(value, abs=1e-12)
        assert float(sums.alpha_sum) == pytest.approx(11)
        assert float(sums.accuracy_sum) == 11


@pytest.mark.parametrize("ids", [None, DRAFT_IDS], ids=["full", "subset"])
@pytest.mark.parametrize("kind", [kind for kind in LOSSES if kind != "lk"])
def test_gradients_by_finite_differences(kind: str, ids: Tensor | None) -> None:
    case = Case(count=5, ids=ids)

    def loss(hidden: Tensor, weight: Tensor) -> Tensor:
        case.hidden, case.weight = hidden, weight
        return case.loss(kind=kind, chunk=2).loss

    assert gradcheck(loss, (case.hidden, case.weight))


def test_gradient_of_lk_holds_its_share_fixed() -> None:
    # Finite differences would see the share move with alpha, so the expected gradient is that of the share as a number.
    case = Case(count=1)
    share = math.exp(-3.0 * float(case.loss(kind="tv").alpha_sum))
    expected = share * case.loss(kind="kl").loss + (1 - share) * case.loss(kind="tv").loss
    for ours, fixed in zip(case.gradients(case.loss(kind="lk").loss), case.gradients(expected), strict=True):
        torch.testing.assert_close(ours, fixed, rtol=1e-10, atol=1e-14)

    def loss(hidden: Tensor) -> Tensor:
        case.hidden = hidden
        return case.loss(kind="lk", lk_eta=0.0).loss  # eta 0: the share is 1 everywhere, and nothing is held

    assert gradcheck(loss, (case.hidden,))


def test_no_gradient_flows_into_the_target() -> None:
    case = Case()
    case.teacher_hidden.requires_grad_()
    case.teacher_weight.requires_grad_()
    case.loss(kind="lk").loss.backward()
    assert case.teacher_hidden.grad is None
    assert case.teacher_weight.grad is None
    assert case.weight.grad is not None


def test_no_counted_position_gives_zero_and_a_zero_gradient() -> None:
    case = Case(count=0, ids=DRAFT_IDS)
    for kind in LOSSES:
        sums = case.loss(kind=kind)
        assert (float(sums.loss.detach()), float(sums.alpha_sum), float(sums.accuracy_sum), sums.count) == (
            0.0,
            0.0,
            0.0,
            0,
        )
        assert all((gradient == 0).all() for gradient in case.gradients(sums.loss))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_probabilities_are_float32_whatever_the_logits_are(dtype: torch.dtype) -> None:
    case = Case(count=64, dtype=dtype)
    sums = case.loss(kind="kl", chunk=16)
    assert sums.loss.dtype == sums.alpha_sum.dtype == torch.float32
    exact = Case(count=64, dtype=torch.float64)
    exact.hidden, exact.weight = case.hidden.double(), case.weight.double()
    exact.teacher_hidden, exact.teacher_weight = case.teacher_hidden.double(), case.teacher_weight.double()
    # What is left is the rounding of the logits themselves (up to about 20, so 1/16 in bfloat16).
    assert float(sums.alpha_sum) / 64 == pytest.approx(float(exact.loss(kind="kl").alpha_sum) / 64, abs=0.01)
    assert case.gradients(sums.loss)[0].dtype == dtype


def test_forbidden_tokens_of_the_target_are_no_trouble() -> None:
    # A padded vocabulary: the target's logits are -inf there, and so are those of a draft that borrows its projection.
    for q_is_masked in (False, True):
        q = torch.zeros(2, 4, dtype=torch.float64)
        p = torch.tensor([[0.0, 1.0, 2.0, -math.inf]] * 2, dtype=torch.float64)
        q[:, 3] = -math.inf if q_is_masked else 0.0
        for kind in ("kl", "tv", "lk", "nla"):
            leaf = q.clone().requires_grad_()
            sums = draft_loss(
                leaf, lambda x: x, teacher_hidden_ND=p, teacher=lambda x: x, labels_N=torch.tensor([0, 1]), kind=kind
            )
            (gradient,) = torch.autograd.grad(sums.loss, [leaf])
            assert torch.isfinite(sums.loss)
            assert torch.isfinite(gradient).all()


class Largest(TorchDispatchMode):
    """Notes the largest tensor that any operation makes."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(x, Tensor):
                self.elements = max(self.elements, x.numel())
        return out


def saved_elements(loss_of: Any) -> int:
    """Elements that the graph of a loss keeps for its gradient."""
    saved = 0

    def pack(x: Tensor) -> Tensor:
        nonlocal saved
        saved += x.numel()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        loss_of()
    return saved


def test_memory_does_not_grow_with_positions_times_vocabulary() -> None:
    case = Case(count=64)
    with Largest() as largest:
        case.gradients(case.loss(kind="lk", chunk=2).loss)
        torch.autograd.grad(case.loss(kind="lk", chunk=2, trains_projection=False).loss, case.hidden)
    # Inputs and their gradients have 64 x 8 elements, a chunk's logits 2 x 23; all logits together would be 64 x 23.
    assert largest.elements <= 64 * WIDTH
    assert saved_elements(lambda: case.loss(kind="lk", chunk=2)) < 64 * VOCABULARY
    assert saved_elements(lambda: case.naive("lk")) > 64 * VOCABULARY  # the measure sees what is kept


@pytest.mark.parametrize("count", [0, 1, 11])
@pytest.mark.parametrize("kind", LOSSES)
def test_a_frozen_projection_gives_the_same_gradient_without_a_second_pass(kind: str, count: int) -> None:
    case, passes = Case(count=count), 0
    frozen = case.weight.detach()

    def project(hidden: Tensor) -> Tensor:
        nonlocal passes
        passes += 1
        return hidden @ frozen.T

    inputs = {"teacher_hidden_ND": case.teacher_hidden, "teacher": case.teacher, "labels_N": case.labels}
    gradients, losses = [], []
    for trains in (True, False):
        passes = 0
        sums = draft_loss(case.hidden, project, **inputs, kind=kind, chunk=4, trains_projection=trains)
        gradients.append(torch.autograd.grad(3 * sums.loss, case.hidden)[0])
        losses.append(sums.loss.detach())
        assert passes == max(-(-count // 4), 1) * (2 if trains else 1)
    torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-12, atol=1e-14)


def test_wrong_use_is_refused() -> None:
    case = Case(ids=DRAFT_IDS)
    with pytest.raises(UserError, match="unknown loss 'l2', expected one of ce, kl, tv, lk, nla"):
        case.loss(kind="l2")
    with pytest.raises(ValueError, match="10 labels"):
        case.loss(labels_N=case.labels[:10])
    with pytest.raises(ValueError, match="other vocabularies"):
        case.loss(draft_vocab_ids=None)
    with pytest.raises(ValueError, match="needs draft_vocab_ids and teacher_logsumexp_N"):
        case.loss(teacher_draft_rows=case.teacher_draft_rows)


def test_feature_loss_is_relative() -> None:
    t = torch.tensor([[3.0, 4.0], [1.0, 0.0]], dtype=torch.float64)
    h = torch.tensor([[3.0, 9.0], [0.0, 0.0]], dtype=torch.float64, requires_grad=True)
    assert float(feature_loss(h, t).detach()) == pytest.approx(25 / 25 + 1)
    assert float(feature_loss(t, t)) == 0.0
    assert gradcheck(lambda x: feature_loss(x, t), (h,))
    assert feature_loss(h.detach().half(), t.half()).dtype == torch.float32
    assert float(feature_loss(t[:0], t[:0])) == 0.0
    large = torch.full((1, 4), 6e4, dtype=torch.float16)
    assert float(feature_loss(torch.zeros_like(large), large)) == pytest.approx(
        1.0
    )  # its square overflows half precision


def test_depth_weights() -> None:
    assert depth_weights("geometric", 0.8, 3) == pytest.approx([1.0, 0.8, 0.64])
    assert depth_weights("geometric", 1.0, 2) == [1.0, 1.0]
    assert depth_weights("exponential", 4.0, 3) == pytest.approx([1.0, math.exp(-0.25), math.exp(-0.5)])
    with pytest.raises(UserError, match="unknown depth weights 'flat'"):
        depth_weights("flat", 0.8, 3)
    for decay, depth in [(0.0, 3), (math.nan, 3), (0.8, 0)]:
        with pytest.raises(UserError, match="decay above 0"):
            depth_weights("geometric", decay, depth)


def test_expected_tokens_counts_the_bonus() -> None:
    assert expected_tokens([]) == 1.0
    assert expected_tokens([0.5, 0.5]) == pytest.approx(1.75)
    alpha, gamma = 0.7, 4  # the same acceptance at every depth: the paper's (1 - alpha^(gamma+1)) / (1 - alpha)
    assert expected_tokens([alpha] * gamma) == pytest.approx((1 - alpha ** (gamma + 1)) / (1 - alpha))
