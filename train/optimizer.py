"""Optimisers of a head, and their learning-rate schedules."""

from typing import Any

import torch
from torch import nn
from transformers import get_scheduler

from specheads.train.config import OptimizerConfig


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
        optimizers.append(
            torch.optim.Muon(
                matrices, lr=config.learning_rate, weight_decay=config.weight_decay, adjust_lr_fn="match_rms_adamw"
            )
        )
    return optimizers


def make_scheduler(optimizer: torch.optim.Optimizer, config: OptimizerConfig, steps: int) -> Any:
    """The learning rate over a run of `steps`: a warm-up of `warmup_share` of them, then as `schedule` says."""
    warmup = round(config.warmup_share * steps)
    return get_scheduler(config.schedule, optimizer, num_warmup_steps=warmup, num_training_steps=steps)
