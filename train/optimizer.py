"""Optimisers of a head, and their learning-rate schedules."""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import get_scheduler

from specheads.precision import computes_in
from specheads.train.config import OptimizerConfig

# Odd polynomials a x + b x^3 + c x^5, each nearest to 1 on what the one before made of [0.01, 1]; together they give
# [0.73, 1.27] (Polar Express, arXiv 2505.16932, section 3). Torch's single polynomial takes five steps for as much.
_NEAREST_TO_ONE = ((8.0934, -23.6204, 17.4462), (3.6366, -2.7219, 0.5365), (2.6613, -1.9772, 0.4526))


class Float32Muon(torch.optim.Muon):
    """Muon that orthogonalises in float32, in three steps.

    Torch takes five in bfloat16 on any device; a CPU without instructions for it takes forty times as long for a step.
    """

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group)
        return loss

    def _update(self, parameter: Tensor, group: dict[str, Any]) -> None:
        state, gradient = self.state[parameter], parameter.grad
        assert gradient is not None
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(gradient)
        average = state["momentum_buffer"].lerp_(gradient, 1 - group["momentum"])
        update = gradient.lerp(average, group["momentum"]) if group["nesterov"] else average
        update = orthogonalise(update.float(), group["eps"])
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        # Scaled to the root mean square of AdamW's updates (arXiv 2502.16982, section 2.2).
        parameter.add_(update, alpha=-group["lr"] * 0.2 * max(parameter.shape) ** 0.5)


def orthogonalise(matrix: Tensor, eps: float = 1e-7) -> Tensor:
    """Singular values from a hundredth of the matrix's norm upwards go to 1 +- 0.27, smaller ones grow 78-fold."""
    tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.T if tall else matrix
    x = x / x.norm().clamp(min=eps)
    for first, third, fifth in _NEAREST_TO_ONE:
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=third, alpha=fifth), x, beta=first)
    return x.T if tall else x


def make_optimizers(head: nn.Module, config: OptimizerConfig) -> list[torch.optim.Optimizer]:
    """AdamW for all parameters; or Muon (Jordan et al. 2024) for the matrices and AdamW for the rest.

    Muon's updates are scaled to the size of AdamW's (arXiv 2502.16982), so both take the same learning rate.
    """
    parameters = [parameter for parameter in head.parameters() if parameter.requires_grad]
    others = [parameter for parameter in parameters if config.name == "adamw" or parameter.dim() != 2]
    matrices = [parameter for parameter in parameters if config.name == "muon" and parameter.dim() == 2]
    optimizers: list[torch.optim.Optimizer] = []
    if others:
        optimizers.append(
            torch.optim.AdamW(others, lr=config.learning_rate, betas=config.betas, weight_decay=config.weight_decay)
        )
    if matrices:
        muon = torch.optim.Muon if computes_in(torch.bfloat16, matrices[0].device) else Float32Muon
        optimizers.append(
            muon(matrices, lr=config.learning_rate, weight_decay=config.weight_decay, adjust_lr_fn="match_rms_adamw")
        )
    return optimizers


def make_scheduler(optimizer: torch.optim.Optimizer, config: OptimizerConfig, steps: int) -> Any:
    """The learning rate over a run of `steps`: a warm-up of `warmup_share` of them, then as `schedule` says."""
    warmup = round(config.warmup_share * steps)
    return get_scheduler(config.schedule, optimizer, num_warmup_steps=warmup, num_training_steps=steps)
