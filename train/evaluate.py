"""How well a head drafts, measured on held-back answers: alpha by depth and the tokens that a round would emit.

Teacher-forced: at each counted position of the target's own answers, alpha_k = sum_x min(p, q) at depth k, along the
true tokens. Expected tokens = 1 + sum_k prod_{j<=k} alpha_j, the bonus token included (arXiv 2211.17192, section 3).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from specheads.train.features import Features
from specheads.train.losses import expected_tokens
from specheads.train.step import TrainingStep


@dataclass(frozen=True)
class Evaluation:
    """loss (mean, weighted by depth), alpha and argmax agreement by depth, expected tokens a round."""

    loss: float
    alpha: list[float]
    agreement: list[float]
    expected_tokens: float


@torch.no_grad()
def evaluate(step: TrainingStep, features: Features, rows: Sequence[int], *, rows_per_batch: int = 4) -> Evaluation:
    """Evaluate the head inside `step` on some rows of `features`; the head's training mode is put back afterwards."""
    training = step.training
    step.eval()
    counts = step.counts(features.rows, rows)
    loss, sums_K3 = 0.0, torch.zeros(len(counts), 3, dtype=torch.float64)
    for start in range(0, len(rows), rows_per_batch):
        result = step(features.batch(rows[start : start + rows_per_batch]), counts)
        loss += float(result.loss)
        sums_K3 += result.sums_K3.double().cpu()
    step.train(training)
    alpha, agreement = (sums_K3[:, i] / sums_K3[:, 2].clamp(min=1) for i in (0, 1))
    return Evaluation(loss, alpha.tolist(), agreement.tolist(), expected_tokens(alpha.tolist()))
