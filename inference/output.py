"""Where tokens leave the loop: stops, length and streaming, in one place for all of them."""

from typing import Literal

import torch
from torch import Tensor
from transformers import EosTokenCriteria, MaxLengthCriteria, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

from specheads.inference.draft import Draft
from specheads.inference.verify import Verdict

FinishReason = Literal["eos", "stop", "length"]


class Stops:
    """Transformers' stopping criteria, asked after every single token although tokens come in blocks.

    End-of-sequence and length are decided here from plain numbers; every other criterion is called with the exact
    sequence that ends in the token asked about, in order, and never for a token behind the first stop.
    """

    def __init__(self, criteria: StoppingCriteriaList, max_length: int) -> None:
        lengths = [criterion.max_length for criterion in criteria if type(criterion) is MaxLengthCriteria]
        self.max_length = min(lengths, default=max_length)
        self._eos_ids: set[int] = set()
        self._others = []
        for criterion in criteria:
            if type(criterion) is EosTokenCriteria:
                self._eos_ids.update(criterion.eos_token_id.flatten().tolist())
            elif type(criterion) is not MaxLengthCriteria:
                self._others.append(criterion)

    def first(self, ids_1P: Tensor, block: list[int]) -> tuple[int, FinishReason | None]:
        """How many tokens of `block`, which ends `ids_1P`, may be emitted, and why it ends there (None: it goes on)."""
        before = ids_1P.shape[1] - len(block)
        for count, token in enumerate(block, start=1):
            # Every criterion is asked even when another has spoken, as transformers does: some count their calls.
            asked = [self._is_done(criterion, ids_1P[:, : before + count]) for criterion in self._others]
            if token in self._eos_ids:
                return count, "eos"
            if any(asked):
                return count, "stop"
            if before + count >= self.max_length:
                return count, "length"
        return len(block), None

    @staticmethod
    def _is_done(criterion: object, ids_1P: Tensor) -> bool:
        assert callable(criterion)
        return bool(torch.as_tensor(criterion(ids_1P, None)).all())


class Output:
    """The sequence so far: `ids_1P` with the prompt, and why it ended (`finish_reason`, None while it goes on)."""

    def __init__(self, prompt_1P: Tensor, stops: Stops, streamer: BaseStreamer | None) -> None:
        self.ids_1P = prompt_1P
        self.finish_reason: FinishReason | None = None
        self._prompt_length = prompt_1P.shape[1]
        self._stops = stops
        self._streamer = streamer

    @property
    def new_tokens(self) -> int:
        return self.ids_1P.shape[1] - self._prompt_length

    @property
    def room(self) -> int:
        """Tokens that may still be emitted."""
        return self._stops.max_length - self.ids_1P.shape[1]

    def emit(self, draft: Draft, verdict: Verdict, tokens: list[int]) -> int:
        """Append the accepted tokens and the one behind them (`tokens`, as plain numbers) up to the first stop.

        Returns:
            how many of them left.
        """
        accepted_1M = draft.ids_BK[:, : len(tokens) - 1]
        ids_1P = torch.cat([self.ids_1P, accepted_1M, verdict.next_token[:, None]], dim=1)
        count, self.finish_reason = self._stops.first(ids_1P, tokens)
        self.ids_1P = ids_1P[:, : self.ids_1P.shape[1] + count]
        if self._streamer is not None:
            for token in tokens[:count]:
                self._streamer.put(torch.tensor([token]))
            if self.finish_reason is not None:
                self._streamer.end()
        return count
