"""Conversations to token rows with a loss mask: what the target answered is counted, what it was asked is not.

A record (a line of a JSON Lines file, or a row of a `datasets` source with the same columns) is one of

    a prompt and response_ids   token ids that the target itself gave, used as they are; where `finished` is true the
                                end-of-turn token is put behind them, unless it stands there
    a prompt and response       the answer as text
    messages                    a conversation; every assistant message is an answer

where a prompt is `turns`, `prompt` or `messages` as in specheads.prompts. With `raw`, prompt and response are plain
text, and the end token is put behind them where `finished` is true.

The tokens of an answer and the token that ends its turn are counted: what the target generates when it serves. Where
the chat template has generation markers, they decide; otherwise an answer is what rendering the conversation with it
adds to rendering it without. Nothing after the last counted token is kept. `packing` makes rows for training of it.
"""

import hashlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from specheads.errors import UserError
from specheads.prompts import read_json_lines
from specheads.train.conversations import Renderer

NOT_A_BOUNDARY = "answer does not begin at a token boundary"
NOTHING_COUNTED = "no counted token within max_length"


@dataclass(frozen=True, eq=False)
class Example:
    """One document: ids, which of them count, and how long it was before it was cut to max_length."""

    ids: npt.NDArray[np.int32]
    loss_mask: npt.NDArray[np.bool_]
    id: str
    full_length: int


@dataclass(frozen=True)
class Corpus:
    """What was read: the examples, and how many documents were left out for which reason."""

    examples: list[Example]
    dropped: dict[str, int]


def load_examples(
    source: str | Path,
    tokenizer: Any,
    *,
    max_length: int,
    raw: bool = False,
    dataset_split: str = "train",
    dataset_config: str | None = None,
    limit: int | None = None,
) -> Corpus:
    """Read a source and render its records to Examples of at most `max_length` tokens.

    Args:
        source: a JSON Lines, .json or .parquet file, a folder (of such, or saved by `datasets`), or a hub name.
        raw: prompts are plain text, not wrapped in the chat template.
        limit: read only so many records.

    Raises:
        UserError: unreadable source or record, an ambiguous chat template, no counted token at all, or a document in
            which every token is counted although it has a prompt.
    """
    if max_length < 2:
        raise UserError(f"max_length is {max_length}, expected at least 2 tokens")
    renderer = Renderer(tokenizer, raw=raw)
    examples: list[Example] = []
    dropped: Counter[str] = Counter()
    for number, where, record in islice(read_records(source, dataset_split, dataset_config), limit):
        rendered = renderer.render(record, number, where)
        if rendered is None:
            dropped[NOT_A_BOUNDARY] += 1
            continue
        ids, mask = rendered
        length = int(mask.nonzero()[0].max(initial=-1)) + 1
        kept = min(length, max_length)
        if not mask[:kept].any():
            dropped[NOTHING_COUNTED] += 1
            continue
        identifier = str(number if record.get("id") is None else record["id"])
        examples.append(Example(ids[:kept], mask[:kept], identifier, length))
    if not examples:
        reasons = "; ".join(f"{count} documents: {reason}" for reason, count in dropped.items()) or "it has no record"
        raise UserError(f"no token counts in {source} ({reasons}); check the chat template, the answers and max_length")
    return Corpus(examples, dict(dropped))


def read_records(
    source: str | Path, dataset_split: str = "train", dataset_config: str | None = None
) -> Iterator[tuple[int, str, dict[str, Any]]]:
    """Yield (number from 1, name of the place for messages, record) from a file, a folder or a hub data set.

    Raises:
        UserError: no such file, folder or data set, or no such split in it.
    """
    path, builder = Path(source), {".parquet": "parquet", ".json": "json"}.get(Path(source).suffix)
    if (path.is_file() and builder is None) or path.suffix == ".jsonl":
        for number, record in read_json_lines(path):
            yield number, f"{source}, line {number}", record
        return

    import datasets

    try:
        if path.is_file():
            rows = datasets.load_dataset(builder, data_files=str(path), split=dataset_split)
        elif (path / "dataset_dict.json").is_file():
            rows = datasets.load_from_disk(str(path))[dataset_split]
        elif (path / "state.json").is_file():
            rows = datasets.load_from_disk(str(path))
        else:
            rows = datasets.load_dataset(str(source), dataset_config, split=dataset_split)
    except (datasets.exceptions.DatasetsError, ValueError, KeyError, OSError) as error:
        reason = " ".join(str(error).split())
        raise UserError(f"cannot read data from {str(source)!r}, split {dataset_split!r}: {reason}") from error
    for number, record in enumerate(rows, start=1):
        yield number, f"{source}, row {number}", record


def describe(examples: Sequence[Example], tokenizer: Any, *, dropped: dict[str, int] | None = None) -> str:
    """A report to read before training: amounts, lengths, what was cut or left out, one example as it counts."""
    lengths = np.array([len(example.ids) for example in examples])
    tokens, counted = int(lengths.sum()), sum(int(example.loss_mask.sum()) for example in examples)
    truncated = sum(example.full_length > len(example.ids) for example in examples)
    low, median, high = (int(value) for value in np.quantile(lengths, [0, 0.5, 0.95]))
    lines = [
        f"documents  {len(examples):,}, {truncated:,} of them cut to max_length",
        f"tokens     {tokens:,}, counted {counted:,} ({counted / tokens:.1%})",
        f"lengths    shortest {low:,}, median {median:,}, 95 % within {high:,}, longest {int(lengths.max()):,}",
        *(f"left out   {count:,} documents: {reason}" for reason, count in (dropped or {}).items()),
        f"example    {examples[0].id}, the counted part between >>> and <<<",
        _mark_counted(examples[0], tokenizer),
    ]
    return "\n".join(lines)


def _mark_counted(example: Example, tokenizer: Any, shown: int = 400) -> str:
    edges = np.flatnonzero(np.diff(example.loss_mask)) + 1
    parts = []
    for ids, mask in zip(np.split(example.ids, edges), np.split(example.loss_mask, edges), strict=True):
        text = tokenizer.decode(ids.tolist(), skip_special_tokens=False)
        if len(text) > shown:
            text = f"{text[: shown // 2]} [...] {text[-shown // 2 :]}"
        parts.append(f">>>{text}<<<" if mask[0] else text)
    return "".join(parts)


def split(examples: Sequence[Example], fraction: float, seed: int) -> tuple[list[Example], list[Example]]:
    """Split into (training, validation) by document; about `fraction` of the documents go to validation.

    A document's side depends on its id and the seed alone: more data moves no document across, and documents with the
    same id stay together.

    Raises:
        UserError: `fraction` outside [0, 1), or a side that would be empty.
    """
    if not 0 <= fraction < 1:
        raise UserError(f"the validation share is {fraction}, expected a number from 0 to below 1")
    sides: tuple[list[Example], list[Example]] = ([], [])
    for example in examples:
        hashed = hashlib.blake2b(f"{seed}:{example.id}".encode(), digest_size=8).digest()
        sides[int.from_bytes(hashed, "big") < fraction * 2**64].append(example)
    if fraction > 0 and not (sides[0] and sides[1]):
        raise UserError(
            f"a validation share of {fraction} leaves one side of {len(examples)} documents empty; "
            "give more documents, another share, or 0 for no validation"
        )
    return sides


def digest(examples: Sequence[Example]) -> str:
    """SHA-256 (hexadecimal) over ids, token ids and loss masks in order: the same for the same data, for provenance."""
    hasher = hashlib.sha256()
    for example in examples:
        hasher.update(f"{example.id}\0{len(example.ids)}\0".encode())
        hasher.update(example.ids.astype("<i4").tobytes())
        hasher.update(np.packbits(example.loss_mask).tobytes())
    return hasher.hexdigest()


def token_counts(examples: Sequence[Example], vocab_size: int, *, counted: bool = True) -> npt.NDArray[np.int64]:
    """How often each token id is counted (or, with `counted` False, stands where nothing is), shape (vocab_size,).

    Raises:
        UserError: an id that does not fit the vocabulary.
    """
    ids = np.concatenate([example.ids[example.loss_mask == counted] for example in examples])
    highest = int(ids.max(initial=0))
    if highest >= vocab_size:
        raise UserError(
            f"the data has token id {highest}, the target's vocabulary has {vocab_size} tokens; "
            "use the target's own tokenizer and answers"
        )
    return np.bincount(ids, minlength=vocab_size)
