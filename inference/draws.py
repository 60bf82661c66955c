"""Everything random, in one place: generators, uniforms, and one token drawn from weights by a uniform.

A token is the inverse of the cumulative sum in float64, not a race of exponentials in float32: one uniform per draw, a
tail token of probability 1e-9 keeps its probability, and a test can walk over every cell of the randomness.
"""

import torch
from torch import Tensor


def make_generator(device: torch.device, seed: int | None = None) -> torch.Generator:
    """A generator on `device`; without a seed it starts from the system's entropy, never from the global state."""
    generator = torch.Generator(device=device)
    if seed is None:
        generator.seed()
    else:
        generator.manual_seed(seed)
    return generator


def draw_uniforms(rows: int, columns: int, generator: torch.Generator) -> Tensor:
    """Float64 uniforms in [0, 1), shape (rows, columns), on the generator's device."""
    return torch.rand(rows, columns, dtype=torch.float64, device=generator.device, generator=generator)


def pick(weights_BV: Tensor, uniforms_B: Tensor) -> Tensor:
    """Token ids (batch,) drawn in proportion to `weights_BV`, which need not sum to one.

    A token of weight zero is never picked: the cumulative sum does not rise at it. No read by the host.
    """
    sums_BV = weights_BV.cumsum(-1, dtype=torch.float64)
    thresholds_B1 = uniforms_B[:, None] * sums_BV[:, -1:]
    tokens_B = torch.searchsorted(sums_BV, thresholds_B1, right=True).squeeze(-1)
    return tokens_B.clamp(max=weights_BV.shape[-1] - 1)  # only weights that are not numbers get there
