"""The target in the loop: prefill, one pass a round, and a cache that holds what was committed.

Legend: P prompt, K drafted tokens, L tokens read and kept, T taps, D width.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specheads.cache import PreallocatedCache
from specheads.inference.draft import Draft
from specheads.target import TargetModel, TargetOutput


@dataclass(frozen=True)
class Read:
    """Tokens the target has read for good, and its tapped states at them (None when the drafter wants none)."""

    ids_1L: Tensor
    taps_1LTD: Tensor | None


class TargetSession:
    """One generation's view of the target.

    Cache rule: between rounds the cache holds every committed token but the newest, which the next pass reads first. A
    pass over that token and K drafted ones, of which a were accepted, forgets K - a.
    """

    def __init__(self, target: TargetModel, tap_layers: Sequence[int]) -> None:
        self.target = target
        self.tap_layers = tuple(tap_layers)
        self.cache = PreallocatedCache(target.config)

    def start(self, prompt_1P: Tensor) -> TargetOutput:
        """Prefill: reads the whole prompt, scores only the token behind it, taps every position."""
        return self._read(prompt_1P, drafted=0, logits_to_keep=1)

    def score(self, last_1: Tensor, draft: Draft) -> TargetOutput:
        """One pass over the newest committed token and the draft: K + 1 scored positions."""
        return self._read(torch.cat([last_1[:, None], draft.ids_BK], dim=1), drafted=draft.length, logits_to_keep=0)

    def commit(self, accepted: int) -> Read:
        """Keep what the last pass read up to `accepted` drafted tokens, and forget the rest."""
        kept = self._ids_1L.shape[1] - self._drafted + accepted
        self.cache.rollback(self._before + kept)
        return Read(self._ids_1L[:, :kept], None if self._taps_1LTD is None else self._taps_1LTD[:, :kept])

    def _read(self, ids_1L: Tensor, *, drafted: int, logits_to_keep: int) -> TargetOutput:
        self._before, self._drafted, self._ids_1L = self.cache.get_seq_length(), drafted, ids_1L
        output = self.target.forward(ids_1L, cache=self.cache, taps=self.tap_layers, logits_to_keep=logits_to_keep)
        self._taps_1LTD = output.taps_BLTD
        return output
