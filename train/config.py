"""What `specheads train` reads: defaults < YAML file < dotted options of the command line. Every key is checked."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import Field, field_validator

from specheads.config import Strict, nearest, parse
from specheads.errors import UserError
from specheads.train.losses import get_loss


class DataConfig(Strict):
    """train: a JSON Lines file or a `datasets` source (see train/data.py); validation: another one, or
    `validation_share` of the documents; row_length: tokens in a packed row, longer documents are cut."""

    train: str
    validation: str | None = None
    validation_share: float = Field(default=0.05, ge=0, lt=1)
    row_length: int = Field(default=1024, ge=8)
    raw: bool = False
    dataset_split: str = "train"
    dataset_config: str | None = None
    limit: int | None = Field(default=None, ge=1)


class FeaturesConfig(Strict):
    """cache: folder to keep the target's hidden states in; without one they are computed at every step."""

    cache: str | None = None
    rows_per_shard: int = Field(default=64, ge=1)


class LossConfig(Strict):
    """kind: see train/losses.py; depth: tokens drafted in a row while training (a head that can draft only so many is
    trained at all of them); depth_decay: weight of depth k is depth_decay^(k-1); feature_weight: of the relative
    squared error to the target's own final hidden state; feature_positions: "answers", where tokens count, or "all",
    at depth 1 in the prompts as well: their states are there, and no answer had to be computed for them."""

    kind: str = "kl"
    lk_eta: float = Field(default=3.0, gt=0)
    depth: int = Field(default=3, ge=1)
    depth_decay: float = Field(default=0.8, gt=0, le=1)
    feature_weight: float = Field(default=0.0, ge=0)
    feature_positions: Literal["answers", "all"] = "answers"
    chunk: int = Field(default=512, ge=1)

    @field_validator("kind")
    @classmethod
    def _known(cls, kind: str) -> str:
        get_loss(kind)
        return kind


class OptimizerConfig(Strict):
    """name: "adamw", or "muon" for the matrices with AdamW for the rest; warmup_share: share of the steps in which the
    learning rate rises; clip_norm: largest gradient norm."""

    name: Literal["adamw", "muon"] = "adamw"
    learning_rate: float = Field(default=1e-3, gt=0)
    schedule: Literal["cosine", "linear", "constant_with_warmup"] = "cosine"
    warmup_share: float = Field(default=0.04, ge=0, lt=1)
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = Field(default=0.0, ge=0)
    clip_norm: float = Field(default=0.5, gt=0)


class TrainConfig(Strict):
    """A training run.

    Attributes:
        target: folder or hub name of the frozen target.
        target_dtype: as in transformers; "auto" is as it was saved, or float32 where the device cannot compute in that.
        head: `type` and the options of that head; see `specheads heads`.
        output_dir: gets head/, metrics.jsonl, run.json and checkpoints/.
        steps: optimiser steps; one reads `accumulation` times rows_per_step rows.
        precision: "bf16" computes in bf16 autocast, "no" in float32; "auto" is bf16 where the device can compute in it.
        log_every, evaluate_every, checkpoint_every: in steps; keep_checkpoints: how many stay.
        evaluation_rows: validation rows that an evaluation reads.
        trackers: names of Accelerate trackers, such as tensorboard.
    """

    target: str
    target_dtype: str = "auto"
    trust_remote_code: bool = False
    head: dict[str, Any]
    data: DataConfig
    output_dir: str
    features: FeaturesConfig = FeaturesConfig()
    loss: LossConfig = LossConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    steps: int = Field(ge=1)
    rows_per_step: int = Field(default=8, ge=1)
    accumulation: int = Field(default=1, ge=1)
    precision: Literal["auto", "no", "bf16"] = "auto"
    seed: int = Field(default=0, ge=0, lt=2**32)
    log_every: int = Field(default=10, ge=1)
    evaluate_every: int = Field(default=100, ge=1)
    evaluation_rows: int = Field(default=16, ge=1)
    checkpoint_every: int = Field(default=100, ge=1)
    keep_checkpoints: int = Field(default=2, ge=1)
    trackers: tuple[str, ...] = ()

    @field_validator("precision", mode="before")
    @classmethod
    def _read_no(cls, precision: Any) -> Any:
        return "no" if precision is False else precision  # what YAML makes of a bare `no`

    @field_validator("trackers")
    @classmethod
    def _can_track(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        if not names:
            return names
        from accelerate.tracking import get_available_trackers
        from accelerate.utils import LoggerType

        known = [str(each.value) for each in LoggerType if each != LoggerType.ALL]
        for name in names:
            if name not in known:
                raise ValueError(f"unknown tracker {name!r}{nearest(name, known)}")
            if name not in [str(each.value) for each in get_available_trackers()]:
                raise ValueError(f"tracker {name!r} needs a package that is not installed; install it with pip")
        return names

    @field_validator("head")
    @classmethod
    def _has_type(cls, head: dict[str, Any]) -> dict[str, Any]:
        if "type" not in head:
            raise ValueError("expected a head with a type, such as {type: eagle3}")
        return head


def load_train_config(path: str | Path, overrides: Sequence[str] = ()) -> TrainConfig:
    """Read a YAML file and put dotted options over it.

    Args:
        path: the file.
        overrides: options as they stand on the command line, `["--loss.kind", "lk", "--steps=500"]`; values are YAML.

    Raises:
        UserError: no such file, no YAML, an unknown key (the nearest known one is named), a value that does not fit.
    """
    try:
        values = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"config {str(path)!r} cannot be read ({error.strerror}); expected a YAML file") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"config {str(path)!r} is not YAML: {' '.join(str(error).split())}") from error
    if not isinstance(values, dict):
        raise UserError(f"config {str(path)!r} holds {type(values).__name__}, expected keys with values")
    for name, value in _pairs(list(overrides)):
        _put(values, name, value)
    return parse(TrainConfig, values, str(path))


def _pairs(overrides: list[str]) -> list[tuple[str, Any]]:
    pairs = []
    while overrides:
        option = overrides.pop(0)
        if not option.startswith("--"):
            raise UserError(f"unexpected {option!r}; expected an option like --loss.kind lk")
        name, equals, text = option[2:].partition("=")
        if not equals:
            if not overrides:
                raise UserError(f"option --{name} has no value; expected --{name} VALUE")
            text = overrides.pop(0)
        try:
            pairs.append((name, yaml.safe_load(text)))
        except yaml.YAMLError as error:
            raise UserError(f"option --{name}: {text!r} is not a YAML value") from error
    return pairs


def _put(values: dict[str, Any], name: str, value: Any) -> None:
    *path, last = name.split(".")
    for part in path:
        inner = values.setdefault(part, {})
        if not isinstance(inner, dict):
            raise UserError(f"option --{name}: {part} is {inner!r}, which has no keys inside")
        values = inner
    values[last] = value
