"""One training step as a module: features in, loss and acceptance by depth out.

It is what Accelerate prepares: everything that holds a trained parameter runs inside its forward. Counted positions are
gathered before anything is projected to the vocabulary. Legend: N counted positions, B rows, L length, D width.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn

from specheads.head import DraftHead, HeadInputs, shift_left
from specheads.train.config import LossConfig
from specheads.train.features import FeatureBatch
from specheads.train.losses import depth_weights, draft_loss, feature_loss
from specheads.train.packing import PackedRows


def counted_rows(loss_mask_BL: Tensor, document_BL: Tensor, depth: int) -> Tensor:
    """True at row t where depth `depth` predicts a counted token of the same document: token t+1+depth; (B, L)."""
    ahead = depth + 1
    return (
        shift_left(loss_mask_BL, ahead) & (document_BL == shift_left(document_BL + 1, ahead) - 1) & (document_BL >= 0)
    )


def _deep_rows(inputs: HeadInputs, depth: int) -> Tensor:
    """True at the rows from which a counted token is predicted at depth 2 or beyond; (B, L)."""
    rows_BL = torch.zeros_like(inputs.loss_mask_BL)
    for each in range(2, depth + 1):
        rows_BL |= counted_rows(inputs.loss_mask_BL, inputs.document_BL, each)
    return rows_BL


@dataclass(frozen=True)
class StepResult:
    """loss: to be differentiated; sums (depths, 3): alpha, argmax agreement and count by depth, detached."""

    loss: Tensor
    sums_K3: Tensor


class TrainingStep(nn.Module):
    """A head with its loss. `forward` takes the counts to divide by, so that parts of a batch add up to its mean."""

    def __init__(self, head: DraftHead, config: LossConfig) -> None:
        super().__init__()
        self.head = head
        self.config = config
        self.weights = depth_weights("geometric", config.depth_decay, config.depth)

    def counts(self, rows: PackedRows, chosen: Sequence[int]) -> list[int]:
        """Counted positions by depth in the chosen rows, known without running anything."""
        tokens = rows.tensors(list(chosen))
        masks = (tokens["loss_mask_BL"], tokens["document_BL"])
        return [int(counted_rows(*masks, depth).sum()) for depth in range(1, self.config.depth + 1)]

    def forward(self, batch: FeatureBatch, counts: Sequence[int]) -> StepResult:
        """`counts`: counted positions by depth of the whole batch that this is a part of."""
        head, config = self.head, self.config
        inputs = replace(batch.inputs, deep_BL=_deep_rows(batch.inputs, config.depth))
        hidden_by_depth = head(inputs, config.depth)
        norm = sum(self.weights)
        loss, sums = hidden_by_depth[0].new_zeros((), dtype=torch.float32), []
        for depth, (weight, hidden_BLD, count) in enumerate(
            zip(self.weights, hidden_by_depth, counts, strict=True), start=1
        ):
            row_N, place_N = counted_rows(inputs.loss_mask_BL, inputs.document_BL, depth).nonzero(as_tuple=True)
            teacher_N = (row_N, place_N + depth)  # the target's own state one token before the predicted one
            known_N = [None if x is None else x[teacher_N] for x in (batch.logsumexp_BL, batch.argmax_BL)]
            hidden_ND, teacher_ND = hidden_BLD[row_N, place_N], inputs.last_hidden_BLD[teacher_N]
            part = draft_loss(
                hidden_ND,
                partial(head.project, depth=depth),
                teacher_hidden_ND=teacher_ND,
                teacher=head.target.logits,
                labels_N=inputs.ids_BL[row_N, place_N + depth + 1],
                kind=config.kind,
                draft_vocab_ids=head.draft_vocab_ids,
                teacher_draft_rows=head.target_logits if self._knows_summary(batch) else None,
                teacher_logsumexp_N=known_N[0],
                teacher_argmax_N=known_N[1],
                trains_projection=head.trains_projection,
                lk_eta=config.lk_eta,
                chunk=config.chunk,
            )
            total = part.loss
            if config.feature_weight:
                if config.feature_positions == "all" and depth == 1:
                    every_BL = torch.ones_like(inputs.loss_mask_BL)
                    row_N, place_N = counted_rows(every_BL, inputs.document_BL, depth).nonzero(as_tuple=True)
                    hidden_ND = hidden_BLD[row_N, place_N]
                    teacher_ND = inputs.last_hidden_BLD[row_N, place_N + depth]
                total = total + config.feature_weight * feature_loss(hidden_ND, teacher_ND)
            loss = loss + weight / norm * total / max(count, 1)
            sums.append(torch.stack([part.alpha_sum, part.accuracy_sum, part.alpha_sum.new_tensor(part.count)]))
        return StepResult(loss, torch.stack(sums).detach())

    def _knows_summary(self, batch: FeatureBatch) -> bool:
        return batch.logsumexp_BL is not None and self.head.draft_vocab_ids is not None
