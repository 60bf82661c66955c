"""Let the target answer prompts itself: the training data that a draft head learns most from.

Each answer is appended to the output as one JSON line the moment its batch is done, so a killed run loses at most one
batch, and the same command goes on where it stopped. Given a feature store, the hidden states that the target computed
while it answered are kept, and training needs no pass of its own over these documents.
"""

import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from specheads.errors import UserError
from specheads.files import write_json
from specheads.prompts import Prompt, read_json_lines, read_prompts, render_prompt
from specheads.target import TargetModel
from specheads.train.answer import Answer, AnswerSettings, Question, answer_batch
from specheads.train.store import FeatureStore


def regenerate(
    target: TargetModel,
    prompts_file: Path,
    output: Path,
    settings: AnswerSettings,
    *,
    batch_size: int = 64,
    samples: int = 1,
    limit: int | None = None,
    store: FeatureStore | None = None,
) -> int:
    """Answer every prompt of `prompts_file`, `samples` times each, as far as `output` does not hold the answers yet.

    `output` gets one object a line: `id, sample, category, messages, raw, response_ids, finished` (the end token is
    part of `response_ids` when the target gave it). Beside it stands a manifest with settings and target.
    With a `store` the hidden states of the answers go there.

    Returns:
        how many answers were made now.

    Raises:
        UserError: bad prompts, more tokens than the target has positions for, an output that cannot be written, or one
            made with other settings, another target or other prompts.
    """
    if batch_size < 1:
        raise UserError(f"batch-size is {batch_size}, expected 1 or more")
    if samples < 1 or (samples > 1 and settings.temperature == 0):
        raise UserError(f"samples is {samples}, expected 1 or more, and 1 where temperature 0 makes all answers equal")
    prompts = read_prompts(prompts_file, limit=limit)
    assert target.tokenizer is not None
    encoded = [(prompt, render_prompt(target.tokenizer, prompt, raw=settings.raw)) for prompt in prompts]
    _check_positions(target, settings, [len(ids) for _, ids in encoded])
    _check_manifest(output, target, settings)
    done = _finished(output, {prompt.id: prompt for prompt in prompts})
    waiting = [
        Question(prompt, ids, sample)
        for sample in range(samples)
        for prompt, ids in encoded
        if (prompt.id, sample) not in done and len(ids) <= settings.max_prompt_tokens
    ]
    too_long = sum(len(ids) > settings.max_prompt_tokens for _, ids in encoded)
    if too_long:
        tqdm.write(f"{too_long} prompts longer than {settings.max_prompt_tokens} tokens are left out")
    batches = _batches(waiting, batch_size, settings.seed)
    with output.open("a", encoding="utf-8") as file, tqdm(total=len(waiting), unit="answer") as progress:
        tokens = 0
        for batch in batches:
            answers = list(answer_batch(target, batch, settings, None if store is None else store.taps))
            if store is not None:
                store.add({answer.key: answer.features for answer in answers if answer.features is not None})
            for answer in answers:
                file.write(json.dumps(_record(answer, settings.raw), ensure_ascii=False) + "\n")
                tokens += len(answer.response_ids)
            file.flush()
            os.fsync(file.fileno())
            progress.update(len(batch))
            progress.set_postfix(tokens=tokens)
    return len(waiting)


def _check_positions(target: TargetModel, settings: AnswerSettings, lengths: list[int]) -> None:
    read = [length for length in lengths if length <= settings.max_prompt_tokens]
    longest = max(read, default=0) + settings.max_new_tokens
    if target.max_positions is not None and longest > target.max_positions:
        raise UserError(
            f"the longest prompt and {settings.max_new_tokens} new tokens take {longest} positions, the target has "
            f"{target.max_positions}; lower --max-prompt-tokens or --max-new-tokens"
        )


def _record(answer: Answer, raw: bool) -> dict[str, Any]:
    prompt, sample = answer.question.prompt, answer.question.sample
    record: dict[str, Any] = {"id": prompt.id, "sample": sample, "category": prompt.category}
    record["messages"] = prompt.messages
    if raw:
        record["prompt"] = prompt.raw
    return record | {"raw": raw, "response_ids": answer.response_ids, "finished": answer.finished}


def _batches(waiting: list[Question], batch_size: int, seed: int) -> list[list[Question]]:
    """Prompts of similar length together, batches in random order, so that an interrupted run is a fair sample."""
    by_length = sorted(waiting, key=lambda question: len(question.ids))
    batches = [by_length[i : i + batch_size] for i in range(0, len(by_length), batch_size)]
    order = np.random.default_rng(seed).permutation(len(batches))
    return [batches[i] for i in order]


def _finished(output: Path, prompts: dict[str, Prompt]) -> set[tuple[str, int]]:
    """(id, sample) of the answers that `output` holds; a line that a killed run left unfinished is cut off.

    Raises:
        UserError: an answer there belongs to another prompt than the one that has its id now.
    """
    if not output.exists():
        return set()
    with output.open("r+b") as file:
        content = file.read()
        whole = content.rfind(b"\n") + 1
        if whole < len(content):
            file.truncate(whole)
    done = set()
    for number, record in read_json_lines(output):
        prompt = prompts.get(record["id"])
        if prompt is not None and record["messages"] != prompt.messages:
            raise UserError(
                f"{output}, line {number} answers another prompt with id {prompt.id!r} than the prompts file has; give "
                "prompts ids of their own, or use another --output"
            )
        done.add((record["id"], record["sample"]))
    return done


def _check_manifest(output: Path, target: TargetModel, settings: AnswerSettings) -> None:
    path = output.with_name(output.name + ".manifest.json")
    manifest: dict[str, Any] = {
        "settings": asdict(settings),
        "target": target.fingerprint,
        "target_name": target.model.name_or_path,
        "dtype": str(target.dtype),
    }
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
            write_json(path, manifest)
    except ValueError as error:
        raise UserError(f"{path} is not JSON ({error}); mend it, or use another --output") from error
    except OSError as error:
        raise UserError(f"output {str(output)!r} cannot be written ({error.strerror}); choose another place") from error
