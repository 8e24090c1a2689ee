"""DDP with gradients in 16 bits: half of the bytes, and what is rounded away comes later."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from hpcdl.errors import UsageError

pytestmark = [pytest.mark.mpi(min_size=2)]


def gradients(rank, kind, steps=20):
    """The same gradient each step, which 16 bits do not hold: its sum over the steps, as DDP gives it; and the hook."""
    from hpcdl.torch import CompressState, compress_hook

    torch.manual_seed(1)
    model = nn.Linear(40, 3, bias=False)
    ddp, state = DistributedDataParallel(model), None
    if kind:
        state = CompressState(kind)
        ddp.register_comm_hook(state, compress_hook)
    x = torch.from_numpy(np.random.default_rng(rank).standard_normal((5, 40))).float()
    total = torch.zeros(3, 40, dtype=torch.float64)
    for _ in range(steps):
        model.weight.grad = None
        ddp(x).sum().backward()
        total += model.weight.grad
    return total, state


def test_nothing_is_lost_in_the_long_run(group, rank, size):
    import hpcdl.torch

    exact, _ = gradients(rank, None)
    before = hpcdl.torch.traffic()["all_reduce"]["bytes"]
    total, state = gradients(rank, "bfloat16")
    sent = hpcdl.torch.traffic()["all_reduce"]["bytes"] - before
    assert sent > 0 and len(state.residuals) == 1
    left = torch.from_numpy(state.residuals[0].reshape(3, 40).astype(float))
    group.all_reduce(left)
    torch.testing.assert_close(total + left / size, exact, rtol=1e-5, atol=1e-5)
    assert not torch.allclose(total, exact, rtol=1e-6, atol=1e-6)
    own = 120 // size
    assert sent == 20 * 2 * (120 - own + (size - 1) * own)


@pytest.mark.parametrize("kind", ["qsgd:bits=8", "sign", "topk:0.1", "randomk:0.2"])
def test_every_method_leads_on(kind, group, rank):
    """All ranks get the same; what is kept and what came add up to the exact sum, or the mean is close to it."""
    exact, _ = gradients(rank, None)
    total, state = gradients(rank, kind)
    others = total.clone()
    group.broadcast(others, 0)
    assert torch.equal(total, others)
    if state.residuals:
        left = torch.from_numpy(state.residuals[0].reshape(3, 40).astype(float))
        group.all_reduce(left)
        total += left / group.get_world_size()
    torch.testing.assert_close(total, exact, rtol=1e-4, atol=1e-3 if state.residuals else 3.0)


def test_bad_input(group, rank):
    from hpcdl.torch import CompressState, compress_hook

    with pytest.raises(UsageError, match="float17"):
        CompressState("float17")
    with pytest.raises(UsageError, match="is a part of the optimizer sgd or momentum"):
        CompressState("dgc:0.01")
    gloo = group.new_group(backend="gloo")
    state = CompressState("float16", gloo)
    with pytest.raises(UsageError, match="process group of the backend hpcdl"):
        compress_hook(state, None)
