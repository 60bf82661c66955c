"""Losses between a draft head and its target, as pure functions of the positions that count.

Legend: N counted positions, n those of one chunk, D width, V vocabulary (the target's, or the draft's where that is
smaller). p is the target's distribution, q the draft's, x* the label. Per position

    ce   -log q(x*)
    kl   KL(p || q) = sum p (log p - log q)
    tv   1 - alpha,  alpha = sum min(p, q): the probability that a drafted token is accepted
    lk   lambda kl + (1 - lambda) tv,  lambda = exp(-eta alpha), alpha taken as a constant     (2602.23881)
    nla  -log alpha

With a draft vocabulary all sums run over it and q is normalised over it, but p keeps the denominator of the full
vocabulary and is *not* renormalised: what the head cannot draft will be rejected, and alpha must say so. kl leaves out
the terms of the missing mass; in ce a label outside the draft vocabulary adds nothing to the loss, but its position
counts.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from specheads.errors import UserError

Projection = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class LossSums:
    """Sums over positions, so that sums of chunks, ranks and steps add up before anything is divided.

    `loss` carries the gradient. `alpha_sum` (sum_x min(p, q) at each position) and `accuracy_sum` (the draft's argmax
    is the target's; NaN where that was not known) are detached. `count` is the number of positions.
    """

    loss: Tensor
    alpha_sum: Tensor
    accuracy_sum: Tensor
    count: int


@dataclass(frozen=True)
class Rows:
    """What a loss sees of n positions: p and log q over the draft vocabulary, and where the label stands in it.

    `label_n` holds an index into the draft vocabulary, or -1 for a label outside it.
    """

    p_nV: Tensor
    logq_nV: Tensor
    label_n: Tensor
    eta: float

    def alpha_n(self) -> Tensor:
        return torch.minimum(self.p_nV, self.logq_nV.exp()).sum(-1)


def cross_entropy(rows: Rows) -> Tensor:
    chosen_n = rows.logq_nV.gather(-1, rows.label_n.clamp(min=0)[:, None])[:, 0]
    return torch.where(rows.label_n >= 0, -chosen_n, 0.0)


def kl_divergence(rows: Rows) -> Tensor:
    p_nV = rows.p_nV
    # Where p is 0 its logarithm, and that of a masked q, are -inf: the terms are 0, not NaN.
    return -torch.special.entr(p_nV).sum(-1) - torch.where(p_nV > 0, p_nV * rows.logq_nV, 0.0).sum(-1)


def total_variation(rows: Rows) -> Tensor:
    return 1 - rows.alpha_n()


def kl_to_total_variation(rows: Rows) -> Tensor:
    alpha_n = rows.alpha_n()
    share_n = torch.exp(-rows.eta * alpha_n.detach())
    return share_n * kl_divergence(rows) + (1 - share_n) * (1 - alpha_n)


def negative_log_acceptance(rows: Rows) -> Tensor:
    alpha_n = rows.alpha_n()
    return -alpha_n.clamp(min=torch.finfo(alpha_n.dtype).tiny).log()


LOSSES: dict[str, Callable[[Rows], Tensor]] = {
    "ce": cross_entropy,
    "kl": kl_divergence,
    "tv": total_variation,
    "lk": kl_to_total_variation,
    "nla": negative_log_acceptance,
}


def draft_loss(
    hidden_ND: Tensor,
    project: Projection,
    *,
    teacher_hidden_ND: Tensor,
    teacher: Projection,
    labels_N: Tensor,
    kind: str = "kl",
    draft_vocab_ids: Tensor | None = None,
    teacher_draft_rows: Projection | None = None,
    teacher_logsumexp_N: Tensor | None = None,
    teacher_argmax_N: Tensor | None = None,
    lk_eta: float = 3.0,
    chunk: int = 512,
    trains_projection: bool = True,
) -> LossSums:
    """Loss, acceptance and argmax agreement, summed over N counted positions.

    Draft and target are projected `chunk` positions at a time, so that memory grows with chunk x V, not with N x V. A
    projection that is trained is evaluated again for the gradient; a frozen one gives that of the states at once.
    Probabilities are float32 (float64 where the logits are). N may be 0: the sums are 0 and the gradient is 0, not
    missing.

    Args:
        hidden_ND: the draft's states, rows that count only; `project` makes logits over the draft vocabulary of them.
        teacher_hidden_ND: the target's last hidden states that predict the same tokens; `teacher` makes logits over V.
            No gradient flows into either. Both projections must be deterministic: they may run twice.
        labels_N: target ids, int64.
        kind: a key of LOSSES; `lk_eta` belongs to "lk".
        trains_projection: False promises that `project` holds no parameter that is trained.
        draft_vocab_ids: ascending target ids of the draft vocabulary; None is the full vocabulary.
        teacher_draft_rows: makes the target's logits of the draft vocabulary only. With `teacher_logsumexp_N` (from
            `teacher_summary`) the full projection is not evaluated; the accuracy then needs `teacher_argmax_N`.

    Raises:
        UserError: an unknown kind.
        ValueError: shapes that do not belong together.
    """
    loss_of = get_loss(kind)
    if teacher_draft_rows is not None and (draft_vocab_ids is None or teacher_logsumexp_N is None):
        raise ValueError("teacher_draft_rows needs draft_vocab_ids and teacher_logsumexp_N beside it")
    if not len(hidden_ND) == len(teacher_hidden_ND) == len(labels_N):
        raise ValueError(f"{len(hidden_ND)} draft, {len(teacher_hidden_ND)} target states, {len(labels_N)} labels")

    def sums(hidden_nD: Tensor, teacher_hidden_nD: Tensor, labels_n: Tensor, *known_n: Tensor | None) -> Tensor:
        with torch.no_grad():
            p_nV, argmax_n = _teacher_probs(teacher_hidden_nD, teacher, draft_vocab_ids, teacher_draft_rows, *known_n)
        logq_nV = _wide(project(hidden_nD)).log_softmax(-1)
        if logq_nV.shape != p_nV.shape:
            raise ValueError(f"draft logits {tuple(logq_nV.shape)}, target {tuple(p_nV.shape)}: other vocabularies")
        rows = Rows(p_nV, logq_nV, _draft_labels(labels_n, draft_vocab_ids), lk_eta)
        with torch.no_grad():
            picked_n = logq_nV.argmax(-1)
            picked_n = picked_n if draft_vocab_ids is None else draft_vocab_ids[picked_n]
            unknown = logq_nV.new_tensor(math.nan)
            accuracy = unknown if argmax_n is None else (picked_n == argmax_n).sum().to(logq_nV.dtype)
            alpha = rows.alpha_n().sum()
        return torch.stack([loss_of(rows).sum(), alpha, accuracy])

    parts: list[Tensor] = []
    gradients: list[Tensor] = []
    for start in range(0, max(len(hidden_ND), 1), chunk):
        part = slice(start, start + chunk)
        inputs = (teacher_hidden_ND[part], labels_N[part])
        known = tuple(None if x is None else x[part] for x in (teacher_logsumexp_N, teacher_argmax_N))
        hidden_nD = hidden_ND[part]
        if not torch.is_grad_enabled():
            parts.append(sums(hidden_nD, *inputs, *known))
        elif trains_projection:
            parts.append(checkpoint(sums, hidden_nD, *inputs, *known, use_reentrant=False, preserve_rng_state=False))
        else:
            leaf_nD = hidden_nD.detach().requires_grad_()
            part_sums = sums(leaf_nD, *inputs, *known)
            gradients.append(torch.autograd.grad(part_sums[0], leaf_nD)[0])
            parts.append(part_sums.detach())
    total = torch.stack(parts).sum(0)
    loss = _WithGradient.apply(hidden_ND, total[0], torch.cat(gradients)) if gradients else total[0]
    return LossSums(loss, total[1].detach(), total[2].detach(), len(hidden_ND))


class _WithGradient(torch.autograd.Function):
    """A loss whose gradient with respect to the states is already known."""

    @staticmethod
    def forward(ctx: Any, hidden_ND: Tensor, loss: Tensor, gradient_ND: Tensor) -> Tensor:
        ctx.save_for_backward(gradient_ND)
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (gradient_ND,) = ctx.saved_tensors
        return gradient_ND * gradients[0], None, None


@torch.no_grad()
def teacher_summary(teacher_hidden_ND: Tensor, teacher: Projection, *, chunk: int = 512) -> tuple[Tensor, Tensor]:
    """(logsumexp_N, argmax_N) of the target's full logits: what `draft_loss` needs beside the draft vocabulary."""
    parts = [_wide(teacher(hidden_nD)) for hidden_nD in teacher_hidden_ND.split(chunk)]
    return torch.cat([x.logsumexp(-1) for x in parts]), torch.cat([x.argmax(-1) for x in parts])


def feature_loss(hidden_ND: Tensor, teacher_hidden_ND: Tensor) -> Tensor:
    """Sum over positions of |h - t|^2 / |t|^2, in float32 or better: 0 is a copy, 1 is what h = 0 gets."""
    if hidden_ND.shape[-1] != teacher_hidden_ND.shape[-1]:
        raise UserError(
            f"loss.feature_weight compares the head's states, {hidden_ND.shape[-1]} wide, with the target's, "
            f"{teacher_hidden_ND.shape[-1]} wide; set it to 0 for this head"
        )
    h_ND, t_ND = _wide(hidden_ND), _wide(teacher_hidden_ND).detach()
    scale_N = t_ND.square().sum(-1).clamp(min=torch.finfo(t_ND.dtype).tiny)
    return ((h_ND - t_ND).square().sum(-1) / scale_N).sum()


def get_loss(kind: str) -> Callable[[Rows], Tensor]:
    """The loss of that name; UserError lists the known ones."""
    if kind not in LOSSES:
        raise UserError(f"unknown loss {kind!r}, expected one of {', '.join(LOSSES)}")
    return LOSSES[kind]


def depth_weights(name: str, decay: float, depth: int) -> list[float]:
    """Weights of draft depths 1..depth: "geometric" decay^(k-1), or "exponential" exp(-(k-1)/decay).

    Raises:
        UserError: an unknown name, or a decay or depth out of range.
    """
    if name not in ("geometric", "exponential"):
        raise UserError(f"unknown depth weights {name!r}, expected geometric or exponential")
    if not decay > 0 or depth < 1:
        raise UserError(f"depth weights with decay {decay} and depth {depth}, expected decay above 0, depth at least 1")
    factor = decay if name == "geometric" else math.exp(-1 / decay)
    return [factor**k for k in range(depth)]


def expected_tokens(alpha_by_depth: Sequence[float]) -> float:
    """Tokens a round emits, the bonus token included: 1 + sum_k prod_{j<=k} alpha_j.

    alpha_j is the acceptance at depth j among the rounds in which the depths before it were accepted.
    """
    total = survival = 1.0
    for alpha in alpha_by_depth:
        survival *= alpha
        total += survival
    return total


def _teacher_probs(
    hidden_nD: Tensor,
    teacher: Projection,
    draft_vocab_ids: Tensor | None,
    draft_rows: Projection | None,
    logsumexp_n: Tensor | None,
    argmax_n: Tensor | None,
) -> tuple[Tensor, Tensor | None]:
    """p over the draft vocabulary, under the full vocabulary's denominator, and the target's argmax where known."""
    if draft_rows is not None and logsumexp_n is not None:
        return (_wide(draft_rows(hidden_nD)) - logsumexp_n[:, None]).exp(), argmax_n
    logits_nV = _wide(teacher(hidden_nD))
    logsumexp_n, argmax_n = logits_nV.logsumexp(-1), logits_nV.argmax(-1)
    kept_nV = logits_nV if draft_vocab_ids is None else logits_nV[:, draft_vocab_ids]
    return (kept_nV - logsumexp_n[:, None]).exp(), argmax_n


def _draft_labels(labels_n: Tensor, draft_vocab_ids: Tensor | None) -> Tensor:
    if draft_vocab_ids is None:
        return labels_n
    index_n = torch.searchsorted(draft_vocab_ids, labels_n).clamp(max=len(draft_vocab_ids) - 1)
    return torch.where(draft_vocab_ids[index_n] == labels_n, index_n, -1)


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))
