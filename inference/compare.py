"""Plain decoding against every drafter, on the same prompts in one process: records, figures, table, report.

Every prompt is decoded by plain decoding and by each drafter in turn before the next prompt, in an order that rotates,
so that a machine whose speed drifts is fair to all. Each generation is a line of `records.jsonl` the moment it is done:
the same command goes on where it was stopped.
"""

import hashlib
import json
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from specheads.errors import UserError
from specheads.files import write_json
from specheads.inference.draft import Drafter
from specheads.inference.drafters.none import NoDrafter
from specheads.inference.report import write_report
from specheads.inference.settings import DecodeSettings
from specheads.inference.stats import Stats
from specheads.inference.theory import speedup
from specheads.prompts import Prompt, render_prompt
from specheads.target import TargetModel

PLAIN = "plain"


@dataclass(frozen=True)
class Record:
    """One generation: whose, of which prompt, its tokens and what happened."""

    run: str
    prompt: str
    category: str | None
    token_ids: list[int]
    finish_reason: str
    stats: Stats
    extra_memory_bytes: int


def compare(
    target: TargetModel,
    drafters: Sequence[Drafter],
    prompts: Sequence[Prompt],
    settings: DecodeSettings,
    output: Path,
) -> dict[str, Any]:
    """Decode `prompts` with plain decoding and each drafter; write and return what `results.json` holds.

    Raises:
        UserError: a prompt that cannot be rendered, a drafter that does not fit, an output made with other settings, or
            a folder that cannot be written.
    """
    by_name = _named([NoDrafter(), *drafters])
    decoders = {name: settings.decoder(target, drafter) for name, drafter in by_name.items()}
    encoded = [torch.tensor([render_prompt(target.tokenizer, prompt, raw=settings.raw)]) for prompt in prompts]
    header = {
        "environment": describe_environment(target),
        "target": target.model.name_or_path,
        "settings": asdict(settings)
        | {"prompts": len(prompts), "prompts_digest": _digest(encoded), "runs": list(by_name)},
        "drafters": {name: drafter.digest for name, drafter in by_name.items()},
    }
    records = _Records(output, header)
    missing = [p for p in prompts if any((name, p.id) not in records.done for name in by_name)]
    if missing:
        for decoder in decoders.values():  # first passes pay for allocation; they are not counted
            settings.generate(decoder, encoded[0].to(target.device), "first passes", max_new_tokens=16)
    with tqdm(total=len(prompts) * len(decoders), initial=len(records.done), unit="generation") as progress:
        for turn, (prompt, ids_1P) in enumerate(zip(prompts, encoded, strict=True)):
            names = list(decoders)
            for name in names[turn % len(names) :] + names[: turn % len(names)]:
                if (name, prompt.id) in records.done:
                    continue
                result = settings.generate(decoders[name], ids_1P.to(target.device), prompt.id)
                new_ids = result.sequences[0, ids_1P.shape[1] :].tolist()
                memory = by_name[name].memory_bytes
                records.add(
                    Record(name, prompt.id, prompt.category, new_ids, result.finish_reason, result.stats, memory)
                )
                progress.update()
    results = header | {"runs": summarise(records.all, by_name, settings)}
    write_json(output / "results.json", results)
    write_report(results, output / "report.html")
    return results


def summarise(
    records: Sequence[Record], drafters: dict[str, Drafter], settings: DecodeSettings
) -> list[dict[str, Any]]:
    """The figures of each run, over all prompts and by category."""
    plain = {record.prompt: record for record in records if record.run == PLAIN}
    runs = []
    for name, drafter in drafters.items():
        own = [record for record in records if record.run == name]
        categories = sorted({record.category for record in own if record.category is not None})
        figures = _figures(own, plain, settings)
        figures["categories"] = {
            category: _figures([record for record in own if record.category == category], plain, settings)
            for category in categories
        }
        memory = max(record.extra_memory_bytes for record in own)
        runs.append({"name": name, "drafter": drafter.kind, "extra_memory_bytes": memory} | figures)
    return runs


def table(results: dict[str, Any]) -> str:
    """The runs as text, one a line. tau counts the bonus token."""
    columns = ["run", "tok/s", "decode tok/s", "speedup", "tau", "alpha", "c", "predicted", "extra MB", "identical"]
    rows = [
        [
            run["name"],
            f"{run['tokens_per_second']:.1f}",
            f"{run['decode_tokens_per_second']:.1f}",
            f"{run['speedup']:.2f}x",
            _text(run["tau"], ".2f"),
            _text(run["alpha"], ".3f"),
            _text(run["draft_cost"], ".3f"),
            _text(run["predicted_speedup"], ".2f", "x"),
            f"{run['extra_memory_bytes'] / 1e6:.1f}",
            _text(run["identical_to_plain"], ".0%"),
        ]
        for run in results["runs"]
    ]
    widths = [max(len(row[i]) for row in [columns, *rows]) for i in range(len(columns))]
    lines = [
        "  ".join(
            text.ljust(w) if i == 0 else text.rjust(w) for i, (text, w) in enumerate(zip(row, widths, strict=True))
        )
        for row in [columns, *rows]
    ]
    return "\n".join(lines)


def describe_environment(target: TargetModel) -> dict[str, Any]:
    """Versions, device, dtype and threads: what a measured speed depends on."""
    on_gpu = target.device.type == "cuda"
    return {
        "specheads": version("specheads"),
        "torch": torch.__version__,
        "transformers": version("transformers"),
        "python": platform.python_version(),
        "device": torch.cuda.get_device_name(target.device) if on_gpu else platform.processor() or platform.machine(),
        "dtype": str(target.dtype).removeprefix("torch."),
        "threads": torch.get_num_threads(),
        "target_bytes": target.weight_bytes,
    }


def _figures(own: list[Record], plain: dict[str, Record], settings: DecodeSettings) -> dict[str, Any]:
    stats = sum((record.stats for record in own), Stats())
    same = sum((plain[record.prompt].stats for record in own), Stats())
    speed, plain_speed = stats.new_tokens / stats.seconds, same.new_tokens / same.seconds
    # One target pass over one token, from plain decoding of the same prompts: the unit of c and of the formula.
    unit = same.target_seconds / same.rounds if same.rounds else None
    draft_cost = predicted = None
    if stats.drafted and unit and stats.alpha is not None:
        draft_cost = stats.draft_seconds / stats.drafted / unit
        predicted = _predict(stats, draft_cost)
    identical = None
    if settings.repeats_plain:
        identical = sum(record.token_ids == plain[record.prompt].token_ids for record in own) / len(own)
    return {
        "prompts": len(own),
        "tokens": stats.new_tokens,
        "seconds": stats.seconds,
        "tokens_per_second": speed,
        "decode_tokens_per_second": _decode_speed(stats),
        "speedup": speed / plain_speed,
        "decode_speedup": _decode_speed(stats) / _decode_speed(same) if _decode_speed(same) else None,
        "tau": stats.tau,
        "alpha": stats.alpha,
        "acceptance_by_position": stats.acceptance_by_position,
        "draft_cost": draft_cost,
        "verify_cost": stats.target_seconds / stats.rounds / unit if unit and stats.rounds else None,
        "mean_draft_length": stats.drafted / stats.rounds if stats.rounds else None,
        "predicted_speedup": predicted,
        "identical_to_plain": identical,
    }


def _predict(stats: Stats, draft_cost: float) -> float:
    """Theorem 3.8 of 2211.17192 at the mean draft length, between the two whole lengths around it."""
    mean = stats.drafted / stats.rounds
    low, alpha = int(mean), min(stats.alpha or 0.0, 1.0)
    at_low, at_high = (speedup(alpha, gamma, draft_cost) for gamma in (low, low + 1))
    return at_low + (mean - low) * (at_high - at_low)


def _decode_speed(stats: Stats) -> float:
    """Tokens a second without the prefill and the token that it gives."""
    seconds = stats.seconds - stats.prefill_seconds
    return (stats.new_tokens - stats.generations) / seconds if seconds > 0 else 0.0


def _digest(encoded: Sequence[torch.Tensor]) -> str:
    """Sixteen hex digits of the prompts as token ids: other prompts under the same ids are another comparison."""
    return hashlib.sha256(json.dumps([ids_1P.tolist() for ids_1P in encoded]).encode()).hexdigest()[:16]


def _named(drafters: Sequence[Drafter]) -> dict[str, Drafter]:
    named: dict[str, Drafter] = {}
    for drafter in drafters:
        name = PLAIN if drafter.kind == "none" else drafter.name
        number = 2
        while name in named:
            name, number = f"{drafter.name} ({number})", number + 1
        named[name] = drafter
    return named


class _Records:
    """`records.jsonl`: a header line with the settings, then one line a generation."""

    def __init__(self, folder: Path, header: dict[str, Any]) -> None:
        self.path = folder / "records.jsonl"
        self.all: list[Record] = []
        try:
            folder.mkdir(parents=True, exist_ok=True)
            lines = self._read_whole_lines()
            if not lines:
                self.path.write_text(json.dumps(header) + "\n", encoding="utf-8")
        except OSError as error:
            raise UserError(f"output {str(folder)!r} cannot be written ({error.strerror}); choose another") from error
        if lines and json.loads(lines[0]) != json.loads(json.dumps(header)):
            raise UserError(
                f"{folder} holds a comparison with other settings, drafters or prompts, or on another machine; use the "
                "same ones to go on, or another --output"
            )
        for line in lines[1:]:
            values = json.loads(line)
            self.all.append(Record(**values | {"stats": Stats(**values["stats"])}))
        self.done = {(record.run, record.prompt) for record in self.all}

    def add(self, record: Record) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(record)) + "\n")
        self.all.append(record)
        self.done.add((record.run, record.prompt))

    def _read_whole_lines(self) -> list[str]:
        if not self.path.exists():
            return []
        with self.path.open("r+b") as file:
            content = file.read()
            whole = content[: content.rfind(b"\n") + 1]
            file.truncate(len(whole))  # drops a killed run's unfinished line
        return [line for line in whole.decode("utf-8").split("\n") if line]


def _text(value: float | None, form: str, unit: str = "") -> str:
    return "-" if value is None else f"{value:{form}}{unit}"
