"""The shortcuts of drafting give what the plain form gives."""

import pytest
import torch

from specheads.layers import FewRowsLinear, Linear, RotaryTable, linear, rotary


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(1, 1, 24), (24,), (1, 3, 24), (2, 1, 24)])
def test_one_row_or_many_give_the_same(shape: tuple[int, ...], bias: bool) -> None:
    layer, x = Linear(24, 40, bias=bias).double(), torch.randn(shape, dtype=torch.float64)
    with torch.no_grad():
        got = layer(x)
    torch.testing.assert_close(got, torch.nn.functional.linear(x, layer.weight, layer.bias))


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(1, 1, 24), (1, 4, 24), (2, 3, 24), (5, 24), (1, 40, 24), (1, 0, 24)])
def test_few_rows_give_the_same(shape: tuple[int, ...], bias: bool) -> None:
    layer, x = FewRowsLinear(24, 40, bias=bias), torch.randn(shape)
    with torch.no_grad():
        got = layer(x)
    assert got.is_contiguous()
    torch.testing.assert_close(got, torch.nn.functional.linear(x, layer.weight, layer.bias))


def test_few_rows_are_trained_too() -> None:
    layer = FewRowsLinear(24, 40)
    layer(torch.randn(4, 24)).sum().backward()
    assert layer.weight.grad is not None


def test_one_row_is_trained_too() -> None:
    layer = Linear(24, 40)
    layer(torch.randn(1, 24)).sum().backward()
    assert layer.weight.grad is not None


def test_autocast_decides_on_one_row_of_another_dtype() -> None:
    weight, x = torch.randn(40, 24), torch.randn(1, 24).bfloat16()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert linear(x, weight).dtype == torch.bfloat16


def test_the_rotary_table_grows_with_the_positions() -> None:
    table = RotaryTable(8, 1e4, torch.float32, torch.device("cpu"))
    for first, length in [(0, 5), (200, 3), (255, 2), (1000, 4), (3, 1)]:
        expected = rotary(torch.arange(first, first + length)[None], 8, 1e4)
        torch.testing.assert_close(table.at(first, length), expected)
