"""Without instructions for bfloat16 training and answering go over to float32, and say so."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from specheads.precision import computes_in
from specheads.target import TargetModel
from specheads.train import precision
from specheads.train.precision import autocast_precision, widen

CPU = torch.device("cpu")


def test_float32_is_computed_everywhere() -> None:
    assert computes_in(torch.float32, CPU)
    assert autocast_precision("no", CPU) == "no"
    assert autocast_precision("bf16", CPU) == "bf16"


@pytest.mark.parametrize(("has", "dtype", "asked"), [(True, torch.bfloat16, "bf16"), (False, torch.float32, "no")])
def test_a_target_is_widened_where_it_must_be(
    has: bool,
    dtype: torch.dtype,
    asked: str,
    make_llama: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(precision, "computes_in", lambda dtype, device: has or dtype is torch.float32)
    target = TargetModel(make_llama().bfloat16())
    widen(target)
    assert target.dtype == dtype
    assert ("no bfloat16 instructions" in capsys.readouterr().out) != has
    assert autocast_precision("auto", CPU) == asked
