"""The command line. What it imports at the top loads in a blink; torch comes with the command that needs it."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from specheads.errors import UserError

if TYPE_CHECKING:
    from specheads.inference.draft import Drafter
    from specheads.inference.settings import DecodeSettings
    from specheads.target import TargetModel


class _Commands(click.Group):
    """Commands whose mistakes of the user become one line and exit code 2."""

    def make_context(self, *args: Any, **kwargs: Any) -> click.Context:
        try:
            return super().make_context(*args, **kwargs)
        except click.exceptions.NoArgsIsHelpError:
            raise
        except click.UsageError as error:
            raise _Refusal.of_usage(error) from error

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except UserError as error:
            raise _Refusal(" ".join(str(error).split())) from error
        except click.UsageError as error:
            raise _Refusal.of_usage(error) from error


class _Refusal(click.ClickException):
    exit_code = 2

    @classmethod
    def of_usage(cls, error: click.UsageError) -> "_Refusal":
        hint = f" (try: {error.ctx.command_path} --help)" if error.ctx is not None else ""
        return cls(" ".join(error.format_message().split()) + hint)

    def show(self, file: Any = None) -> None:
        click.echo(f"specheads: error: {self.message}", err=True, file=file)


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120})
@click.version_option(package_name="specheads")
def main() -> None:
    """Train a small draft head on a frozen language model, and generate with it faster, losslessly.

    First: specheads regenerate (the target answers prompts), specheads train (a head learns from the answers),
    specheads compare (plain decoding against the head).
    """


def _together(*options: Callable[..., Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def add(command: Callable[..., Any]) -> Callable[..., Any]:
        for option in reversed(options):
            command = option(command)
        return command

    return add


_target_options = _together(
    click.option("--target", required=True, metavar="T", help="The target: a local folder or a hub name."),
    click.option("--dtype", default="auto", show_default=True, help="auto, float32, bfloat16 or float16."),
    click.option("--device", default=None, help="cpu, cuda, cuda:1, ...; default: a GPU when there is one."),
    click.option("--trust-remote-code", is_flag=True, help="Run code that comes with the model."),
)
_decoding_options = _together(
    click.option("--max-new-tokens", default=128, show_default=True, type=int),
    click.option("--temperature", default=0.0, show_default=True, type=float, help="0 is greedy."),
    click.option("--top-k", default=0, show_default=True, type=int, help="0 is off."),
    click.option("--top-p", default=1.0, show_default=True, type=float, help="1 is off."),
    click.option("--min-p", default=0.0, show_default=True, type=float, help="0 is off."),
    click.option("--repetition-penalty", default=1.0, show_default=True, type=float, help="1 is off."),
    click.option("--seed", default=0, show_default=True, type=int),
    click.option("--verification", default="rejection", show_default=True, help="How drafts are verified."),
    click.option("--draft-length", default="auto", show_default=True, help="Tokens drafted a round: auto or a number."),
    click.option("--limit", default=None, type=int, help="Use only the first N prompts."),
    click.option("--raw", is_flag=True, help="Prompts are plain text: no chat template."),
)


@main.command()
@_target_options
@click.option("--prompts", required=True, metavar="FILE", help="JSON Lines with turns, prompt or messages.")
@click.option(
    "--output", required=True, metavar="FILE", help="Where the answers go; an unfinished file is gone on with."
)
@click.option("--max-new-tokens", default=256, show_default=True, type=int)
@click.option("--temperature", default=0.7, show_default=True, type=float, help="0 is greedy.")
@click.option("--top-k", default=0, show_default=True, type=int, help="0 is off.")
@click.option("--top-p", default=1.0, show_default=True, type=float, help="1 is off.")
@click.option("--seed", default=0, show_default=True, type=int)
@click.option("--batch-size", default=64, show_default=True, type=int, help="Prompts answered at once.")
@click.option("--samples", default=1, show_default=True, type=int, help="Answers to each prompt.")
@click.option("--max-prompt-tokens", default=1024, show_default=True, type=int, help="Longer prompts are left out.")
@click.option("--limit", default=None, type=int, help="Use only the first N prompts.")
@click.option("--raw", is_flag=True, help="Prompts are plain text: no chat template.")
@click.option(
    "--features", default=None, metavar="DIR", help="Also keep the answers' hidden states, for features.cache."
)
@click.option("--tap-layers", default=None, metavar="I,J,...", help="Layers to keep; default: those of head eagle3.")
def regenerate(
    target: str,
    dtype: str,
    device: str | None,
    trust_remote_code: bool,
    prompts: str,
    output: str,
    batch_size: int,
    samples: int,
    limit: int | None,
    features: str | None,
    tap_layers: str | None,
    **options: Any,
) -> None:
    """Let the target answer prompts: what a head learns from."""
    from specheads.train.answer import AnswerSettings
    from specheads.train.precision import widen
    from specheads.train.regenerate import regenerate as answer
    from specheads.train.store import FeatureStore

    settings = AnswerSettings(**options)
    if tap_layers is not None and features is None:
        raise UserError(f"tap-layers {tap_layers} is of no use without --features DIR")
    model = _load_target(target, dtype, device, trust_remote_code, pack=dtype != "auto")
    if dtype == "auto":
        widen(model)
    store = None if features is None else FeatureStore(Path(features), model, _taps(model, tap_layers))
    try:
        count = answer(
            model,
            Path(prompts),
            Path(output),
            settings,
            batch_size=batch_size,
            samples=samples,
            limit=limit,
            store=store,
        )
    except KeyboardInterrupt:
        _stop(f"stopped; whole answers are in {output}, the same command goes on from there")
    click.echo(f"{count} answers made now; all are in {output}")


@main.command(context_settings={"ignore_unknown_options": True, "allow_extra_args": True})
@click.option("--config", required=True, metavar="FILE", help="A training configuration in YAML; see configs/.")
@click.pass_context
def train(ctx: click.Context, config: str) -> None:
    """Train a head. Any setting can be given as an option: --loss.kind lk --steps 500.

    A run that was stopped goes on from its last checkpoint when the same command is given again.
    """
    from specheads.train.config import load_train_config
    from specheads.train.loop import train as fit

    result = fit(load_train_config(config, ctx.args))
    if result is None:
        sys.exit(1)
    if result.evaluation is not None:
        click.echo(f"expected tokens a round, bonus included: {result.evaluation.expected_tokens:.3f}")
    click.echo(f"head written to {result.head_folder}")


@main.command()
@_target_options
@click.option("--head", "heads", multiple=True, metavar="H", help="Draft with this head.")
@click.option("--draft-model", "draft_models", multiple=True, metavar="D", help="Draft with this separate model.")
@click.option("--lookup", is_flag=True, help="Draft by looking up n-grams in the text so far.")
@click.option("--cascade", is_flag=True, help="Lookup first; where it finds nothing, the head or model drafts.")
@click.option("--prompt", default=None, help="One prompt.")
@click.option("--prompts", default=None, metavar="FILE", help="JSON Lines with turns, prompt or messages.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object a prompt.")
@_decoding_options
def generate(
    target: str,
    dtype: str,
    device: str | None,
    trust_remote_code: bool,
    heads: tuple[str, ...],
    draft_models: tuple[str, ...],
    lookup: bool,
    cascade: bool,
    prompt: str | None,
    prompts: str | None,
    as_json: bool,
    limit: int | None,
    **decoding: Any,
) -> None:
    """Generate text, drafted by a head, a separate model or lookup; by plain decoding when none is named."""
    if (prompt is None) == (prompts is None):
        raise UserError("give either --prompt TEXT or --prompts FILE")
    if prompt is not None and limit is not None:
        raise UserError("--limit is for a file of prompts; leave it out beside --prompt")
    if len(heads) + len(draft_models) + lookup > 1:
        raise UserError("more than one drafter given; generate takes one of --head, --draft-model, --lookup")
    settings = _settings(**decoding)

    from specheads.inference.drafters.none import NoDrafter
    from specheads.inference.generate import generate_texts
    from specheads.prompts import parse_prompt, read_prompts

    chosen = read_prompts(prompts, limit) if prompts else [parse_prompt({"prompt": prompt}, number=1, where="--prompt")]
    model = _load_target(target, dtype, device, trust_remote_code)
    drafters = _drafters(model, heads, draft_models, lookup, cascade, trust_remote_code) or [NoDrafter()]
    for line in generate_texts(model, drafters[-1], chosen, settings):
        click.echo(json.dumps(line, ensure_ascii=False) if as_json else line["text"])


@main.command()
@_target_options
@click.option("--head", "heads", multiple=True, metavar="H", help="A head; may be given several times.")
@click.option("--draft-model", "draft_models", multiple=True, metavar="D", help="A separate model; several times.")
@click.option("--lookup", is_flag=True, help="Also lookup of n-grams in the text so far.")
@click.option("--cascade", is_flag=True, help="Also lookup with each head or model where it finds nothing.")
@click.option("--prompts", required=True, metavar="FILE", help="JSON Lines with turns, prompt or messages.")
@click.option("--output", required=True, metavar="DIR", help="Gets results.json, report.html and records.jsonl.")
@_decoding_options
def compare(
    target: str,
    dtype: str,
    device: str | None,
    trust_remote_code: bool,
    heads: tuple[str, ...],
    draft_models: tuple[str, ...],
    lookup: bool,
    cascade: bool,
    prompts: str,
    output: str,
    limit: int | None,
    **decoding: Any,
) -> None:
    """Measure plain decoding against every drafter named, side by side. Nothing else should run meanwhile."""
    settings = _settings(**decoding)

    from specheads.inference.compare import compare as measure
    from specheads.inference.compare import table
    from specheads.prompts import read_prompts

    chosen = read_prompts(prompts, limit)
    model = _load_target(target, dtype, device, trust_remote_code)
    drafters = _drafters(model, heads, draft_models, lookup, cascade, trust_remote_code)
    if not drafters:
        raise UserError("no drafter to compare with; give --head, --draft-model or --lookup")
    try:
        results = measure(model, drafters, chosen, settings, Path(output))
    except KeyboardInterrupt:
        _stop(f"stopped; finished generations are in {output}, the same command goes on from there")
    click.echo(table(results))
    click.echo(f"tau and speedup count the bonus token; report: {Path(output) / 'report.html'}")


@main.command()
@click.argument("head")
def inspect(head: str) -> None:
    """Say what a head's checkpoint is: type, target, sizes, where it came from."""
    from specheads.checkpoint import find_checkpoint, load_head, read_provenance

    folder = find_checkpoint(head)
    loaded = load_head(folder)
    config, provenance = loaded.config, read_provenance(folder)
    facts = {
        "type": loaded.type_name,
        "target": f"{config.target_name or 'unnamed'} ({config.target.architecture}, {config.target.num_layers} "
        f"layers, width {config.target.hidden_size}, vocabulary {config.target.vocab_size})",
        "parameters": f"{sum(p.numel() for p in loaded.parameters()):,}",
        "bytes": f"{loaded.nbytes:,} ({str(loaded.dtype).removeprefix('torch.')})",
        "tap layers": ", ".join(map(str, loaded.tap_layers)) or "none",
        "draft vocabulary": f"{config.num_draft_tokens:,} of {config.target.vocab_size:,} tokens",
        "drafts at most": f"{loaded.max_draft_length or 'any number of'} tokens a round",
        "expected tokens": provenance.get("expected_tokens", "unknown"),
        "trained with": provenance.get("versions", "unknown"),
        "data": provenance.get("data", "unknown"),
    }
    width = max(map(len, facts))
    for name, value in facts.items():
        click.echo(f"{name.ljust(width)}  {value}")


@main.command()
def heads() -> None:
    """List the head types that this install knows."""
    from specheads.registry import head_types

    for name, head_type in head_types().items():
        summary = (sys.modules[head_type.__module__].__doc__ or "").strip().split("\n")[0]
        click.echo(f"{name:<12} {summary}")


def _load_target(
    name: str, dtype: str, device: str | None, trust_remote_code: bool, *, pack: bool = True
) -> "TargetModel":
    import torch
    from transformers.utils import logging

    from specheads.target import TargetModel

    logging.disable_progress_bar()  # loading takes seconds, and what stderr holds should be ours
    if dtype not in ("auto", "float32", "bfloat16", "float16", "float64"):
        raise UserError(f"dtype is {dtype!r}, expected auto, float32, bfloat16, float16 or float64")
    place = device or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        torch.empty(0, device=place)
    except (RuntimeError, AssertionError) as error:
        raise UserError(f"device is {place!r}, which this machine does not have; use cpu, or leave it out") from error
    return TargetModel.load(name, dtype=dtype, device=place, trust_remote_code=trust_remote_code, pack=pack)


def _taps(target: "TargetModel", text: str | None) -> list[int]:
    from specheads.registry import get_head_type

    if text is None:
        return list(get_head_type("eagle3").default_options(target)["tap_layers"])
    try:
        taps = [int(part) for part in text.split(",")]
    except ValueError as error:
        raise UserError(f"tap-layers is {text!r}, expected numbers with commas, such as 2,15,27") from error
    if not all(0 <= tap <= target.num_layers for tap in taps):
        raise UserError(f"tap-layers is {text!r}, expected layers from 0 to {target.num_layers} for this target")
    return taps


def _settings(draft_length: str, **decoding: Any) -> "DecodeSettings":
    from specheads.inference.settings import DecodeSettings

    if draft_length != "auto" and not draft_length.isdecimal():
        raise UserError(f"draft-length is {draft_length!r}, expected auto or a number of tokens from 0 up")
    length = draft_length if draft_length == "auto" else int(draft_length)
    return DecodeSettings(draft_length=length, **decoding)


def _drafters(
    target: "TargetModel",
    heads: tuple[str, ...],
    models: tuple[str, ...],
    lookup: bool,
    cascade: bool,
    trust_remote_code: bool,
) -> "list[Drafter]":
    """Drafters in the order lookup, separate models, heads, each named after its folder, and cascades of these."""
    if cascade and not heads and not models:
        raise UserError("--cascade has nothing to turn to where lookup finds nothing; give --head or --draft-model too")

    from specheads.checkpoint import load_head
    from specheads.inference import CascadeDrafter, HeadDrafter, LookupDrafter, ModelDrafter
    from specheads.target import TargetModel

    drafters: list[Drafter] = [LookupDrafter()] if lookup else []
    for name in models:
        model = TargetModel.load(
            name,
            dtype=target.dtype,
            device=target.device,
            trust_remote_code=trust_remote_code,
            what="draft model",
        )
        drafters.append(ModelDrafter(model))
        drafters[-1].name = _short_name(name)
    for name in heads:
        head = load_head(name, device=target.device, dtype=target.dtype)
        head.bind(target)
        drafters.append(HeadDrafter(head))
        drafters[-1].name = _short_name(name)
    if cascade:
        drafters.extend(CascadeDrafter([LookupDrafter(), drafter]) for drafter in drafters[lookup:])
    return drafters


def _short_name(path: str) -> str:
    """The last part of a path that says something: `run` of `work/run/head`."""
    parts = [part for part in Path(path).parts if part not in ("head", "/")]
    return parts[-1] if parts else path


def _stop(message: str) -> None:
    click.echo(message, err=True)
    sys.exit(130)


if __name__ == "__main__":
    main()
