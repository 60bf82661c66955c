"""Verification: which drafted tokens to keep so that the output has the target's distribution.

Pure functions: tensors in, a Verdict out; no model, no cache, no global random state, no read by the host.

Legend: B batch, K drafted tokens (gamma), V vocabulary. `target_probs[:, k]` is the target's distribution of the token
that `draft_ids[:, k]` proposes; the last one, `target_probs[:, K]`, is that of the token behind a fully accepted draft.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from specheads.errors import UserError
from specheads.inference.draws import draw_uniforms, make_generator, pick


@dataclass(frozen=True)
class Verdict:
    """`accepted` (batch,) drafted tokens kept; `next_token` (batch,) the token behind them; `path` only for trees."""

    accepted: Tensor
    next_token: Tensor
    path: Tensor | None = None


def verify_chain(
    draft_ids: Tensor, draft_probs: Tensor, target_probs: Tensor, *, generator: torch.Generator | None = None
) -> Verdict:
    """Algorithm 1 of Leviathan et al. (2211.17192): accept x with probability min(1, p(x) / q(x)), else draw from the
    residual.

    Lossless for any q, provided q is the very distribution that each token was drawn from.

    Args:
        draft_ids: (batch, gamma) int64; gamma may be 0. A row with a shorter draft ends in -1.
        draft_probs: (batch, gamma, vocab), the q of each token.
        target_probs: (batch, gamma + 1, vocab).
        generator: source of the uniforms, on the tensors' device; without one a fresh one from the system's entropy.

    Raises:
        UserError: the shapes do not fit together.
    """
    batch, gamma = draft_ids.shape
    vocab = target_probs.shape[-1]
    if draft_probs.shape != (batch, gamma, vocab) or target_probs.shape != (batch, gamma + 1, vocab):
        raise UserError(
            f"draft_ids {tuple(draft_ids.shape)} with draft_probs {tuple(draft_probs.shape)} and target_probs "
            f"{tuple(target_probs.shape)}; expected (batch, gamma), (batch, gamma, vocab) and (batch, gamma + 1, vocab)"
        )
    source = generator if generator is not None else make_generator(target_probs.device)
    return decide_chain(draft_ids, draft_probs, target_probs, draw_uniforms(batch, gamma + 1, source))


def decide_chain(draft_ids: Tensor, draft_probs: Tensor, target_probs: Tensor, uniforms: Tensor) -> Verdict:
    """`verify_chain` as a function of its uniforms (batch, gamma + 1): one for each coin, one for the next token."""
    gamma = draft_ids.shape[1]
    exists_BK = draft_ids >= 0
    ids_BK1 = draft_ids.clamp(min=0)[..., None]
    p_BK = target_probs[:, :gamma].gather(-1, ids_BK1).squeeze(-1).double()
    q_BK = draft_probs.gather(-1, ids_BK1).squeeze(-1).double()
    # u q < p, strictly and undivided: q = 0 needs no case of its own, and p = 0 is never accepted.
    keeps_BK = (uniforms[:, :gamma] * q_BK < p_BK) & exists_BK
    accepted_B = keeps_BK.long().cumprod(-1).sum(-1)

    weights_BV = _row(target_probs, accepted_B).double()
    if gamma:
        q_BV = _row(draft_probs, accepted_B.clamp(max=gamma - 1)).double()
        residual_BV = (weights_BV - q_BV).clamp(min=0)
        rejects_B1 = (accepted_B < exists_BK.sum(-1))[:, None]
        # Rounding can leave a rejection without a residual (p equal to q but for the last bit): p itself then.
        weights_BV = torch.where(rejects_B1 & (residual_BV.sum(-1, keepdim=True) > 0), residual_BV, weights_BV)
    return Verdict(accepted_B, pick(weights_BV, uniforms[:, gamma]))


def overlap(draft_probs: Tensor, target_probs: Tensor) -> Tensor:
    """sum_x min(p, q) at each drafted position, (batch, gamma): the chance that a token drawn from q is accepted."""
    return torch.minimum(draft_probs, target_probs[:, : draft_probs.shape[1]]).sum(-1)


def _row(probs_BNV: Tensor, index_B: Tensor) -> Tensor:
    return probs_BNV[torch.arange(len(index_B), device=index_B.device), index_B]
