"""Number formats by machine."""

from typing import Any

import torch


def computes_in(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether the device has instructions for matrix products in `dtype`."""
    mkldnn: Any = torch.ops.mkldnn
    if device.type == "cuda" and dtype is torch.bfloat16:
        return torch.cuda.is_bf16_supported(including_emulation=False)
    if device.type == "cpu" and dtype is torch.bfloat16:
        return bool(mkldnn._is_mkldnn_bf16_supported())
    if device.type == "cpu" and dtype is torch.float16:
        return bool(mkldnn._is_mkldnn_fp16_supported())
    return True
