"""Strict configuration: what a head is, and how every configuration of the project is read and refused.

`parse` turns pydantic's reports into one line of ours; training configurations use it too.
"""

import difflib
from typing import Any, ClassVar, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from specheads.errors import UserError

FORMAT_VERSION = 1

Model = TypeVar("Model", bound=BaseModel)


class Strict(BaseModel):
    """A configuration in which every key is known and every value has its type."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class TargetFingerprint(Strict):
    """What a head and its target must agree on; see `TargetModel.fingerprint`."""

    architecture: str
    hidden_size: int
    num_layers: int
    vocab_size: int
    tokenizer: str | None = None


class HeadConfig(Strict):
    """What every head's configuration holds; each head adds its own fields.

    Attributes:
        type: the head's registered name.
        format_version: version of the checkpoint format.
        target: fingerprint of the target that the head was made for.
        target_name: folder or hub name under which that target was loaded.
        tap_layers: indices into transformers' `hidden_states` that the head reads.
        draft_vocab_size: tokens that the head can draft; None is the target's whole vocabulary.
    """

    default_draft_length: ClassVar[int] = 5

    type: str
    format_version: int = FORMAT_VERSION
    target: TargetFingerprint
    target_name: str | None = None
    tap_layers: tuple[int, ...] = ()
    draft_vocab_size: int | None = Field(default=None, ge=1)

    @property
    def num_draft_tokens(self) -> int:
        """Width of the head's logits."""
        return self.draft_vocab_size or self.target.vocab_size


ProjectionKind = Literal["target", "low_rank", "own"]


def parse(model: type[Model], data: Any, where: str) -> Model:
    """Validate `data` as a `model`.

    Raises:
        UserError: names the key, the value and what was expected; an unknown key is shown with the nearest known one.
    """
    try:
        return model.model_validate(data)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        key = ".".join(str(part) for part in first["loc"])
        if first["type"] == "extra_forbidden":
            known = _known_keys(model, first["loc"][:-1])
            raise UserError(f"{where}: unknown key {key!r}{nearest(str(first['loc'][-1]), known)}") from error
        if first["type"] == "missing":
            raise UserError(f"{where}: {key!r} is missing; add it") from error
        message = first["msg"].removeprefix("Value error, ")
        raise UserError(f"{where}: {key or 'value'} is {first['input']!r}: {message}") from error


def nearest(name: str, known: list[str]) -> str:
    """`; did you mean 'x'? known: ...`, for an error about an unknown name."""
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    hint = f"; did you mean {close[0]!r}?" if close else ";"
    return f"{hint} known: {', '.join(sorted(known))}"


def _known_keys(model: type[BaseModel], path: tuple[Any, ...]) -> list[str]:
    for part in path:
        field = model.model_fields.get(str(part))
        inner = field.annotation if field is not None else None
        if not (isinstance(inner, type) and issubclass(inner, BaseModel)):
            return []
        model = inner
    return list(model.model_fields)
