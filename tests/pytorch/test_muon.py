"""Muon against torch.optim.Muon, which multiplies in bfloat16 (here not), and the weights of a module that it takes."""

import numpy as np
import pytest
import torch
from torch import nn

from hpcdl.models.layout import OUTPUTS_FIRST, Layout, Tensor
from hpcdl.optim import make_optimizer
from hpcdl.torch.tensors import layout_of

RATES, DECAY = [0.1, 0.02, 0.05], 0.3


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this PyTorch has no Muon")
@pytest.mark.parametrize("scale, theirs", [("shape", "original"), ("rms", "match_rms_adamw")])
@pytest.mark.parametrize("shape", [(12, 5), (5, 12)], ids=str)
def test_it_is_pytorchs(shape, scale, theirs, monkeypatch):
    monkeypatch.setattr(torch.Tensor, "bfloat16", torch.Tensor.clone)
    random = np.random.default_rng(0)
    layout = Layout([Tensor("w", shape, 0, "a", OUTPUTS_FIRST)], "float64")
    how = layout.size, "float64", RATES.__getitem__, DECAY
    ours, w = make_optimizer(f"muon:scale={scale}", *how, weights=layout.hidden), random.standard_normal(layout.size)
    parameter = nn.Parameter(torch.tensor(w.reshape(shape)))
    rule = torch.optim.Muon([parameter], weight_decay=DECAY, adjust_lr_fn=theirs)
    for rate in RATES:
        g = random.standard_normal(layout.size)
        ours.update(w, g)
        parameter.grad, rule.param_groups[0]["lr"] = torch.tensor(g.reshape(shape)), rate
        rule.step()
    np.testing.assert_allclose(w.reshape(shape), parameter.detach().numpy(), rtol=1e-9, atol=1e-9)


class Net(nn.Module):
    """An embedding that is also the output layer, a convolution, norms, and a parameter of three axes."""

    def __init__(self, tied):
        super().__init__()
        self.token, self.conv, self.norm = nn.Embedding(7, 4), nn.Conv2d(1, 4, 3), nn.LayerNorm(4)
        self.up, self.marker = nn.Linear(4, 6), nn.Parameter(torch.zeros(1, 1, 4))
        self.still = nn.Linear(4, 4).requires_grad_(False)
        self.down, self.head = nn.Linear(6, 4), nn.Linear(4, 7)
        if tied:
            self.head.weight = self.token.weight


@pytest.mark.parametrize("tied", [False, True])
def test_weights_between_embeddings_and_the_output_layer(tied):
    layout = layout_of(Net(tied), np.dtype("float32"))
    assert [tensor.name for tensor in layout.hidden] == ["conv.weight", "up.weight", "down.weight"]
    assert [tensor.matrix_shape for tensor in layout.hidden] == [(1, 4, 9), (1, 6, 4), (1, 4, 6)]
