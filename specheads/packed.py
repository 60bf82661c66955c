"""Linear layers in bfloat16 or float16 on CPUs that have no instructions for them.

There torch multiplies row by row: four tokens cost four times what one costs, and a draft is not worth checking.
FBGEMM, which comes with torch, reads packed float16 weights once for several rows and adds up in float32.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from specheads.layers import FewRowsLinear
from specheads.precision import computes_in

_LARGEST = 2**15  # a power of two below the largest float16


class PackedLinear(nn.Linear):
    """A `torch.nn.Linear` that computes from packed weights; made by `pack`.

    The weights are float16 times a power of two that brings the largest just into range. A bfloat16 weight keeps its
    value; below 2**-31 of the largest it may lose its last bits, an error of at most 2**-39 of the largest, where
    float32 sums are uncertain by 2**-24. `weight` unpacks them again; moved to another device or dtype the layer
    becomes an ordinary one.
    """

    _packed: Any
    _scale: Tensor
    _dtype: torch.dtype

    def forward(self, x: Tensor) -> Tensor:
        if x.dim() == 1:
            return self(x[None])[0]
        # One number in a row of its own, not a scalar, makes the product float32.
        return torch.ops.quantized.linear_dynamic_fp16(x * self._scale, self._packed).to(x.dtype)

    def unpack(self) -> None:
        """Become an ordinary layer."""
        weight = self.weight
        del self._packed, self._scale, self._dtype
        self.__class__ = FewRowsLinear  # type: ignore[assignment]
        self.weight = nn.Parameter(weight, requires_grad=False)

    def _unpacked(self) -> Tensor:
        weight, _ = torch.ops.quantized.linear_unpack_fp16(self._packed)
        return (weight * self._scale).to(self._dtype)

    def __getattr__(self, name: str) -> Any:
        if name == "weight" and "weight" not in self._parameters:
            return self._unpacked()
        return super().__getattr__(name)

    def _apply(self, fn: Callable[[Any], Any], recurse: bool = True) -> nn.Module:
        self.unpack()
        return self._apply(fn, recurse)

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination.setdefault(f"{prefix}weight", self._unpacked())


def pack(model: PreTrainedModel) -> None:
    """Make packed layers of a model's linear layers, where its CPU has no instructions for their dtype.

    They cannot be trained. The output projection keeps its weight beside the packed one: the embedding may be the same
    tensor, and heads borrow its rows.
    """
    for module in model.modules():
        if type(module) in (nn.Linear, FewRowsLinear) and _packable(module.weight):
            _pack(module, keep_weight=module is model.get_output_embeddings())


def packed_bytes(model: nn.Module) -> int:
    """Bytes of the packed weights of a model."""
    layers = (module for module in model.modules() if isinstance(module, PackedLinear))
    return sum(2 * layer.in_features * layer.out_features for layer in layers)


def _packable(weight: Tensor) -> bool:
    return (
        weight.dtype in (torch.bfloat16, torch.float16)
        and weight.device.type == "cpu"
        and "fbgemm" in torch.backends.quantized.supported_engines
        and not computes_in(weight.dtype, weight.device)
        and bool(weight.isfinite().all())
    )


def _pack(layer: Any, keep_weight: bool) -> None:
    weight = layer.weight.detach()
    largest = float(weight.abs().max())
    exponent = min(math.frexp(_LARGEST / largest)[1] - 1, 126) if largest else 0
    bias = None if layer.bias is None else layer.bias.detach().float()
    layer._packed = torch.ops.quantized.linear_prepack_fp16(weight.float() * 2.0**exponent, bias)
    layer._scale = torch.tensor([2.0**-exponent])
    layer._dtype = weight.dtype
    layer.__class__ = PackedLinear
    if not keep_weight:
        del layer.weight
