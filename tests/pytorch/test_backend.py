"""The backend of torch.distributed: each collective beside numpy, DDP and FSDP2 beside gloo."""

import copy
import time
from datetime import timedelta
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import distributed as dist
from torch import nn

from hpcdl.comm import Communicator
from hpcdl.comm.call_matching import number
from hpcdl.comm.diagnostics.call_signature import format_ranks
from hpcdl.comm.diagnostics.collective_checker import CollectiveChecker
from hpcdl.errors import AgreedError, UsageError
from hpcdl.torch import monitored
from hpcdl.torch.backend import BackendGroup

pytestmark = [pytest.mark.mpi(min_size=2)]
FLOATS = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
INTEGERS = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]
OPERATIONS = {"SUM": np.add, "PRODUCT": np.multiply, "MIN": np.minimum, "MAX": np.maximum}
BITS = {"BAND": np.bitwise_and, "BOR": np.bitwise_or, "BXOR": np.bitwise_xor}


def of_rank(rank, kind, length=13):
    """What a rank contributes: small whole numbers, which all types hold and whose sums and products are exact."""
    values = np.random.default_rng(rank).integers(1, 4, length)
    return torch.from_numpy(values).to(kind)


def reduced(function, size, kind, length=13):
    rows = [of_rank(each, torch.int64, length).numpy() for each in range(size)]
    return torch.from_numpy(function.reduce(rows)).to(kind)


def cases():
    for kind in FLOATS + INTEGERS:
        for name, function in (OPERATIONS | (BITS if kind in INTEGERS else {})).items():
            yield kind, getattr(dist.ReduceOp, name), function


def test_all_reduce_of_every_type_and_operation(group, rank, size):
    for kind, op, function in cases():
        for later in (False, True):
            tensor = of_rank(rank, kind)
            work = group.all_reduce(tensor, op, async_op=later)
            if later:
                work.wait()
            assert torch.equal(tensor, reduced(function, size, kind)), (kind, op, later)
    tensor = torch.tensor([rank == 0, False, True])
    group.all_reduce(tensor, dist.ReduceOp.MAX)
    assert tensor.tolist() == [True, False, True]


def test_a_mean(group, rank, size):
    for kind in FLOATS:
        tensor = of_rank(rank, kind)
        group.all_reduce(tensor, dist.ReduceOp.AVG)
        wanted = reduced(np.add, size, torch.float64) / size
        torch.testing.assert_close(tensor.double(), wanted, rtol=2**-7 if kind.itemsize == 2 else 1e-6, atol=0)
    with pytest.raises(ValueError, match="AVG is for floating-point"):
        group.all_reduce(torch.ones(3, dtype=torch.int32), dist.ReduceOp.AVG)


def test_sixteen_bits_are_added_in_float32_and_rounded_once(group, rank, size):
    """256 + 1/2 + 1/2 is 257 in float32; a sum that is rounded after each addition in bfloat16 stays 256."""
    tensor = torch.full((5,), 256.0 if rank == 0 else 1.0 / (size - 1) * 2, dtype=torch.bfloat16)
    group.all_reduce(tensor)
    exact = 256 + (size - 1) * float(torch.tensor(2.0 / (size - 1), dtype=torch.bfloat16))
    assert torch.equal(tensor, torch.full((5,), exact).to(torch.bfloat16))


def test_a_tensor_that_is_not_contiguous(group, rank, size):
    whole = torch.arange(24.0).view(4, 6) * (rank + 1)
    part = whole.t()[1:5]
    before = whole.clone()
    group.all_reduce(part)
    scale = sum(range(1, size + 1)) / (rank + 1)
    assert torch.allclose(part, before.t()[1:5] * scale)
    assert torch.equal(whole.t()[0], before.t()[0])
    group.broadcast(part, 1)
    assert torch.allclose(whole[:, 1:5].t(), torch.arange(24.0).view(4, 6).t()[1:5] * sum(range(1, size + 1)))


def test_reduce_leaves_the_others_their_tensor(group, rank, size):
    root = size - 1
    for kind in (torch.float32, torch.bfloat16, torch.int64):
        for op, function in ((dist.ReduceOp.SUM, np.add), (dist.ReduceOp.PRODUCT, np.multiply)):
            tensor = of_rank(rank, kind)
            group.reduce(tensor, root, op)
            assert torch.equal(tensor, reduced(function, size, kind) if rank == root else of_rank(rank, kind))


def test_broadcast(group, rank, size):
    for kind in [*FLOATS, *INTEGERS, torch.bool, torch.complex64, torch.float8_e4m3fn]:
        tensor = of_rank(rank, kind)
        group.broadcast(tensor, size - 1)
        assert torch.equal(tensor.float(), of_rank(size - 1, kind).float())


@pytest.mark.parametrize("later", [False, True])
def test_gathering(group, rank, size, later):
    for kind in (torch.float32, torch.bfloat16, torch.bool):
        mine = of_rank(rank, kind)
        rows = [torch.empty_like(mine) for _ in range(size)]
        wait(group.all_gather(rows, mine, async_op=later))
        group.group.WORLD.allgather([rows], [mine]).wait()  # as PyTorch's own C++ may call it, without options
        assert all(torch.equal(row, of_rank(each, kind)) for each, row in enumerate(rows))
        whole = torch.empty(size * 13, dtype=kind)
        wait(group.all_gather_into_tensor(whole, mine, async_op=later))
        assert torch.equal(whole, torch.cat(rows))
        strided = torch.empty(13, size, dtype=kind).t()
        wait(group.all_gather(list(strided), mine, async_op=later))
        assert torch.equal(strided, torch.stack(rows))
        found = [torch.empty_like(mine) for _ in range(size)] if rank == 1 else None
        wait(group.gather(mine, found, 1, async_op=later))
        assert found is None or all(map(torch.equal, found, rows))


def wait(work):
    if work is not None:
        work.wait()


@pytest.mark.parametrize("later", [False, True])
def test_scattering(group, rank, size, later):
    for kind in (torch.float32, torch.float16, torch.int32):
        mine, root = torch.empty(13, dtype=kind), size - 1
        parts = [of_rank(each, kind) for each in range(size)] if rank == root else None
        wait(group.scatter(mine, parts, root, async_op=later))
        assert torch.equal(mine, of_rank(rank, kind))
        for op, function in ((dist.ReduceOp.SUM, np.add), (dist.ReduceOp.MAX, np.maximum)):
            source = of_rank(rank, kind, 4 * size)
            before = source.clone()
            wanted = reduced(function, size, kind, 4 * size)[4 * rank : 4 * rank + 4]
            part = torch.empty(4, dtype=kind)
            wait(group.reduce_scatter_tensor(part, source, op, async_op=later))
            assert torch.equal(part, wanted) and torch.equal(source, before)
            part.zero_()
            wait(group.reduce_scatter(part, list(source.split(4)), op, async_op=later))
            assert torch.equal(part, wanted)


def test_coalesced(group, rank, size):
    tensors = [torch.full((3,), float(rank)), torch.ones(2, 2)]
    with dist._coalescing_manager():
        for each in tensors:
            dist.all_reduce(each)
    assert (tensors[0] == sum(range(size))).all() and (tensors[1] == size).all()
    parts = [torch.full((2,), float(rank)), torch.full((3,), float(-rank))]
    wholes = [torch.empty(2 * size), torch.empty(3 * size)]
    with dist._coalescing_manager(async_ops=True) as manager:
        for whole, part in zip(wholes, parts, strict=True):
            dist.all_gather_into_tensor(whole, part)
    manager.wait()
    assert torch.equal(wholes[0], torch.arange(float(size)).repeat_interleave(2))
    assert torch.equal(wholes[1], -torch.arange(float(size)).repeat_interleave(3))


def test_groups(group, rank, size):
    pair = dist.new_group([size - 1, 0], sort_ranks=False)
    alone = dist.new_group([1])
    if rank in (0, size - 1):
        tensor = torch.tensor([float(rank)])
        dist.all_reduce(tensor, group=pair)
        assert tensor == size - 1
        assert dist.get_group_rank(pair, size - 1) == 0 and dist.get_world_size(pair) == 2
    if rank == 1:
        tensor = torch.ones(3)
        dist.all_reduce(tensor, group=alone)
        assert (tensor == 1).all()
    half = group.group.WORLD.split_group([0, 1])
    assert (half is None) == (rank > 1)
    if half is not None:
        tensor = torch.ones(2)
        dist.all_reduce(tensor, group=half) if half in dist.distributed_c10d._world.pg_map else half.allreduce(
            [tensor]
        ).wait()
        assert (tensor == 2).all()


def test_distributed_tensors(group, rank, size):
    """Functional collectives reach the group from PyTorch's C++."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (size,))
    values = torch.arange(float(4 * size * 3)).view(4 * size, 3)
    cut = distribute_tensor(values, mesh, [Shard(0)])
    assert cut.to_local().shape == (4, 3)
    assert torch.equal(cut.full_tensor(), values)
    assert torch.equal((cut.t() @ cut).redistribute(mesh, [Replicate()]).to_local(), values.t() @ values)
    assert torch.equal(cut.redistribute(mesh, [Shard(1)]).full_tensor(), values)


@pytest.mark.parametrize("everyone", [False, True])
def test_after_a_barrier_that_has_failed_comes_one_that_does_not(group, rank, world, everyone):
    """Rank 1 comes when rank 0 has given up: it is told so at once, and the next barrier is not disturbed."""
    for _ in range(2):
        if rank == 1:
            world.Barrier()
        begun = time.monotonic()
        with pytest.raises(RuntimeError, match="Rank 1 failed to pass" if rank == 0 else "found ranks missing"):
            dist.monitored_barrier(timeout=timedelta(seconds=0.05), wait_all_ranks=everyone)
        if rank == 1:
            assert time.monotonic() - begun < monitored.GRACE
        else:
            world.Barrier()
        dist.monitored_barrier(timeout=timedelta(seconds=20))


def test_a_barrier_to_which_rank_0_does_not_come(group, rank, world, monkeypatch):
    """It gives what it answers too late; the next barrier takes that for no answer."""
    monkeypatch.setattr(monitored, "GRACE", 0.0)
    if rank == 0:
        world.Barrier()
        dist.monitored_barrier(timeout=timedelta(seconds=20))  # all have been there
    else:
        with pytest.raises(RuntimeError, match="rank 0 has not answered"):
            dist.monitored_barrier(timeout=timedelta(seconds=0.05))
        world.Barrier()
    monkeypatch.setattr(monitored, "GRACE", 20.0)
    with pytest.raises(RuntimeError, match="Rank 1 failed to pass" if rank == 0 else "found ranks missing"):
        if rank == 1:
            world.Barrier()
        try:
            dist.monitored_barrier(timeout=timedelta(seconds=0.05))
        finally:
            if rank != 1:
                world.Barrier()


@pytest.mark.parametrize("sparse", [torch.Tensor.to_sparse, torch.Tensor.to_sparse_csr])
@pytest.mark.parametrize("later", [False, True])
def test_a_tensor_that_is_not_dense_is_refused(group, sparse, later):
    tensor = sparse(torch.eye(3))
    for call in (group.all_reduce, lambda *_, **later: group.broadcast(tensor, 0, **later)):
        with pytest.raises(UsageError, match=r"dense tensors, and this one has layout sparse_c\w\w; call to_dense\(\)"):
            call(tensor, async_op=later)


def test_sparse_gradients_under_ddp_are_refused(group):
    model = nn.parallel.DistributedDataParallel(nn.Embedding(10, 3, sparse=True))
    with pytest.raises((UsageError, RuntimeError), match="Embedding without sparse=True"):
        model(torch.tensor([1])).sum().backward()


@pytest.mark.filterwarnings("ignore:ComplexHalf")
def test_what_does_not_fit_is_said(group, rank, size):
    with pytest.raises(ValueError, match=f"rank {rank}"):
        dist.all_gather_into_tensor(torch.empty(2), torch.empty(2))
    with pytest.raises(ValueError, match="sizes"):
        dist.all_to_all_single(torch.empty(size, 2), torch.ones(size, 2), [1] * size, [2] * size)
    for kind in (torch.float8_e4m3fn, torch.complex32):
        with pytest.raises(ValueError, match=f"tensors of {kind} cannot be reduced"):
            dist.reduce(torch.zeros(2, dtype=kind), 0)
    for op in (dist.ReduceOp.MAX, dist.ReduceOp.MIN):
        with pytest.raises(ValueError, match=r"numbers that have an order, not for torch\.complex64"):
            dist.reduce(torch.zeros(2, dtype=torch.complex64), 0, op)
    for kind in (torch.float32, torch.bfloat16):
        for call in (dist.broadcast, dist.reduce, lambda tensor, root: dist.gather(tensor, None, root)):
            with pytest.raises(UsageError, match=rf"there is no rank {size} in a group of {size}"):
                call(torch.zeros(2, dtype=kind), size)
    uneven = [torch.zeros(2 + (other != rank)) for other in range(size)]
    said = f"rank {rank}: the tensor for rank {(rank == 0) * 1} is of 3 elements of torch.float32, and should be of 2"
    with pytest.raises(ValueError, match=said):
        dist.scatter(torch.zeros(2), uneven, rank)
    with pytest.raises(ValueError, match=said):
        dist.gather(torch.zeros(2), uneven, rank)
    with pytest.raises(UsageError, match=f"rank {rank} expects .* from rank .*, which has sent 4 bytes"):
        dist.all_to_all_single(torch.zeros(2 * size - 1), torch.zeros(size), [1 + (i != rank) for i in range(size)])


@pytest.mark.filterwarnings("ignore:ComplexHalf")
@pytest.mark.parametrize("later", [False, True])
def test_ranks_with_tensors_of_different_types_are_told_though_the_same_travels(group, rank, size, world, later):
    comm = Communicator(world, "ring", check=True)
    checked, last = BackendGroup(comm, "checked", dist.group.WORLD.store, timedelta(seconds=60)), size - 1

    def handed_on(kind):
        mine, every = torch.ones(2).to(kind), torch.ones(2 * size).to(kind)
        parts = list(every.split(2))
        yield "broadcast", [mine]
        yield "all_gather_single", every, mine
        yield "allgather", [parts], [mine]
        yield "gather", [parts] if rank == 0 else [], [mine]
        yield "scatter", [mine], [parts] if rank == 0 else []
        yield "alltoall", parts, list(every.clone().split(2))
        yield "all_to_all_single", every, every.clone(), [], []

    def combined(kind):
        mine, every = torch.ones(2).to(kind), torch.ones(2 * size).to(kind)
        yield "allreduce", [mine]
        yield "reduce", [mine]
        yield "reduce_scatter", [mine], [list(every.split(2))]
        yield "reduce_scatter_single", mine, every

    def refused(op, words, name, *arguments):
        opts = SimpleNamespace(asyncOp=later, rootRank=0, reduceOp=dist.ReduceOp(op))
        with pytest.raises(AgreedError, match=words):
            getattr(checked, name)(*arguments, opts).wait()
        tags = world.allgather(number(comm._latest_call))  # without the check, their messages do not meet
        assert len({*tags[:last]}) == 1 and tags[last] != tags[0]

    pairs = [(torch.float16, torch.bfloat16), (torch.uint16, torch.float16)]
    unlike = [(torch.float8_e4m3fn, torch.float8_e5m2), (torch.uint8, torch.float8_e5m2)]
    unlike += [(torch.complex32, torch.int32)]
    for calls, kinds in ((handed_on, pairs + unlike), (combined, pairs[:1])):
        for most, other in kinds:
            first, second = (str(each).removeprefix("torch.") for each in (most, other))
            for call in calls(other if rank == last else most):
                refused(dist.ReduceOp.SUM, rf"\(ranks? 0.* {first}\b.*; rank {last}: \S* of \d+ {second}\b", *call)
    for call in combined(torch.bfloat16):
        op = dist.ReduceOp.AVG if rank == last else dist.ReduceOp.SUM
        refused(op, rf"\(sum\).*; rank {last}: .* \(mean\)", *call)
    with pytest.raises(ValueError, match="float16"):
        dist.reduce_scatter_tensor(torch.ones(1).half(), torch.ones(size).bfloat16())
    comm.free()


@pytest.mark.parametrize("later", [False, True])
def test_the_lines_that_are_told_are_the_programs(group, rank, size, world, later, monkeypatch):
    """And not PyTorch's, which lie between."""
    checking = CollectiveChecker(world)
    monkeypatch.setattr(group.group.WORLD.comm, "checker", checking)
    said = rf"\(call number \d+ of .*, called from {format_ranks(range(size))}: test_backend\.py:\d+ in test_the_lines"
    mine = torch.ones(2 + (rank == 0))
    with pytest.raises(AgreedError, match=said):
        wait(dist.all_reduce(mine, async_op=later))
    with pytest.raises(AgreedError, match=said):
        wait(dist.all_gather_into_tensor(mine.repeat(size), mine, async_op=later))  # PyTorch has it wrapped
    checking.comm.Free()


@pytest.mark.parametrize("sent, kind", [(3, torch.float32), (9, torch.float32), (3, torch.float64), (6, torch.float16)])
@pytest.mark.parametrize("way", ["at once", "after others", "in time"])
def test_a_message_of_another_length_or_type_is_refused(group, rank, sent, kind, way):
    if rank == 0:
        dist.send(torch.ones(sent, dtype=kind), 1)
        dist.barrier()
    elif rank == 1:
        coming = dist.irecv(torch.zeros(6), 0)
        if way == "after others":
            dist.barrier()  # which takes it forward
        name = str(kind).removeprefix("torch.")
        with pytest.raises(UsageError, match=f"rank 1 expects 6 float32, and rank 0 has sent {sent} {name}"):
            coming.wait(*[timedelta(seconds=20)] * (way == "in time"))
        if way != "after others":
            dist.barrier()
    else:
        dist.barrier()


def test_messages_of_tensors_wherever_they_lie(group, rank, size):
    left, right = (rank - 1) % size, (rank + 1) % size
    tensors = torch.arange(6.0), torch.arange(12.0).view(3, 4).t(), torch.zeros(0), torch.arange(5).bfloat16()
    for tensor in tensors:
        for place in (torch.empty_like, askew):
            sent, received = place(tensor).copy_(tensor + rank), place(tensor).fill_(7)
            work = dist.isend(sent, right)
            assert dist.recv(received, left) == left
            work.wait()
            assert torch.equal(received, tensor + left)


def test_collectives_of_tensors_at_odd_addresses(group, rank, size):
    """Also those that are no operation of the communicator's, which would copy such an array itself."""
    ranks = torch.arange(1.0, size + 1)
    sent, received = askew(ranks).copy_(ranks * (rank + 1)), askew(ranks)
    dist.all_to_all_single(received, sent)
    assert torch.equal(received, ranks * (rank + 1))
    for op, wanted in ((dist.ReduceOp.PRODUCT, ranks.prod()), (dist.ReduceOp.SUM, ranks.sum())):
        dist.all_reduce(received.fill_(rank + 1), op)
        assert (received == wanted).all()
    dist.all_gather_into_tensor(received, askew(ranks[:1]).fill_(rank))
    assert torch.equal(received, ranks - 1)


def askew(tensor):
    """A tensor of the same shape and type at an odd address, with values of no meaning."""
    memory = bytearray(tensor.nbytes + tensor.itemsize + 1)
    found = torch.frombuffer(memory, dtype=tensor.dtype, offset=1)[: tensor.numel()].view(tensor.shape)
    assert found.data_ptr() % found.itemsize or not found.numel()
    return found


def net(kind=torch.float64):
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(7, 12), nn.Tanh(), nn.Linear(12, 12), nn.Tanh(), nn.Linear(12, 3)).to(kind)


def losses(model, rank, steps=5, kind=torch.float64, rule=torch.optim.SGD):
    optimizer, random = rule(model.parameters(), lr=0.1), np.random.default_rng(rank)
    found = []
    for _ in range(steps):
        x = torch.from_numpy(random.standard_normal((4, 7))).to(kind)
        optimizer.zero_grad()
        loss = model(x).square().sum()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


@pytest.mark.parametrize("options", [{"bucket_cap_mb": 0.0005}, {"find_unused_parameters": True}])
def test_ddp_is_gloos(group, gloo, rank, options):
    ddp = nn.parallel.DistributedDataParallel
    ours, theirs = net(), net()
    mine = losses(ddp(ours, **options), rank)
    assert mine == pytest.approx(losses(ddp(theirs, process_group=gloo, **options), rank), rel=1e-13)
    for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-15)


def test_ddp_reduces_buckets_while_the_backward_pass_goes_on(group, rank):
    """The all-reduce of the last layer begins before the gradient of the first is there."""
    from hpcdl.torch import backend

    began, model = [], net()
    wrapped = nn.parallel.DistributedDataParallel(model, bucket_cap_mb=0.0001)
    losses(wrapped, rank, steps=2)
    before = backend.engine.start

    def start(*arguments):
        began.append("all_reduce")
        return before(*arguments)

    handle = model[0].weight.register_hook(lambda _: began.append("first layer"))
    backend.engine.start = start
    try:
        losses(wrapped, rank, steps=1)
    finally:
        backend.engine.start = before
        handle.remove()
    assert began.index("first layer") > 0 and began.count("all_reduce") > 1


def test_fsdp_is_gloos(group, rank, size):
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard

    theirs = dist.new_group(backend="gloo")
    found = []
    for pg in (dist.group.WORLD, theirs):
        model = net()
        mesh = DeviceMesh.from_group(pg, "cpu")
        for layer in (model[0], model[2]):
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        found.append(losses(model, rank))
    assert found[0] == pytest.approx(found[1], rel=1e-13)


def test_the_zero_redundancy_optimizer(group, rank):
    from torch.distributed.optim import ZeroRedundancyOptimizer

    ddp = nn.parallel.DistributedDataParallel

    def cut(parameters, lr):
        return ZeroRedundancyOptimizer(parameters, torch.optim.Adam, lr=lr)

    assert losses(ddp(net()), rank, rule=cut) == pytest.approx(losses(ddp(net()), rank, rule=torch.optim.Adam))


def test_distributed_checkpoints(group, rank, size, mpi_tmp_path):
    from torch.distributed import checkpoint
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh, values = init_device_mesh("cpu", (size,)), torch.arange(40.0).view(20, 2)
    state = {"w": distribute_tensor(values, mesh, [Shard(0)]), "step": 3}
    checkpoint.save(state, checkpoint_id=mpi_tmp_path / "saved")
    again = {"w": distribute_tensor(torch.zeros(20, 2), mesh, [Shard(0)]), "step": 0}
    checkpoint.load(again, checkpoint_id=mpi_tmp_path / "saved")
    assert torch.equal(again["w"].full_tensor(), values) and again["step"] == 3


def test_pipelining(group, rank, size):
    """A stage on each rank; the loss and the gradients are those of the whole model."""
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

    torch.manual_seed(3)
    layers = [nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(size)]
    x, y = torch.randn(8, 6), torch.randn(8, 6)
    whole = nn.Sequential(*[copy.deepcopy(each) for each in layers])
    wanted = torch.stack([nn.functional.mse_loss(whole(a), b) for a, b in zip(x.chunk(4), y.chunk(4), strict=True)])
    wanted.mean().backward()
    stage = PipelineStage(layers[rank], rank, size, torch.device("cpu"))
    schedule = ScheduleGPipe(stage, 4, loss_fn=nn.functional.mse_loss)
    found = []
    if rank == 0:
        schedule.step(x)
    else:
        schedule.step(target=y, losses=found) if rank == size - 1 else schedule.step()
    if rank == size - 1:
        assert torch.allclose(torch.stack(found), wanted)
    for one, other in zip(layers[rank].parameters(), whole[rank].parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)
