"""Muon in float32 takes the steps of torch's Muon, to the precision of the latter's bfloat16."""

import pytest
import torch
from torch import nn

from specheads.train import optimizer
from specheads.train.config import OptimizerConfig
from specheads.train.optimizer import Float32Muon, make_optimizers


@pytest.mark.parametrize("shape", [(12, 40), (40, 12), (16, 16)])
@pytest.mark.parametrize("nesterov", [True, False])
def test_float32_muon_is_torch_s_muon(shape: tuple[int, int], nesterov: bool) -> None:
    torch.manual_seed(0)
    begin, gradients = torch.randn(shape), torch.randn(4, *shape)
    ends = []
    for kind in (torch.optim.Muon, Float32Muon):
        parameter = nn.Parameter(begin.clone())
        muon = kind([parameter], lr=0.1, weight_decay=0.2, nesterov=nesterov, adjust_lr_fn="match_rms_adamw")
        for gradient in gradients:
            parameter.grad = gradient.clone()
            muon.step()
        ends.append(parameter.detach())
    moved = (ends[0] - begin).norm()
    assert (ends[0] - ends[1]).norm() < 0.02 * moved


def test_float32_muon_orthogonalises() -> None:
    parameter = nn.Parameter(torch.zeros(8, 32))
    parameter.grad = torch.randn(8, 32, generator=torch.Generator().manual_seed(1))
    Float32Muon([parameter], lr=1.0, weight_decay=0.0, adjust_lr_fn="match_rms_adamw").step()
    values = torch.linalg.svdvals(parameter.detach()) / (0.2 * 32**0.5)
    assert values.min() > 0.5
    assert values.max() < 1.5


@pytest.mark.parametrize("has", [True, False])
def test_the_machine_decides_which(has: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optimizer, "computes_in", lambda dtype, device: has)
    adamw, muon = make_optimizers(nn.Linear(4, 6), OptimizerConfig(name="muon"))
    assert isinstance(adamw, torch.optim.AdamW)
    assert isinstance(muon, Float32Muon) != has
    state = muon.state_dict()
    muon.load_state_dict(state)
