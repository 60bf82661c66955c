"""THE loop: propose, score, verify, commit, observe, emit.

Legend: P sequence so far, K drafted tokens, V vocabulary.
"""

from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any

import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    StoppingCriteriaList,
    StopStringCriteria,
)
from transformers.generation import GenerateDecoderOnlyOutput
from transformers.generation.streamers import BaseStreamer

from specheads.errors import UserError
from specheads.inference.arguments import (
    caller_arguments,
    refuse_arguments,
    refuse_inputs,
    refuse_length,
    refuse_settings,
)
from specheads.inference.clock import RoundClock
from specheads.inference.distribution import Sampler
from specheads.inference.draft import Draft, Drafter
from specheads.inference.drafters.none import NoDrafter
from specheads.inference.draws import make_generator
from specheads.inference.output import FinishReason, Output, Stops
from specheads.inference.schedule import AutoLength, DraftLength, FixedLength
from specheads.inference.session import TargetSession
from specheads.inference.stats import Stats
from specheads.inference.verify import Verdict, overlap, verify_chain
from specheads.target import TargetModel

_LONGEST_AUTO_DRAFT = 16
_VERIFICATIONS = ("rejection",)


@dataclass(frozen=True)
class GenerationResult:
    """`sequences` (1, length) with the prompt, as transformers returns them; what happened; and why it ended."""

    sequences: Tensor
    stats: Stats
    finish_reason: FinishReason


class SpeculativeDecoder:
    """Generates with a target and a drafter; the output's law is the target's alone.

    Args:
        target: a transformers causal language model, or a `TargetModel`.
        drafter: who proposes tokens; without one, plain decoding.
        verification: "rejection" is Algorithm 1 of Leviathan et al. (2211.17192).
        draft_length: tokens to draft a round, or "auto": by running acceptance and measured cost, 0 among the choices.
            With "auto" measured times steer how the generator's numbers are used, so that the same seed repeats the
            same *sampled* tokens only with a fixed length.

    Attributes:
        last_result: the result of the newest generation, for use as `target.generate(..., custom_generate=decoder)`.

    Raises:
        UserError: an unknown verification, or a draft length that is not one or that the drafter cannot reach.
    """

    def __init__(
        self,
        target: PreTrainedModel | TargetModel,
        drafter: Drafter | None = None,
        *,
        verification: str = "rejection",
        draft_length: int | str = "auto",
    ) -> None:
        if verification not in _VERIFICATIONS:
            raise UserError(f"verification is {verification!r}; expected one of {', '.join(_VERIFICATIONS)}")
        self.target = TargetModel.wrap(target)
        self.drafter = drafter if drafter is not None else NoDrafter()
        self.last_result: GenerationResult | None = None
        self._length = _length_rule(draft_length, self.drafter)

    def generate(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        *,
        seed: int | None = None,
        streamer: BaseStreamer | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        **generation_kwargs: Any,
    ) -> GenerationResult:
        """Continue one prompt. Arguments mean what they mean in transformers' `generate`, which prepares them.

        Args:
            input_ids: (1, length), length at least 1.
            attention_mask: only ones.
            seed: for sampling; without one each call draws anew. The global random state is neither read nor changed.
            streamer: gets the prompt, each token in order, and one end.
            tokenizer: for `stop_strings`; the target's own by default.
            generation_kwargs: `max_new_tokens`, `do_sample`, `temperature`, `generation_config`, `logits_processor`,
                ...

        Raises:
            UserError: an argument that cannot be honoured, by name.
        """
        refuse_arguments(generation_kwargs)
        return self.target.model.generate(
            input_ids,
            attention_mask=attention_mask,
            streamer=streamer,
            custom_generate=partial(self._run, seed=seed, streamer=streamer),
            **self._with_stop_strings(generation_kwargs, tokenizer),
        )

    def __call__(
        self,
        model: PreTrainedModel,
        input_ids: Tensor,
        *,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        seed: int | None = None,
        streamer: BaseStreamer | None = None,
        **model_kwargs: Any,
    ) -> Tensor | GenerateDecoderOnlyOutput:
        """The loop as transformers' `custom_generate`: returns what transformers' own loop does. See `last_result`.

        Stop strings need `generate` above or a `StopStringCriteria`: here transformers 5.24 loses the tokenizer.
        """
        arguments = caller_arguments()
        refuse_arguments(arguments | arguments.get("kwargs", {}))
        self.last_result = self._run(
            model,
            input_ids,
            logits_processor=logits_processor,
            stopping_criteria=stopping_criteria,
            generation_config=generation_config,
            seed=seed,
            streamer=streamer if streamer is not None else arguments.get("streamer"),
            **model_kwargs,
        )
        sequences = self.last_result.sequences
        return GenerateDecoderOnlyOutput(sequences) if generation_config.return_dict_in_generate else sequences

    def _run(
        self,
        model: PreTrainedModel,
        input_ids: Tensor,
        *,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        seed: int | None,
        streamer: BaseStreamer | None,
        **model_kwargs: Any,
    ) -> GenerationResult:
        refuse_settings(generation_config)
        refuse_inputs(self.target, model, input_ids, model_kwargs)
        refuse_length(self.target, input_ids, generation_config)
        sampler = Sampler(logits_processor, do_sample=bool(generation_config.do_sample))
        output = Output(input_ids, Stops(stopping_criteria, generation_config.max_length), streamer)
        return self._decode(output, sampler, make_generator(self.target.device, seed))

    @torch.no_grad()
    def _decode(self, output: Output, sampler: Sampler, generator: torch.Generator) -> GenerationResult:
        drafter, session = self.drafter, TargetSession(self.target, self.drafter.tap_layers)
        stats, clock = Stats(generations=1), RoundClock(self.target.device)
        drafter.start(self.target, sampler, generator)

        draft, scored = Draft.empty(self.target), session.start(output.ids_1P)  # the prefill drafts nothing
        for turn in count():
            target_probs = sampler.probs(output.ids_1P, draft.ids_BK, scored.logits_BLV)
            verdict = verify_chain(draft.ids_BK, draft.probs_BKV, target_probs, generator=generator)
            outcome = _read_once(draft, verdict, target_probs)
            read = session.commit(outcome.accepted)
            emitted = output.emit(draft, verdict, outcome.tokens)

            times = clock.read()
            if turn == 0:
                stats.add_prefill(times)
            else:
                overlaps = outcome.overlaps[: min(outcome.accepted + 1, emitted)]
                stats.add_round(draft.length, outcome.accepted, emitted, overlaps, times)
                self._length.record(drafted=draft.length, overlaps=overlaps, seconds=times.total)
            if output.finish_reason is not None:
                stats.new_tokens = output.new_tokens
                return GenerationResult(output.ids_1P, stats, output.finish_reason)

            clock.mark()
            drafter.observe(read.ids_1L, read.taps_1LTD, verdict.next_token)
            draft = drafter.propose(self._length.choose(output.room - 1))
            clock.mark()
            scored = session.score(verdict.next_token, draft)
            clock.mark()
        raise AssertionError("the loop ends by a stop")

    def _with_stop_strings(self, kwargs: dict[str, Any], tokenizer: PreTrainedTokenizerBase | None) -> dict[str, Any]:
        """Transformers drops the tokenizer where there is a `custom_generate`: make stop strings a criterion here."""
        defaults = self.target.model.generation_config
        config = kwargs.get("generation_config") or defaults
        strings = kwargs.get("stop_strings", config.stop_strings or defaults.stop_strings)
        if not strings:
            return kwargs
        tokenizer = tokenizer or self.target.tokenizer
        if tokenizer is None:
            raise UserError(f"stop_strings={strings} needs a tokenizer; pass tokenizer=, or a target that has one")
        criteria = [*kwargs.get("stopping_criteria", []), StopStringCriteria(tokenizer, strings)]
        return kwargs | {"stop_strings": None, "stopping_criteria": StoppingCriteriaList(criteria)}


@dataclass(frozen=True)
class _Outcome:
    """What the host needs to know of a round; `tokens` are the accepted ones and the one behind them."""

    accepted: int
    tokens: list[int]
    overlaps: list[float]


def _read_once(draft: Draft, verdict: Verdict, target_probs: Tensor) -> _Outcome:
    """The one read by the host in a round; float64 holds token ids exactly.

    Raises:
        UserError: the target's distribution is not a number at a position that counts.
    """
    parts = [verdict.accepted, verdict.next_token, draft.ids_BK[0], overlap(draft.probs_BKV, target_probs)[0]]
    # A softmax that fails is not a number anywhere in its row, so one entry of each row tells.
    numbers = torch.cat([part.double() for part in [*parts, target_probs[0, :, 0]]]).tolist()
    accepted, length = int(numbers[0]), draft.length
    overlaps, probes = numbers[2 + length : 2 + 2 * length], numbers[2 + 2 * length :]
    if any(probe != probe for probe in probes[: accepted + 1]):
        raise UserError(
            "the target's distribution is not a number: its logits overflow or the logits processors rule out every "
            "token; use a wider dtype or fewer processors"
        )
    tokens = [int(token) for token in [*numbers[2 : 2 + accepted], numbers[1]]]
    return _Outcome(accepted, tokens, overlaps)


def _length_rule(draft_length: int | str, drafter: Drafter) -> DraftLength:
    longest = drafter.max_draft_length
    if draft_length == "auto":
        if drafter.kind == "none":
            return FixedLength(0)
        return AutoLength(_LONGEST_AUTO_DRAFT if longest is None else min(longest, _LONGEST_AUTO_DRAFT))
    if not isinstance(draft_length, int) or isinstance(draft_length, bool) or draft_length < 0:
        raise UserError(f'draft_length is {draft_length!r}; expected "auto" or a number of tokens from 0 up')
    if longest is not None and draft_length > longest:
        raise UserError(
            f"draft_length is {draft_length}, but {drafter.kind} {drafter.name} drafts at most {longest} tokens a "
            f'round; pass {longest} or less, or "auto"'
        )
    return FixedLength(draft_length)
