"""Dropout follows the row, the step and the layer's name, whoever computes it; evaluation draws nothing."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from hpcdl.random import Random
from hpcdl.torch.dropout_rng import ALPHA, CHANNELS, ELEMENTS, ModuleRandom

LAYERS = [*ELEMENTS, *CHANNELS]
IMAGES = {nn.Dropout1d: (6, 5, 4), nn.Dropout3d: (6, 5, 2, 3, 2)}


def drawn(layer, x, rows, seed=0, epoch=0, step=0, name="drop"):
    module = nn.ModuleDict({name: layer})
    draws = ModuleRandom(module)
    draws.of_run(Random(seed))
    draws.at(epoch, step, np.asarray(rows))
    return module[name](x)


def inputs(kind):
    shape = IMAGES.get(kind, (6, 5, 4, 3))
    return torch.rand(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64) + 0.5


@pytest.mark.parametrize("kind", LAYERS, ids=lambda kind: kind.__name__)
def test_a_rows_mask_is_the_same_in_any_company(kind):
    x, rows = inputs(kind), np.array([3, 8, 2, 90, 4, 5])
    whole = drawn(kind(0.5), x, rows)
    for part in ([0, 1], [5], [4, 2, 0]):
        assert torch.equal(drawn(kind(0.5), x[part], rows[part]), whole[part])
    for other in ({"seed": 1}, {"epoch": 1}, {"step": 1}, {"name": "other"}):
        assert not torch.equal(drawn(kind(0.5), x, rows, **other), whole)
    assert not torch.equal(drawn(kind(0.5), x, rows + 1), whole)


@pytest.mark.parametrize("kind", LAYERS, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("p", [0.0, 0.25, 1.0])
def test_as_the_layer_of_pytorch_with_that_mask(kind, p):
    x = inputs(kind).requires_grad_()
    mine = drawn(kind(p), x, np.arange(6))
    (gradient,) = torch.autograd.grad(mine.sum(), x)
    kept = gradient != 0
    if kind in CHANNELS:
        assert (kept == kept[:, :, :1] if kind is nn.Dropout1d else kept.flatten(2) == kept.flatten(2)[:, :, :1]).all()
    if p == 0:
        assert torch.equal(mine, x)
    elif kind not in ALPHA:
        assert torch.allclose(mine, torch.where(kept, x / (1 - p), 0) if p < 1 else torch.zeros_like(x))
    else:
        a, b, lost = affine(kind, p)
        assert torch.allclose(mine, torch.where(kept, a * x + b, lost))


def affine(kind, p):
    """What PyTorch's layer makes of an x that is kept, a x + b, and of one that is lost: (a, b, value)."""
    layer, found = kind(p), {}
    for value in (1.0, 2.0):
        torch.manual_seed(0)
        found[value] = layer(torch.full((40, 5, 4, 3), value, dtype=torch.float64))
    lost = found[1.0] == found[2.0]
    if p == 1:
        return 0.0, 0.0, float(found[1.0][lost][0])
    one, two = (float(found[value][~lost][0]) for value in (1.0, 2.0))
    return two - one, 2 * one - two, float(found[1.0][lost][0])


def test_so_many_are_lost_and_the_mean_stays():
    y = drawn(nn.Dropout(0.3), torch.ones(400, 50), np.arange(400))
    assert abs((y == 0).float().mean() - 0.3) < 0.01 and abs(y.mean() - 1) < 0.02


def test_a_layer_that_is_used_twice_draws_twice():
    layer = nn.Dropout(0.5)
    draws = ModuleRandom(nn.Sequential(layer))
    for _ in range(2):
        draws.at(0, 0, np.arange(4))
        first, second = layer(torch.ones(4, 50)), layer(torch.ones(4, 50))
        assert not torch.equal(first, second)
    draws.at(0, 0, np.arange(4))
    assert torch.equal(layer(torch.ones(4, 50)), first)


def test_entries_that_lie_row_by_row_belong_to_rows():
    x = torch.ones(3 * 4, 50)
    whole = drawn(nn.Dropout(0.5), x, [5, 6, 7])
    assert torch.equal(drawn(nn.Dropout(0.5), x[4:8], [6]), whole[4:8])


def test_what_shows_no_rows_is_pytorchs_and_repeats():
    x = torch.ones(5, 50)
    once = drawn(nn.Dropout(0.5), x, [5, 6])
    assert torch.equal(drawn(nn.Dropout(0.5), x, [5, 6]), once) and 0 < (once == 0).sum() < 250
    assert not torch.equal(drawn(nn.Dropout(0.5), x, [7, 6]), once)


def test_evaluation_draws_nothing():
    x = torch.ones(4, 50)
    assert drawn(nn.Dropout(0.5).eval(), x, range(4)) is x


def test_other_draws_begin_with_the_step():
    draws, found = ModuleRandom(nn.Linear(2, 2)), []
    for seed, epoch, step, rows in [(0, 0, 0, [3, 4]), (0, 0, 0, [3]), (1, 0, 0, [3]), (0, 1, 0, [3]), (0, 0, 1, [3])]:
        draws.of_run(Random(seed))
        draws.at(epoch, step, np.array(rows))
        found.append(torch.rand(4).tolist())
    assert found[0] == found[1] and len({tuple(each) for each in found}) == 4


def test_half_precision_has_the_same_mask():
    x = torch.ones(4, 50)
    y = drawn(nn.Dropout(0.5), x.bfloat16(), range(4))
    assert y.dtype is torch.bfloat16 and torch.equal(y.float(), drawn(nn.Dropout(0.5), x, range(4)))


class Checkpointed(nn.Module):
    """A layer that is used in two segments, with or without their recomputation."""

    def __init__(self, again):
        super().__init__()
        self.linear, self.drop, self.again = nn.Linear(8, 8, dtype=torch.float64), nn.Dropout(0.5), again

    def segment(self, x):
        return self.drop(torch.tanh(self.drop(self.linear(x))))

    def forward(self, x):
        for _ in range(2):
            x = checkpoint(self.segment, x, use_reentrant=False) if self.again else self.segment(x)
        return x


def test_a_layer_that_is_recomputed_has_the_same_masks():
    """Also where another micro-batch, of other rows, has gone forward before its backward, as in a pipeline."""
    found = []
    for again in (False, True):
        torch.manual_seed(0)
        module = Checkpointed(again)
        draws, losses = ModuleRandom(module, seed=1), []
        for rows in (np.arange(4), np.arange(4, 7)):
            draws.at(0, 3, rows)
            losses.append(module(torch.ones(len(rows), 8, dtype=torch.float64)).square().sum())
        for loss in losses:
            loss.backward()
        found.append(module.linear.weight.grad)
    assert found[0].abs().sum() > 0 and torch.equal(*found)
