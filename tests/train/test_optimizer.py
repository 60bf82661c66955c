"""Muon in float32 against its formula, and against torch's Muon as far as both are approximate."""

import pytest
import torch
from torch import nn

from specheads.train import optimizer
from specheads.train.config import OptimizerConfig
from specheads.train.optimizer import Float32Muon, make_optimizers, orthogonalise


@pytest.mark.parametrize("nesterov", [True, False])
def test_float32_muon_goes_where_torch_s_does(nesterov: bool) -> None:
    """Both are approximate, each in its way: the directions agree, and so do the lengths, to a part in five."""
    torch.manual_seed(0)
    begin, gradients = torch.randn(24, 80), torch.randn(4, 24, 80)
    moves = []
    for kind in (torch.optim.Muon, Float32Muon):
        parameter = nn.Parameter(begin.clone())
        muon = kind([parameter], lr=0.1, weight_decay=0.2, nesterov=nesterov, adjust_lr_fn="match_rms_adamw")
        for gradient in gradients:
            parameter.grad = gradient.clone()
            muon.step()
        moves.append((parameter.detach() - begin).flatten())
    assert torch.cosine_similarity(*moves, dim=0) > 0.98
    assert 0.8 < moves[1].norm() / moves[0].norm() < 1.25


@pytest.mark.parametrize("shape", [(12, 40), (40, 12), (16, 16)])
@pytest.mark.parametrize("nesterov", [True, False])
def test_float32_muon_by_hand(shape: tuple[int, int], nesterov: bool) -> None:
    torch.manual_seed(0)
    begin, gradients = torch.randn(shape), torch.randn(4, *shape)
    parameter = nn.Parameter(begin.clone())
    muon = Float32Muon([parameter], lr=0.1, momentum=0.9, weight_decay=0.2, nesterov=nesterov)
    expected, average = begin.double(), torch.zeros(shape, dtype=torch.float64)
    for gradient in gradients.double():
        parameter.grad = gradient.float()
        muon.step()
        average = 0.9 * average + 0.1 * gradient
        update = 0.9 * average + 0.1 * gradient if nesterov else average
        expected = (1 - 0.1 * 0.2) * expected - 0.1 * 0.2 * max(shape) ** 0.5 * orthogonalise(update)
    torch.testing.assert_close(parameter.detach().double(), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("shape", [(12, 40), (40, 12), (16, 16)])
def test_orthogonalising_keeps_the_singular_vectors(shape: tuple[int, int]) -> None:
    torch.manual_seed(1)
    left, _, right = torch.linalg.svd(torch.randn(shape, dtype=torch.float64), full_matrices=False)
    values = torch.logspace(0, -1.7, len(right), dtype=torch.float64)  # the smallest is above a hundredth of the norm
    assert values.min() > 0.01 * values.norm()
    result = left.T @ orthogonalise(left @ values.diag() @ right) @ right.T
    assert (result.diagonal() - 1).abs().max() < 0.28
    assert (result - result.diagonal().diag()).abs().max() < 1e-9


@pytest.mark.parametrize("has", [True, False])
def test_the_machine_decides_which(has: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optimizer, "computes_in", lambda dtype, device: has)
    adamw, muon = make_optimizers(nn.Linear(4, 6), OptimizerConfig(name="muon"))
    assert isinstance(adamw, torch.optim.AdamW)
    assert isinstance(muon, Float32Muon) != has
    state = muon.state_dict()
    muon.load_state_dict(state)
