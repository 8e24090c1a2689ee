"""PowerSGD takes the steps of PyTorch's own hook from the same start, and the same through DDP."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from hpcdl.comm import Communicator
from hpcdl.comm.compression import compressed
from hpcdl.models.layout import Layout, Tensor

pytestmark = [pytest.mark.mpi(min_size=2)]

SHAPES = [(6, 9), (9,), (7, 4), (3, 2, 5), (1,)]


class Bucket:
    """What the hook reads of a bucket of DDP."""

    def __init__(self, vector):
        self.vector = torch.from_numpy(vector)

    def buffer(self):
        return self.vector

    def gradients(self):
        cut = self.vector.split([int(np.prod(shape)) for shape in SHAPES])
        return [part.view(shape) for part, shape in zip(cut, SHAPES, strict=True)]

    def index(self):
        return 0

    def is_last(self):
        return True


@pytest.mark.parametrize("rank_of_factors", [1, 2, 3])
def test_steps_of_pytorchs_own_hook(rank_of_factors, gloo, group, world):
    sizes = [int(np.prod(shape)) for shape in SHAPES]
    starts = np.cumsum([0, *sizes[:-1]])
    tensors = [Tensor(str(i), shape, int(starts[i]), str(i)) for i, shape in enumerate(SHAPES)]
    layout = Layout(tensors, "float64")
    spec = f"powersgd:rank={rank_of_factors}"
    state = compressed(spec, layout.size, "float64", layout=layout)
    state.prepare_factors()
    theirs = PowerSGDState(gloo, rank_of_factors, start_powerSGD_iter=2, min_compression_rate=1)
    theirs.iter = 2
    theirs.q_memory_dict[0] = torch.from_numpy(state.factors.copy())
    theirs.p_memory_dict[0] = torch.empty(sum(each.rows * each.rank for each in state.matrices), dtype=torch.float64)
    comm, random = Communicator(world), np.random.default_rng(world.rank)
    for _ in range(6):
        gradient = random.standard_normal(layout.size)
        bucket = Bucket(gradient.copy())
        wanted = powerSGD_hook(theirs, bucket).wait()
        comm.all_reduce_compressed(gradient, state, "mean")
        assert gradient == pytest.approx(wanted.numpy(), abs=1e-10)
        kept = theirs.error_dict[0].numpy()
        for each in state.matrices:
            assert each.of(state.residual) == pytest.approx(each.of(kept), abs=1e-10)
    assert len(state.matrices) == (3 if rank_of_factors < 3 else 1) and np.abs(state.residual).max() > 0.1
    comm.free()


def test_through_ddp(group, world):
    from hpcdl.torch import CompressState, compress_hook

    def sent(kind):
        torch.manual_seed(1)
        model = nn.Linear(40, 30)
        ddp = DistributedDataParallel(model)
        if kind:
            ddp.register_comm_hook(CompressState(kind), compress_hook)
        ddp(torch.full((2, 40), world.rank + 1.0)).sum().backward()
        return model.weight.grad, model.bias.grad

    exact, found = sent(""), sent("powersgd:rank=1")
    for one, other in zip(exact, found, strict=True):
        torch.testing.assert_close(other, one)  # the gradient of a linear layer on equal rows has rank 1
