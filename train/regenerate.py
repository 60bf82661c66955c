"""Let the target answer prompts itself: the training data that a draft head learns most from.

Answers are made in batches of left-padded prompts over preallocated key/value storage; rows leave their batch as they
finish. Each answer is appended to the output as one JSON line the moment its batch is done, so a killed run loses at
most one batch, and the same command goes on where it stopped.
"""

import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm
from transformers import LogitsProcessorList, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from specheads.cache import PreallocatedCache
from specheads.errors import UserError
from specheads.prompts import Prompt, read_prompts, render_prompt
from specheads.target import TargetModel


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
        if self.temperature < 0:
            raise UserError(f"temperature is {self.temperature}, expected 0 (greedy) or more")
        if self.max_new_tokens < 1:
            raise UserError(f"max-new-tokens is {self.max_new_tokens}, expected 1 or more")
        if self.top_k < 0:
            raise UserError(f"top-k is {self.top_k}, expected 0 (off) or more")
        if not 0 < self.top_p <= 1:
            raise UserError(f"top-p is {self.top_p}, expected more than 0 and at most 1")


def regenerate(
    target: TargetModel,
    prompts_file: Path,
    output: Path,
    settings: AnswerSettings,
    *,
    batch_size: int = 64,
    limit: int | None = None,
) -> int:
    """Answer every prompt of `prompts_file` that `output` does not hold yet; returns how many were answered now.

    `output` gets one object a line: `id, category, messages, response_ids, finished` (the end token is part of
    `response_ids` when the target gave it). Beside it stands a manifest with the settings and the target's fingerprint.

    Raises:
        UserError: bad prompts, an output that cannot be written, or one made with other settings or another target.
    """
    if batch_size < 1:
        raise UserError(f"batch-size is {batch_size}, expected 1 or more")
    prompts = read_prompts(prompts_file, limit=limit)
    assert target.tokenizer is not None
    encoded = [(prompt, render_prompt(target.tokenizer, prompt, raw=settings.raw)) for prompt in prompts]
    _check_manifest(output, target, settings)
    done = _finished_ids(output)
    waiting = [(p, ids) for p, ids in encoded if p.id not in done and len(ids) <= settings.max_prompt_tokens]
    too_long = sum(len(ids) > settings.max_prompt_tokens for _, ids in encoded)
    if too_long:
        tqdm.write(f"{too_long} prompts longer than {settings.max_prompt_tokens} tokens are left out")
    batches = _batches(waiting, batch_size, settings.seed)
    with output.open("a", encoding="utf-8") as file, tqdm(total=len(waiting), unit="answer") as progress:
        tokens = 0
        for batch in batches:
            for prompt, response_ids, finished in answer_batch(target, batch, settings):
                record: dict[str, Any] = {"id": prompt.id, "category": prompt.category, "messages": prompt.messages}
                if settings.raw:
                    record["prompt"] = prompt.raw
                record |= {"response_ids": response_ids, "finished": finished}
                file.write(json.dumps(record, ensure_ascii=False) + "\n")
                tokens += len(response_ids)
            file.flush()
            os.fsync(file.fileno())
            progress.update(len(batch))
            progress.set_postfix(tokens=tokens)
    return len(waiting)


@torch.no_grad()
def answer_batch(
    target: TargetModel, batch: Sequence[tuple[Prompt, list[int]]], settings: AnswerSettings
) -> Iterator[tuple[Prompt, list[int], bool]]:
    """Yield (prompt, response ids, finished) for a batch of (prompt, token ids).

    Every answer has random numbers of its own, drawn from the seed and the prompt's id, so that an answer does not
    depend on which batch its prompt fell into, up to the rounding of the batched pass.
    """
    device, longest = target.device, max(len(ids) for _, ids in batch)
    ids_BL = torch.zeros(len(batch), longest, dtype=torch.long)
    mask_BL = torch.zeros(len(batch), longest + settings.max_new_tokens, dtype=torch.long)
    for row, (_, ids) in enumerate(batch):
        ids_BL[row, longest - len(ids) :] = torch.tensor(ids)
        mask_BL[row, longest - len(ids) :] = 1
    uniforms_BL = torch.stack([_uniforms(settings, prompt.id) for prompt, _ in batch]).to(device)
    ids_BL, mask_BL = ids_BL.to(device), mask_BL.to(device)
    positions_BL = (mask_BL.cumsum(-1) - 1).clamp(min=0)
    stop_ids = torch.tensor(sorted(end_token_ids(target)), device=device)
    warpers = _warpers(settings)

    answers: list[list[int]] = [[] for _ in batch]
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
            logits_to_keep=1,
        )
        next_B = _pick(output.logits_BLV[:, -1].float(), warpers, uniforms_BL[:, step])
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
    for (prompt, _), answer, stopped in zip(batch, answers, finished, strict=True):
        yield prompt, answer, stopped


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


def _uniforms(settings: AnswerSettings, identity: str) -> Tensor:
    key = int.from_bytes(hashlib.sha256(identity.encode()).digest()[:8], "big")
    return torch.from_numpy(np.random.default_rng([settings.seed, key]).random(settings.max_new_tokens, np.float32))


def _batches(
    waiting: list[tuple[Prompt, list[int]]], batch_size: int, seed: int
) -> list[list[tuple[Prompt, list[int]]]]:
    """Prompts of similar length together, batches in random order, so that an interrupted run is a fair sample."""
    by_length = sorted(waiting, key=lambda item: len(item[1]))
    batches = [by_length[i : i + batch_size] for i in range(0, len(by_length), batch_size)]
    order = np.random.default_rng(seed).permutation(len(batches))
    return [batches[i] for i in order]


def _finished_ids(output: Path) -> set[str]:
    """Ids that `output` holds; a line that a killed run left unfinished is cut off."""
    if not output.exists():
        return set()
    with output.open("r+b") as file:
        content = file.read()
        whole = content.rfind(b"\n") + 1
        if whole < len(content):
            file.truncate(whole)
    return {json.loads(line)["id"] for line in content[:whole].split(b"\n") if line.strip()}


def _check_manifest(output: Path, target: TargetModel, settings: AnswerSettings) -> None:
    path = output.with_name(output.name + ".manifest.json")
    manifest: dict[str, Any] = {"settings": asdict(settings), "target": target.fingerprint}
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            before = json.loads(path.read_text(encoding="utf-8"))
            if before != manifest:
                raise UserError(
                    f"{output} was made with other settings or another target (see {path.name}); use the same "
                    "settings to go on, or another --output"
                )
        elif output.exists() and output.stat().st_size:
            raise UserError(f"{output} exists and has no manifest {path.name}; use another --output")
        else:
            path.write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise UserError(f"output {str(output)!r} cannot be written ({error.strerror}); choose another place") from error
