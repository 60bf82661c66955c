"""Several drafters in order of preference: the first that offers anything drafts the round."""

from collections.abc import Sequence

import torch
from torch import Tensor

from specheads.errors import UserError
from specheads.inference.distribution import Sampler
from specheads.inference.draft import Draft, Drafter
from specheads.target import TargetModel


class CascadeDrafter(Drafter):
    """For example lookup first, which costs nothing, and a head where the text offers no match. All of them observe.

    Raises:
        UserError: no drafters are given.
    """

    kind = "cascade"

    def __init__(self, drafters: Sequence[Drafter]) -> None:
        if not drafters:
            raise UserError("CascadeDrafter has no drafters; expected at least one")
        self.drafters = list(drafters)
        self.name = "+".join(drafter.name for drafter in self.drafters)
        self.tap_layers = tuple(sorted({tap for drafter in self.drafters for tap in drafter.tap_layers}))
        longest = [drafter.max_draft_length for drafter in self.drafters]
        self.max_draft_length = None if None in longest else max(length for length in longest if length is not None)

    def start(self, target: TargetModel, sampler: Sampler, generator: torch.Generator) -> None:
        for drafter in self.drafters:
            drafter.start(target, sampler, generator)
        self._empty = Draft.empty(target)

    def observe(self, ids_1L: Tensor, taps_1LTD: Tensor | None, next_ids_1: Tensor) -> None:
        for drafter in self.drafters:
            drafter.observe(ids_1L, self._taps_of(drafter, taps_1LTD), next_ids_1)

    def propose(self, limit: int) -> Draft:
        for drafter in self.drafters:
            draft = drafter.propose(limit if drafter.max_draft_length is None else min(limit, drafter.max_draft_length))
            if draft.length:
                return draft
        return self._empty

    def _taps_of(self, drafter: Drafter, taps_1LTD: Tensor | None) -> Tensor | None:
        if taps_1LTD is None or not drafter.tap_layers:
            return None
        return taps_1LTD[:, :, [self.tap_layers.index(tap) for tap in drafter.tap_layers]]

    @property
    def digest(self) -> str:
        return " ".join(drafter.digest for drafter in self.drafters)

    @property
    def memory_bytes(self) -> int:
        return sum(drafter.memory_bytes for drafter in self.drafters)
