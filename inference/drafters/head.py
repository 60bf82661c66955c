"""A draft head as the drafter: it follows the target's hidden states.

Legend: C committed tokens, L tokens read, T taps, D width, V the target's vocabulary, Vd the draft vocabulary.
"""

import torch
from torch import Tensor

from specheads.errors import UserError
from specheads.head import DraftHead
from specheads.inference.distribution import Sampler
from specheads.inference.draft import Draft, Drafter, draw_chain, weights_digest
from specheads.target import TargetModel


class HeadDrafter(Drafter):
    """Drafts with a head, bound to the decoder's target at `start` and put into eval mode.

    What the target has read is absorbed by the next `propose` that drafts: one pass a round whatever was accepted, and
    none at all while nothing is to be drafted.

    Raises:
        UserError: at `start`, the head was trained for another target.
    """

    kind = "head"

    def __init__(self, head: DraftHead) -> None:
        self.head = head
        self.name = head.type_name
        self.tap_layers = head.tap_layers
        self.max_draft_length = head.max_draft_length

    def start(self, target: TargetModel, sampler: Sampler, generator: torch.Generator) -> None:
        self._bind(target)
        self._state = self.head.start()
        self._sampler = sampler
        self._generator = generator
        self._vocab_size = target.vocab_size
        self._empty = Draft.empty(target)
        self._read_1L = torch.empty(1, 0, dtype=torch.int64, device=target.device)
        self._pending: list[tuple[Tensor, Tensor]] = []

    def observe(self, ids_1L: Tensor, taps_1LTD: Tensor | None, next_ids_1: Tensor) -> None:
        if taps_1LTD is None:  # a head that reads only tokens
            taps_1LTD = torch.empty(*ids_1L.shape, 0, 0, device=ids_1L.device)
        self._read_1L = torch.cat([self._read_1L, ids_1L], dim=1)
        self._pending.append((ids_1L, taps_1LTD))
        self._next_ids_1 = next_ids_1

    def propose(self, limit: int) -> Draft:
        if limit == 0:
            return self._empty
        ids, taps = zip(*self._pending, strict=True)
        self._pending = []
        logits_1Vd = self.head.absorb(self._state, torch.cat(ids, dim=1), torch.cat(taps, dim=1), self._next_ids_1)
        return draw_chain(
            logits_1Vd,
            lambda token_1: self.head.advance(self._state, token_1),
            limit=limit,
            prefix_1P=torch.cat([self._read_1L, self._next_ids_1[:, None]], dim=1),
            sampler=self._sampler,
            generator=self._generator,
            vocab_size=self._vocab_size,
            draft_vocab_ids=self.head.draft_vocab_ids,
        )

    def _bind(self, target: TargetModel) -> None:
        """Bind anew only where the head is bound elsewhere: checking and gathering take time at every generation."""
        try:
            bound = self.head.target
        except UserError:
            bound = None
        if bound is not target:
            self.head.bind(target)
        self.head.eval()

    @property
    def digest(self) -> str:
        return weights_digest(self.head)

    @property
    def memory_bytes(self) -> int:
        return self.head.memory_bytes
