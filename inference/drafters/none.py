"""Plain decoding in the same loop: the baseline of every comparison."""

import torch
from torch import Tensor

from specheads.inference.distribution import Sampler
from specheads.inference.draft import Draft, Drafter
from specheads.target import TargetModel


class NoDrafter(Drafter):
    """Proposes nothing, so that each round is one plain step of the target."""

    name = kind = "none"

    def start(self, target: TargetModel, sampler: Sampler, generator: torch.Generator) -> None:
        self._empty = Draft.empty(target)

    def observe(self, ids_1L: Tensor, taps_1LTD: Tensor | None, next_ids_1: Tensor) -> None:
        """Nothing to remember."""

    def propose(self, limit: int) -> Draft:
        return self._empty

    @property
    def memory_bytes(self) -> int:
        return 0
