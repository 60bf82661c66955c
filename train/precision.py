"""Number formats by machine: training and answering read many tokens at once, which a CPU without instructions for
bfloat16 does several times more slowly in it than in float32. Decoding reads few and is left as it was asked for."""

import torch
from tqdm import tqdm

from specheads.precision import computes_in
from specheads.target import TargetModel


def widen(target: TargetModel) -> None:
    """Go over to float32, and say so, where the target's device has no instructions for its dtype."""
    if not computes_in(target.dtype, target.device):
        name = str(target.dtype).removeprefix("torch.")
        tqdm.write(f"this {target.device.type.upper()} has no {name} instructions: the target computes in float32")
        target.model.to(torch.float32)


def autocast_precision(asked: str, device: torch.device) -> str:
    """Accelerate's `mixed_precision`: "auto" is bf16 where the device has instructions for it, else "no"."""
    if asked != "auto":
        return asked
    return "bf16" if computes_in(torch.bfloat16, device) else "no"
