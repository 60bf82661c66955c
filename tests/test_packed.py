"""Packed layers keep the weights' values, compute like the layers they replace, and become those again."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from specheads import packed
from specheads.layers import FewRowsLinear
from specheads.packed import PackedLinear, pack, packed_bytes
from specheads.target import TargetModel

pytestmark = pytest.mark.skipif(
    "fbgemm" not in torch.backends.quantized.supported_engines, reason="FBGEMM packs on x86 only"
)


@pytest.fixture(autouse=True)
def _no_instructions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed, "computes_in", lambda dtype, device: dtype is torch.float32)


def layer_of(weight: torch.Tensor, bias: torch.Tensor | None = None) -> Any:
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, dtype=weight.dtype)
    layer.requires_grad_(False)
    layer.weight.copy_(weight)
    if bias is not None:
        layer.bias.copy_(bias)
    packed._pack(layer, keep_weight=False)
    return layer


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(1, 1, 24), (24,), (1, 4, 24), (2, 3, 24), (5, 24), (1, 40, 24), (1, 0, 24)])
def test_products_are_those_of_float32_rounded_once(shape: tuple[int, ...], dtype: torch.dtype, bias: bool) -> None:
    weight, x = torch.randn(40, 24).to(dtype), torch.randn(shape).to(dtype)
    offset = torch.randn(40).to(dtype) if bias else None
    got = layer_of(weight, offset)(x)
    exact = nn.functional.linear(x.double(), weight.double(), None if offset is None else offset.double())
    assert got.dtype == dtype
    # Half a unit in the last place, and what float32 sums lose.
    torch.testing.assert_close(got.double(), exact, rtol=0.501 * torch.finfo(dtype).eps, atol=1e-5)


@pytest.mark.parametrize("size", [1e-20, 1e-3, 1.0, 3e4, 1e20, 1e38])
def test_every_bfloat16_weight_keeps_its_value(size: float) -> None:
    exponents = torch.arange(0, -31, -1, dtype=torch.float64)
    mantissas = torch.arange(128, 256, dtype=torch.float64) / 256  # all that bfloat16 has
    values = size * torch.exp2(exponents)[:, None] * mantissas
    weight = torch.cat([values, -values]).to(torch.bfloat16)
    weight[0, 0] = 0
    assert torch.equal(layer_of(weight).weight, weight)


def test_what_is_lost_of_tiny_weights_is_below_2_to_the_minus_39_of_the_largest() -> None:
    weight = torch.randn(64, 64).mul(torch.exp2(torch.randint(-60, 0, (64, 64)).float())).to(torch.bfloat16)
    weight[0, 0] = 2.0
    lost = (layer_of(weight).weight.double() - weight.double()).abs().max()
    assert 0 < lost <= 2.0 * 2**-39


def test_zeros_are_packed_too() -> None:
    layer = layer_of(torch.zeros(8, 8).bfloat16())
    assert torch.equal(layer(torch.ones(2, 8).bfloat16()), torch.zeros(2, 8).bfloat16())


def test_the_layer_becomes_what_it_was_in_another_dtype() -> None:
    weight, bias = torch.randn(40, 24).bfloat16(), torch.randn(40).bfloat16()
    layer = layer_of(weight, bias)
    assert "weight" not in dict(layer.named_parameters())
    layer.to(torch.float32)
    assert type(layer) is FewRowsLinear
    assert torch.equal(layer.weight, weight.float())
    assert torch.equal(layer.bias, bias.float())


def test_a_packed_model_is_saved_and_copied_whole(make_llama: Callable[..., Any], tmp_path: Path) -> None:
    model = make_llama(tie_word_embeddings=True).bfloat16()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    pack(model)
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path, dtype="auto")
    for state in (model.state_dict(), copy.deepcopy(model).state_dict(), again.state_dict()):
        assert state.keys() == before.keys()
        assert all(torch.equal(state[name], tensor) for name, tensor in before.items())
    ids_1L = torch.tensor([[5, 9, 17, 3]])
    torch.testing.assert_close(model(ids_1L).logits, again(ids_1L).logits, rtol=0.05, atol=0.05)


@pytest.mark.parametrize("tied", [False, True])
def test_a_loaded_target_is_packed_and_its_bytes_are_counted(
    tied: bool, make_llama: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("specheads.target.AutoTokenizer.from_pretrained", lambda *args, **kwargs: None)
    plain = make_llama(tie_word_embeddings=tied).bfloat16()
    plain.save_pretrained(tmp_path)
    assert packed_bytes(TargetModel.load(str(tmp_path), pack=False).model) == 0
    target = TargetModel.load(str(tmp_path))
    linears = [module for module in target.model.modules() if isinstance(module, nn.Linear)]
    assert all(type(module) is PackedLinear for module in linears)
    assert target.projection.weight is dict(target.model.named_parameters(remove_duplicate=False))["lm_head.weight"]
    twice = target.projection.weight.nbytes  # packed, and borrowed by heads
    assert target.weight_bytes == TargetModel(plain).weight_bytes + twice
    assert target.fingerprint["hidden_size"] == 32
    weights = target.llama_layer(0)
    assert torch.equal(weights["gate"], plain.model.layers[0].mlp.gate_proj.weight)


@pytest.mark.parametrize("reason", ["float32", "a weight that is not finite", "a device with instructions"])
def test_what_need_not_or_cannot_be_packed_stays(
    reason: str, make_llama: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_llama().to(torch.float32 if reason == "float32" else torch.bfloat16)
    if reason == "a weight that is not finite":
        for module in model.modules():
            if isinstance(module, nn.Linear):
                module.weight[0, 0] = torch.inf
    if reason == "a device with instructions":
        monkeypatch.setattr(packed, "computes_in", lambda dtype, device: True)
    pack(model)
    assert packed_bytes(model) == 0
