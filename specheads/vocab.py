"""The draft vocabulary: the target tokens that a head can draft, chosen by how often they occur."""

import torch
from torch import Tensor

from specheads.errors import UserError


def choose_draft_vocabulary(counts_V: Tensor, size: int) -> Tensor:
    """The `size` most frequent target ids, ascending; ties go to the lower id.

    Args:
        counts_V: how often each target id occurs in the answers, (V,).
        size: tokens in the draft vocabulary.

    Raises:
        UserError: more tokens wanted than the target has.
    """
    if not 1 <= size <= len(counts_V):
        raise UserError(f"draft_vocab_size is {size}, expected 1 to {len(counts_V)} for this target")
    order = torch.sort(counts_V, descending=True, stable=True).indices
    return order[:size].sort().values


def coverage(counts_V: Tensor, ids: Tensor) -> float:
    """Share of the counted tokens that `ids` hold: an upper bound of alpha."""
    return float(counts_V[ids].sum() / counts_V.sum().clamp(min=1))
