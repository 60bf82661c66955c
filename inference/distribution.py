"""From logits to the distribution that tokens are drawn from: one object for the target, its drafters and plain
decoding.

Legend: P prefix, K block, N = K + 1 scored positions, V vocabulary. Only batches of one row.
"""

import torch
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList
from transformers.generation import logits_process

from specheads.errors import UserError

# What these do to a row of logits depends on nothing but the row, so they run on all rows at once.
_WARPERS = frozenset(
    {
        logits_process.TemperatureLogitsWarper,
        logits_process.TopKLogitsWarper,
        logits_process.TopPLogitsWarper,
        logits_process.MinPLogitsWarper,
        logits_process.TypicalLogitsWarper,
        logits_process.EpsilonLogitsWarper,
        logits_process.EtaLogitsWarper,
        logits_process.TopHLogitsWarper,
    }
)
_ROWWISE = _WARPERS | {
    logits_process.LogitNormalization,
    logits_process.SuppressTokensLogitsProcessor,
    logits_process.InfNanRemoveLogitsProcessor,
}
# These keep state from call to call and expect one call a token.
_STATEFUL = (
    logits_process.UnbatchedClassifierFreeGuidanceLogitsProcessor,
    logits_process.SynthIDTextWatermarkLogitsProcessor,
)


class Sampler:
    """The adjusted distribution at each scored position, with the exact prefix of that position.

    Args:
        processors: as transformers prepares them, in order. Each must be a function of (prefix, logits); it may be
            called for tokens that are rejected later.
        do_sample: False makes every distribution one-hot at its greatest logit.

    Raises:
        UserError: a processor is known to keep state between calls.
    """

    def __init__(self, processors: LogitsProcessorList | None = None, *, do_sample: bool) -> None:
        self.processors = LogitsProcessorList(processors or [])
        self.do_sample = do_sample
        for processor in self.processors:
            if isinstance(processor, _STATEFUL):
                raise UserError(
                    f"{type(processor).__name__} keeps state from token to token; expected processors that depend only "
                    "on the prefix: drop guidance_scale or the SynthID watermark, or generate without a drafter's loop"
                )
        # Looks at nothing but values: the same whether tokens of probability 0 are there or left out.
        self.token_blind = all(type(processor) in _WARPERS for processor in self.processors)
        self.needs_prefix = any(type(processor) not in _ROWWISE for processor in self.processors)

    def probs(self, prefix_1P: Tensor, block_1K: Tensor, logits_1NV: Tensor) -> Tensor:
        """Distributions (1, N, vocab): row j is that of the token behind `prefix + block[:j]`; float32, or float64 if
        given.

        A row of logits that the processors empty (or that is not finite) gives a row that is not a number when
        sampling.
        """
        scores_NV = logits_1NV[0].to(torch.promote_types(logits_1NV.dtype, torch.float32), copy=True)
        ids_1P = torch.cat([prefix_1P, block_1K], dim=1) if self.needs_prefix else prefix_1P
        for processor in self.processors:
            if type(processor) in _ROWWISE:
                scores_NV = processor(ids_1P, scores_NV)
            else:
                start = prefix_1P.shape[1]
                rows = [processor(ids_1P[:, : start + j], scores_NV[j : j + 1]) for j in range(len(scores_NV))]
                scores_NV = torch.cat(rows)
        if self.do_sample:
            return scores_NV.softmax(-1)[None]
        return torch.zeros_like(scores_NV).scatter_(-1, scores_NV.argmax(-1, keepdim=True), 1.0)[None]

    def next_probs(self, prefix_1P: Tensor, block_1K: Tensor, logits_1V: Tensor) -> Tensor:
        """Distribution (1, vocab) of the one token behind `prefix + block`: what a drafter draws from."""
        ids_1P = torch.cat([prefix_1P, block_1K], dim=1) if self.needs_prefix else prefix_1P
        return self.probs(ids_1P, block_1K[:, :0], logits_1V[:, None])[:, 0]

    def with_temperature(self, temperature: float) -> "Sampler":
        """The same processors with another temperature, for a drafter's own use; 0 is greedy.

        Raises:
            UserError: the temperature is negative.
        """
        if not temperature >= 0:
            raise UserError(f"draft temperature is {temperature}; expected 0 (greedy) or more")
        others = [p for p in self.processors if not isinstance(p, logits_process.TemperatureLogitsWarper)]
        if temperature == 0:
            return Sampler(LogitsProcessorList(others), do_sample=False)
        # Before the first warper, where transformers puts it.
        place = next((i for i, p in enumerate(others) if type(p) in _WARPERS), len(others))
        warper: LogitsProcessor = logits_process.TemperatureLogitsWarper(float(temperature))
        return Sampler(LogitsProcessorList([*others[:place], warper, *others[place:]]), do_sample=True)
