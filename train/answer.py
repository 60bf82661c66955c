"""The target answers a batch of prompts; while it does so, it computes the hidden states that a head is trained on.

Prompts are left-padded over preallocated key/value storage; rows leave their batch as they finish. Legend: B rows of
the batch, L positions, T taps, D width, V vocabulary.
"""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from transformers import LogitsProcessorList, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from specheads.cache import PreallocatedCache
from specheads.errors import UserError
from specheads.prompts import Prompt
from specheads.target import TargetModel
from specheads.train.store import DocumentFeatures, document_key


@dataclass(frozen=True)
class AnswerSettings:
    """How the target answers. Temperature 0 is greedy; `top_k` 0 and `top_p` 1 mean no truncation."""

    max_new_tokens: int = 256
    temperature: float = 0.7
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    max_prompt_tokens: int = 1024
    raw: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf"):
            raise UserError(f"temperature is {self.temperature}, expected 0 (greedy) or more")
        if self.seed < 0:
            raise UserError(f"seed is {self.seed}, expected 0 or more")
        if self.max_new_tokens < 1:
            raise UserError(f"max-new-tokens is {self.max_new_tokens}, expected 1 or more")
        if self.top_k < 0:
            raise UserError(f"top-k is {self.top_k}, expected 0 (off) or more")
        if not 0 < self.top_p <= 1:
            raise UserError(f"top-p is {self.top_p}, expected more than 0 and at most 1")


@dataclass(frozen=True)
class Question:
    """A prompt as the target reads it, and which of its answers this is to be (counted from 0)."""

    prompt: Prompt
    ids: list[int]
    sample: int = 0


@dataclass(frozen=True)
class Answer:
    """A question with the ids that the target answered; `finished` when it ended by itself.

    `features` are those of prompt and answer (the last token's are zero: nothing is predicted behind it), where asked.
    """

    question: Question
    response_ids: list[int]
    finished: bool
    features: DocumentFeatures | None = None

    @property
    def key(self) -> str:
        """What the document is found by in a feature store."""
        mask = [False] * len(self.question.ids) + [True] * len(self.response_ids)
        return document_key(self.question.ids + self.response_ids, mask)


@torch.no_grad()
def answer_batch(
    target: TargetModel,
    batch: Sequence[Question],
    settings: AnswerSettings,
    taps: Sequence[int] | None = None,
) -> Iterator[Answer]:
    """Answer a batch; with `taps` (may be empty) each answer has its features.

    Every answer has random numbers of its own, drawn from the seed, the prompt's id and the sample's number, so that it
    does not depend on which batch its prompt fell into, up to the rounding of the batched pass.
    """
    device, longest = target.device, max(len(question.ids) for question in batch)
    ids_BL = torch.zeros(len(batch), longest, dtype=torch.long)
    mask_BL = torch.zeros(len(batch), longest + settings.max_new_tokens, dtype=torch.long)
    for row, question in enumerate(batch):
        ids_BL[row, longest - len(question.ids) :] = torch.tensor(question.ids)
        mask_BL[row, longest - len(question.ids) :] = 1
    uniforms_BL = torch.stack([_uniforms(settings, question) for question in batch]).to(device)
    ids_BL, mask_BL = ids_BL.to(device), mask_BL.to(device)
    positions_BL = (mask_BL.cumsum(-1) - 1).clamp(min=0)
    stop_ids = torch.tensor(sorted(end_token_ids(target)), device=device)
    warpers = _warpers(settings)

    answers: list[list[int]] = [[] for _ in batch]
    collected = [_Collector() for _ in batch]
    finished = [False] * len(batch)
    rows = torch.arange(len(batch), device=device)  # which prompt each row of the shrinking batch answers
    cache = PreallocatedCache(target.model.config)
    step_ids, step_positions = ids_BL, positions_BL[:, :longest]
    for step in range(settings.max_new_tokens):
        seen = longest + step
        output = target.forward(
            step_ids,
            cache=cache,
            attention_mask=mask_BL[:, :seen],
            position_ids=step_positions,
            taps=() if taps is None else (*taps, target.num_layers),
            logits_to_keep=1,
        )
        logits_BV = output.logits_BLV[:, -1].float()
        if output.taps_BLTD is not None:
            states_BLTD, sums_B, best_B = (
                output.taps_BLTD.cpu(),
                logits_BV.logsumexp(-1).cpu(),
                logits_BV.argmax(-1).cpu(),
            )
            for index, row in enumerate(rows.tolist()):
                if not finished[row]:
                    own = len(batch[row].ids) if step == 0 else 1
                    collected[row].add(states_BLTD[index, -own:], sums_B[index], best_B[index])
        next_B = _pick(logits_BV, warpers, uniforms_BL[:, step])
        stops_B = torch.isin(next_B, stop_ids)
        alive = []
        for index, (row, token, stops) in enumerate(zip(rows.tolist(), next_B.tolist(), stops_B.tolist(), strict=True)):
            if not finished[row]:
                answers[row].append(token)
                finished[row] = stops
            if not finished[row]:
                alive.append(index)
        if not alive:
            break
        if len(alive) <= 0.9 * len(rows):
            kept = torch.tensor(alive, device=device)
            cache.select_rows(kept)
            rows, next_B, uniforms_BL = rows[kept], next_B[kept], uniforms_BL[kept]
            mask_BL, positions_BL = mask_BL[kept], positions_BL[kept]
        step_ids, step_positions = next_B[:, None], positions_BL[:, seen : seen + 1]
    for question, answer, stopped, states in zip(batch, answers, finished, collected, strict=True):
        yield Answer(question, answer, stopped, None if taps is None else states.features())


class _Collector:
    """Gathers one document's features pass by pass: first the whole prompt's, then one answered token's at a time."""

    def __init__(self) -> None:
        self.states: list[Tensor] = []
        self.logsumexps: list[Tensor] = []
        self.argmaxes: list[Tensor] = []

    def add(self, states_LTD: Tensor, logsumexp: Tensor, argmax: Tensor) -> None:
        """States of the tokens read in a pass, tapped ones and the final one; the two numbers belong to the last."""
        self.states.append(states_LTD.clone())
        for numbers, value in ((self.logsumexps, logsumexp), (self.argmaxes, argmax)):
            numbers.append(torch.cat([value.new_zeros(len(states_LTD) - 1), value[None]]))

    def features(self) -> DocumentFeatures:
        """All of them, and zeros for the last token, which no pass has read."""
        unread = torch.zeros_like(self.states[0][:1])
        states_LTD = torch.cat([*self.states, unread])
        logsumexp_L, argmax_L = (
            torch.cat([*numbers, numbers[0].new_zeros(1)]) for numbers in (self.logsumexps, self.argmaxes)
        )
        return DocumentFeatures(states_LTD[:, :-1], states_LTD[:, -1], logsumexp_L, argmax_L)


def end_token_ids(target: TargetModel) -> set[int]:
    """The ids that end an answer: of the generation config and of the tokenizer."""
    ids = target.model.generation_config.eos_token_id
    ends = set(ids if isinstance(ids, list) else [] if ids is None else [ids])
    if target.tokenizer is not None and target.tokenizer.eos_token_id is not None:
        ends.add(target.tokenizer.eos_token_id)
    return ends


def _warpers(settings: AnswerSettings) -> LogitsProcessorList | None:
    """Transformers' own warpers in transformers' own order; None means greedy."""
    if settings.temperature == 0:
        return None
    warpers = LogitsProcessorList()
    if settings.temperature != 1:
        warpers.append(TemperatureLogitsWarper(settings.temperature))
    if settings.top_k:
        warpers.append(TopKLogitsWarper(settings.top_k))
    if settings.top_p < 1:
        warpers.append(TopPLogitsWarper(settings.top_p))
    return warpers


def _pick(logits_BV: Tensor, warpers: LogitsProcessorList | None, uniform_B: Tensor) -> Tensor:
    """Greedy, or the token at which the running sum of probabilities passes the row's uniform number."""
    if warpers is None:
        return logits_BV.argmax(-1)
    for warper in warpers:
        logits_BV = warper(None, logits_BV)
    sums_BV = logits_BV.softmax(-1).cumsum(-1)
    threshold_B1 = uniform_B[:, None] * sums_BV[:, -1:]
    return torch.searchsorted(sums_BV, threshold_B1, right=True).squeeze(1).clamp(max=logits_BV.shape[1] - 1)


def _uniforms(settings: AnswerSettings, question: Question) -> Tensor:
    key = int.from_bytes(hashlib.sha256(question.prompt.id.encode()).digest()[:8], "big")
    generator = np.random.default_rng([settings.seed, question.sample, key])
    return torch.from_numpy(generator.random(settings.max_new_tokens, np.float32))
