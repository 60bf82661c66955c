"""Strict configuration: every mistake is one line that names the key, the value and what was expected."""

from typing import Any

import pytest
from pydantic import Field, ValidationError

from specheads.config import HeadConfig, Strict, TargetFingerprint, nearest, parse
from specheads.errors import UserError

TARGET = {"architecture": "LlamaForCausalLM", "hidden_size": 32, "num_layers": 2, "vocab_size": 61}


class Inner(Strict):
    learning_rate: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.95)


class Outer(Strict):
    steps: int = Field(ge=1)
    inner: Inner = Inner()


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"steps": 1, "step": 2}, "here: unknown key 'step'; did you mean 'steps'? known: inner, steps"),
        (
            {"steps": 1, "inner": {"lerning_rate": 1}},
            "here: unknown key 'inner.lerning_rate'; did you mean 'learning_rate'? known: betas, learning_rate",
        ),
        ({"steps": 1, "zzz": 2}, "here: unknown key 'zzz'; known: inner, steps"),
        ({}, "here: 'steps' is missing; add it"),
        ({"steps": 0}, "here: steps is 0: Input should be greater than or equal to 1"),
        ({"steps": "many"}, "here: steps is 'many': Input should be a valid integer"),
        ({"steps": 1.5}, "here: steps is 1.5: Input should be a valid integer"),
        ({"steps": 1, "inner": 3}, "here: inner is 3: Input should be a valid dictionary"),
        ({"steps": 1, "inner": {"betas": [0.1]}}, "here: 'inner.betas.1' is missing"),
        ({"steps": 1, "inner": {"betas": [0.1, "x"]}}, "here: inner.betas.1 is 'x': Input should be a valid number"),
        (3, "here: value is 3: Input should be a valid dictionary"),
    ],
)
def test_mistakes_are_named(data: Any, message: str) -> None:
    with pytest.raises(UserError) as error:
        parse(Outer, data, "here")
    assert str(error.value).startswith(message)
    assert "\n" not in str(error.value)


def test_good_data_passes_and_is_frozen() -> None:
    config = parse(Outer, {"steps": 3, "inner": {"betas": [0.5, 0.6]}}, "here")
    assert config.inner.betas == (0.5, 0.6)
    with pytest.raises(ValidationError):
        config.steps = 4


def test_head_config() -> None:
    config = parse(HeadConfig, {"type": "x", "target": TARGET}, "here")
    assert config.num_draft_tokens == 61
    assert config.format_version == 1
    assert parse(HeadConfig, {"type": "x", "target": TARGET, "draft_vocab_size": 7}, "here").num_draft_tokens == 7
    with pytest.raises(UserError, match="draft_vocab_size is 0"):
        parse(HeadConfig, {"type": "x", "target": TARGET, "draft_vocab_size": 0}, "here")
    with pytest.raises(UserError, match=r"unknown key 'target.layers'"):
        parse(HeadConfig, {"type": "x", "target": TARGET | {"layers": 3}}, "here")
    assert TargetFingerprint(**TARGET).tokenizer is None


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("medsa", "; did you mean 'medusa'? known: eagle3, medusa"),
        ("qqq", "; known: eagle3, medusa"),
        ("", "; known: eagle3, medusa"),
    ],
)
def test_nearest(name: str, expected: str) -> None:
    assert nearest(name, ["medusa", "eagle3"]) == expected


def test_a_user_error_is_a_value_error() -> None:
    assert issubclass(UserError, ValueError)
