"""Drafts copied from the text so far: what followed the longest earlier occurrence of the words just written."""

import torch
import torch.nn.functional as F
from torch import Tensor

from specheads.errors import UserError
from specheads.inference.distribution import Sampler
from specheads.inference.draft import Draft, Drafter
from specheads.target import TargetModel


class LookupDrafter(Drafter):
    """Finds the longest suffix of prompt and output (`max_ngram` tokens down to `min_ngram`) that occurred before.

    The most recent earlier occurrence counts. The copy may run into what it copies itself, so that a text of period 3
    is continued for as long as asked. Each q is one-hot.

    Example: max_ngram 2, text [1, 2, 3, 9, 1, 2]: the suffix [1, 2] occurred at 0, so the draft is [3, 9, 1, 2, 3,
        ...].

    Raises:
        UserError: not 1 <= min_ngram <= max_ngram.
    """

    name = kind = "lookup"

    def __init__(self, max_ngram: int = 4, min_ngram: int = 2) -> None:
        if not 1 <= min_ngram <= max_ngram:
            raise UserError(f"min_ngram is {min_ngram} and max_ngram {max_ngram}; expected 1 <= min_ngram <= max_ngram")
        self.max_ngram, self.min_ngram = max_ngram, min_ngram

    def start(self, target: TargetModel, sampler: Sampler, generator: torch.Generator) -> None:
        self._target = target
        self._text: list[int] = []
        self._follows: dict[tuple[int, ...], int] = {}  # n-gram -> where the token after its latest occurrence stands
        self._empty = Draft.empty(target)

    def observe(self, ids_1L: Tensor, taps_1LTD: Tensor | None, next_ids_1: Tensor) -> None:
        # The newest token is already known from the last time; the device is idle here, so this read waits for nothing.
        fresh = torch.cat([ids_1L[0], next_ids_1])[1 if self._text else 0 :]
        for token in fresh.tolist():
            self._append(token)

    def propose(self, limit: int) -> Draft:
        start = self._find()
        if start is None or limit == 0:
            return self._empty
        copied = self._text[start : start + limit]
        for i in range(limit - len(copied)):
            copied.append(copied[i])
        ids_1K = torch.tensor([copied], device=self._target.device)
        return Draft(ids_1K, F.one_hot(ids_1K, self._target.vocab_size).float())

    def _append(self, token: int) -> None:
        # Only n-grams with a token after them are indexed, so the suffix asked about never finds itself.
        for n in self._lengths():
            self._follows[tuple(self._text[-n:])] = len(self._text)
        self._text.append(token)

    def _find(self) -> int | None:
        for n in reversed(self._lengths()):
            place = self._follows.get(tuple(self._text[-n:]))
            if place is not None:
                return place
        return None

    def _lengths(self) -> range:
        return range(self.min_ngram, min(self.max_ngram, len(self._text)) + 1)

    @property
    def memory_bytes(self) -> int:
        return 0
