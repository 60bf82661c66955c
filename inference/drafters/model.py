"""A separate, smaller language model as the drafter.

Legend: C committed tokens, L tokens read, V the target's vocabulary.
"""

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from specheads.cache import PreallocatedCache
from specheads.errors import UserError
from specheads.inference.distribution import Sampler
from specheads.inference.draft import Draft, Drafter, draw_chain, weights_digest
from specheads.target import TargetModel, tokenizer_digest


class ModelDrafter(Drafter):
    """Drafts with a model of its own, which shares the target's tokenizer.

    Args:
        model: the small model; its vocabulary may be padded to another size than the target's.
        temperature: of the drafts alone, a free knob (0 is greedy); without one, the target's settings are used. The
            output's law does not depend on it.

    Raises:
        UserError: the temperature is negative; at `start`, that the tokenizers of both models are known and differ.
    """

    kind = "model"

    def __init__(self, model: PreTrainedModel | TargetModel, temperature: float | None = None) -> None:
        if temperature is not None and temperature < 0:
            raise UserError(f"draft temperature is {temperature}; expected 0 (greedy) or more")
        self.model = TargetModel.wrap(model)
        self.temperature = temperature
        self.name = self.model.config.name_or_path or self.model.config.model_type
        self._readable = len(self.model.model.get_input_embeddings().weight)
        self._same_tokens_as: TargetModel | None = None
        self._cache_bytes = 0

    def start(self, target: TargetModel, sampler: Sampler, generator: torch.Generator) -> None:
        self._check_tokens(target)
        self._sampler = sampler if self.temperature is None else sampler.with_temperature(self.temperature)
        self._generator = generator
        self._vocab_size = target.vocab_size
        self._empty = Draft.empty(target)
        self._cache = PreallocatedCache(self.model.config)
        self._read_1L = torch.empty(1, 0, dtype=torch.int64, device=target.device)

    def observe(self, ids_1L: Tensor, taps_1LTD: Tensor | None, next_ids_1: Tensor) -> None:
        self._read_1L = torch.cat([self._read_1L, ids_1L], dim=1)
        self._next_ids_1 = next_ids_1
        # What was drafted and accepted stays. Drafted tokens are read one by one and the last one never, so after full
        # acceptance the cache is one token short; `propose` takes in whatever is missing.
        self._cache.rollback(min(self._cache.get_seq_length(), self._read_1L.shape[1]))

    def propose(self, limit: int) -> Draft:
        committed_1C = torch.cat([self._read_1L, self._next_ids_1[:, None]], dim=1)
        longest = getattr(self.model.config, "max_position_embeddings", None)
        if longest is not None:
            limit = min(limit, longest - committed_1C.shape[1] + 1)
        if limit <= 0:
            return self._empty
        draft = draw_chain(
            self._logits(committed_1C[:, self._cache.get_seq_length() :]),
            lambda token_1: self._logits(token_1[:, None]),
            limit=limit,
            prefix_1P=committed_1C,
            sampler=self._sampler,
            generator=self._generator,
            vocab_size=self._vocab_size,
        )
        self._cache_bytes = max(self._cache_bytes, self._cache.nbytes)
        return draft

    def _logits(self, ids_1L: Tensor) -> Tensor:
        """Logits (1, V) of the token behind `ids_1L`; minus infinity for tokens that only the target's padding has."""
        # The target may have emitted a token that only its own padding holds. Any stand-in keeps the output right.
        readable_1L = ids_1L.clamp(max=self._readable - 1)
        logits_1V = self.model.forward(readable_1L, cache=self._cache, logits_to_keep=1).logits_BLV[:, -1]
        missing = self._vocab_size - logits_1V.shape[1]
        return F.pad(logits_1V, (0, missing), value=-torch.inf) if missing > 0 else logits_1V[:, : self._vocab_size]

    def _check_tokens(self, target: TargetModel) -> None:
        ours, theirs = self.model.tokenizer, target.tokenizer
        if target is self._same_tokens_as or ours is None or theirs is None:
            return
        if tokenizer_digest(ours) != tokenizer_digest(theirs):
            raise UserError(
                f"draft model {self.name} has another tokenizer than the target; expected the same tokens under the "
                "same ids: choose a draft model of the target's family"
            )
        self._same_tokens_as = target

    @property
    def digest(self) -> str:
        return weights_digest(self.model.model)

    @property
    def memory_bytes(self) -> int:
        """The model's weights and the most its keys and values have taken so far."""
        return self.model.weight_bytes + self._cache_bytes
