"""A draft and whoever proposes it: the contract between the loop and its drafters.

Legend: B batch, K drafted tokens, L tokens read, P prefix, T taps, D width, V the target's vocabulary.
"""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from specheads.inference.distribution import Sampler
from specheads.inference.draws import draw_uniforms, pick
from specheads.target import TargetModel


@dataclass(frozen=True)
class Draft:
    """Proposed tokens `ids_BK`, and in `probs_BKV` the very q (over the target's vocabulary) each was drawn from."""

    ids_BK: Tensor
    probs_BKV: Tensor
    confidence_BK: Tensor | None = None

    @property
    def length(self) -> int:
        return self.ids_BK.shape[1]

    @classmethod
    def empty(cls, target: TargetModel) -> "Draft":
        """Nothing proposed: the round is a plain step of the target."""
        ids_10 = torch.empty(1, 0, dtype=torch.int64, device=target.device)
        return cls(ids_10, torch.empty(1, 0, target.vocab_size, device=target.device))


class Drafter(ABC):
    """Proposes tokens. One object serves many generations, one after another.

    A generation is `start`, then `observe` and `propose` in turn. Example with prompt [5, 6] and the target's own first
    token 7: observe([5, 6], next=7); propose gives [8, 9]; the target accepts 8 and says 4 instead of 9: observe([7,
    8], next=4).
    """

    name: str
    kind: str
    tap_layers: tuple[int, ...] = ()
    max_draft_length: int | None = None

    @abstractmethod
    def start(self, target: TargetModel, sampler: Sampler, generator: torch.Generator) -> None:
        """A new generation: forget all earlier ones.

        Raises:
            UserError: the drafter cannot draft for this target.
        """

    @abstractmethod
    def observe(self, ids_1L: Tensor, taps_1LTD: Tensor | None, next_ids_1: Tensor) -> None:
        """The target has read `ids_1L` (first the whole prompt), with these states; `next_ids_1` follows them."""

    @abstractmethod
    def propose(self, limit: int) -> Draft:
        """At most `limit` tokens to follow `next_ids_1`; may be fewer or none."""

    @property
    def digest(self) -> str:
        """Tells drafters of the same name apart, such as a head before and after training; empty without weights."""
        return ""

    @property
    @abstractmethod
    def memory_bytes(self) -> int:
        """Bytes needed beside the target."""


def weights_digest(module: nn.Module) -> str:
    """Sixteen hex digits of the first 64 numbers of every tensor: training leaves none of them as it was."""
    hasher = hashlib.sha256()
    for name, tensor in module.state_dict().items():
        hasher.update(f"{name}{tuple(tensor.shape)}".encode())
        hasher.update(tensor.flatten()[:64].double().cpu().numpy().tobytes())
    return hasher.hexdigest()[:16]


def draw_chain(
    logits_1D: Tensor,
    advance: Callable[[Tensor], Tensor],
    *,
    limit: int,
    prefix_1P: Tensor,
    sampler: Sampler,
    generator: torch.Generator,
    vocab_size: int,
    draft_vocab_ids: Tensor | None = None,
) -> Draft:
    """Draw `limit` tokens one after another from a drafter's logits.

    Args:
        logits_1D: the drafter's logits of the token behind the prefix, over the target's vocabulary or its own.
        advance: takes the token drawn, (1,), and gives the logits of the one behind it; not called for the last token.
        prefix_1P: all tokens before the draft, for processors that look at history.
        vocab_size: the target's.
        draft_vocab_ids: target ids of the drafter's own vocabulary. Outside it q is zero under every processor: they
            see minus infinity there, or nothing where they look at values alone.
    """
    compact_ids = draft_vocab_ids if sampler.token_blind else None
    uniforms_1K = draw_uniforms(1, limit, generator)
    ids_1K = prefix_1P[:, :0]
    probs = []
    for depth in range(limit):
        if draft_vocab_ids is not None and compact_ids is None:
            full_1V = logits_1D.new_full((1, vocab_size), -torch.inf)
            logits_1D = full_1V.index_copy_(1, draft_vocab_ids, logits_1D)
        q_1D = sampler.next_probs(prefix_1P, ids_1K, logits_1D)
        # Processors can rule out every token a drafter knows; the softmax is then not a number, and any q will do.
        q_1D = q_1D.nan_to_num(nan=1 / q_1D.shape[-1])
        token_1 = pick(q_1D, uniforms_1K[:, depth])
        token_1 = token_1 if compact_ids is None else compact_ids[token_1]
        ids_1K = torch.cat([ids_1K, token_1[:, None]], dim=1)
        probs.append(q_1D)
        if depth + 1 < limit:
            logits_1D = advance(token_1)
    probs_1KD = torch.stack(probs, dim=1)
    if compact_ids is None:
        return Draft(ids_1K, probs_1KD)
    probs_1KV = probs_1KD.new_zeros(1, limit, vocab_size)
    return Draft(ids_1K, probs_1KV.index_copy_(2, compact_ids, probs_1KD))
