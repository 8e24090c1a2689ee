"""Arrays on a GPU take part in every operation as the same arrays on the host do, and travel the same bytes."""

import itertools
from types import SimpleNamespace

import numpy as np
import pytest
from mpi4py import MPI

from hpcdl.chunks import chunk
from hpcdl.comm import Communicator, staging
from hpcdl.comm.allreduce import ALGORITHMS
from hpcdl.comm.compression import compressed
from hpcdl.errors import UsageError
from hpcdl.kernels.device import CPU, device_of, on_device

LENGTHS = [0, 1, 5, 1000]


def values(rank, n, dtype=np.float64):
    return np.random.default_rng(rank).integers(-9, 9, n).astype(dtype)


def both(gpu, bare, *operations, **options):
    """What each `operate(comm, array, device)` leaves in the array and returns, on the host and the GPU; the bytes."""
    found = []
    for device in (CPU, gpu):
        comm = Communicator(bare, device=device, **options)
        for n, operate in itertools.product(LENGTHS, operations):
            array = device.array(values(comm.rank, n))
            result = operate(comm, array, device)
            assert device.holds(array)
            if result is not None and not isinstance(result, tuple):
                assert device.holds(result)
                result = device.host(result)
            found.append((device.host(array), result))
        found.append({name: (each.calls, each.bytes, each.messages) for name, each in comm.traffic.items()})
        comm.free()
    half = len(found) // 2
    assert half == 1 + len(LENGTHS) * len(operations)
    for (mine, result), (wanted, reference) in zip(found[half:-1], found[: half - 1], strict=True):
        assert np.array_equal(mine, wanted) and np.array_equal(result, reference)
    assert found[-1] == found[half - 1]


@pytest.mark.parametrize("name", sorted(ALGORITHMS))
@pytest.mark.in_turn("call")
def test_all_reduce(name, call, gpu, each_group):
    operations = [lambda comm, array, _, op=op: call(comm, "all_reduce", array, op) for op in ("sum", "mean", "max")]
    each_group(lambda bare: both(gpu, bare, *operations, allreduce=name))


def test_the_other_collectives(call, gpu, each_group):
    calls = ("broadcast",), ("reduce", 0, "max"), ("reduce_scatter",), ("all_gather",)
    operations = [lambda comm, array, _, name=name, more=more: call(comm, name, array, *more) for name, *more in calls]
    each_group(lambda bare: both(gpu, bare, *operations))


@pytest.mark.parametrize("aware", [False, True])
def test_compressed(aware, gpu, each_group, monkeypatch):
    """Always staged: what is rounded away stays on the host."""
    monkeypatch.setattr(staging, "is_cuda_aware", lambda: aware)

    def reduce(comm, array, device):
        state = compressed("bfloat16", array.size, array.dtype)
        for _ in range(3):
            comm.all_reduce_compressed(array, state)

    each_group(lambda bare: both(gpu, bare, reduce, allreduce="mpi"))


def test_a_result_is_the_part_of_the_array_itself(gpu, world):
    comm = Communicator(world, device=gpu)
    array = gpu.array(values(0, 10))
    own = comm.reduce_scatter(array)
    own.fill(77)
    assert (gpu.host(array) == 77).sum() == own.size


def test_push_and_wait_around_a_ring(gpu, each_group):
    def around(comm, array, device):
        into = device.array(values(9, array.size + 2))  # longer than what comes: the rest stays
        sent = comm.ipush(array, (comm.rank + 1) % comm.size, tag=3)
        arrival = comm.wait(into, (comm.rank - 1) % comm.size, tag=3)
        sent.wait()
        assert arrival.size == array.size
        assert np.array_equal(device.host(into)[array.size :], values(9, array.size + 2)[array.size :])
        device.copy_in(array, device.host(into)[: array.size].copy())

    each_group(lambda bare: both(gpu, bare, around))


def test_push_into_and_pull_from_what_is_exposed(gpu, each_group):
    def exchange(comm, array, device):
        exposed, right = comm.expose(array), (comm.rank + 1) % comm.size
        comm.barrier()
        comm.push(array, right, into=exposed, op="sum")
        comm.barrier()
        comm.pull(array, right, exposed)
        comm.barrier()

    each_group(lambda bare: both(gpu, bare, exchange))


def test_empty_is_on_the_device_or_where_its_pattern_is(gpu, world):
    comm = Communicator(world, device=gpu)
    assert gpu.holds(comm.empty(3)) and gpu.holds(comm.duplicate("run").empty(3))
    assert CPU.holds(comm.empty(like=np.zeros(3))) and CPU.holds(Communicator(world).empty(3))
    made = comm.empty(like=gpu.zeros(5, np.float64))
    assert on_device(made) and device_of(made) is gpu and (made.size, made.dtype) == (5, np.float64)


def test_what_is_not_contiguous_is_refused(gpu, world):
    comm = Communicator(world, device=gpu)
    with pytest.raises(UsageError, match="not contiguous"):
        comm.all_reduce(gpu.zeros((4, 4), "f4")[:, :2])


def askew(array):
    """The array at an odd address."""
    memory = np.frombuffer(bytearray(array.nbytes + 1), array.dtype, array.size, offset=1)
    assert not memory.flags.aligned
    memory[:] = array
    return memory


@pytest.mark.parametrize("name", ALGORITHMS)
def test_arrays_at_odd_addresses(name, call, world):
    comm = Communicator(world, name)
    everyone = [values(rank, 9) for rank in range(comm.size)]
    mine, wanted = everyone[comm.rank], sum(everyone)
    array = askew(mine)
    call(comm, "all_reduce", array)
    assert np.array_equal(array, wanted)
    if name != "ring":
        return  # the others are of no all-reduce algorithm
    array = askew(mine)
    call(comm, "reduce", array, comm.size - 1)
    assert np.array_equal(array, wanted if comm.rank == comm.size - 1 else mine)
    call(comm, "broadcast", array, comm.size - 1)
    assert np.array_equal(array, wanted)
    array = askew(mine)
    part = call(comm, "reduce_scatter", array)
    assert np.array_equal(part, wanted[chunk(9, comm.size, comm.rank)]) and np.shares_memory(part, array)
    call(comm, "all_gather", array)
    assert np.array_equal(array, wanted)
    left, right = (comm.rank - 1) % comm.size, (comm.rank + 1) % comm.size
    request, array = comm.ipush(askew(mine), right), askew(np.zeros(9, mine.dtype))
    assert call(comm, "wait", array, left) == (left, 9) and np.array_equal(array, everyone[left])
    request.wait()
    exposed = comm.expose(askew(mine))
    call(comm, "pull", array, right, exposed)
    assert np.array_equal(array, everyone[right])
    array.flags.writeable = False
    with pytest.raises(UsageError, match="read-only"):
        call(comm, "all_reduce", array)


def test_on_one_rank_nothing_is_copied(gpu):
    comm = Communicator(MPI.COMM_SELF, device=gpu)
    array, before = gpu.array(values(0, 9)), dict(gpu.xp.counts)
    comm.all_reduce(array)
    comm.broadcast(array)
    assert gpu.xp.counts == before and comm.traffic["all_reduce"].calls == 1
    assert np.array_equal(gpu.host(array), values(0, 9))


def test_two_copies_and_pinned_memory_are_all_it_takes(gpu, world):
    if world.size == 1:
        pytest.skip("needs a message")
    comm = Communicator(world, device=gpu)
    array, before = gpu.array(values(0, 9)), dict(gpu.xp.counts)
    comm.all_reduce(array)
    for name in ("pinned", "to host", "from host"):
        assert gpu.xp.counts[name] - before[name] == 1


def test_several_at_once(gpu, world):
    comm = Communicator(world, device=gpu)
    arrays = [gpu.array(values(comm.rank + k, 50 * k)) for k in range(4)]
    requests = [comm.iall_reduce(array) for array in arrays]
    for k in (2, 0, 3, 1):
        requests[k].wait()
        wanted = sum(values(rank + k, 50 * k) for rank in range(comm.size))
        assert np.array_equal(gpu.host(arrays[k]), wanted)


def test_direct(call, gpu, bare, monkeypatch):
    """The library that says that it can is handed the GPU's array itself, by the algorithm that only hands it on."""
    monkeypatch.setattr(staging, "is_cuda_aware", lambda: True)
    for name, staged in (("mpi", 0), ("ring", 1)):
        comm = Communicator(bare, name, device=gpu)
        assert comm.direct and comm.duplicate("run").direct
        assert comm.exchange == ("staged" if staged else "direct")
        array = gpu.array(values(comm.rank, 100))
        before = gpu.xp.counts["to host"]
        call(comm, "all_reduce", array)
        assert gpu.xp.counts["to host"] - before == (staged if comm.size > 1 else 0)
        assert np.array_equal(gpu.host(array), sum(values(rank, 100) for rank in range(comm.size)))
        assert comm.traffic["all_reduce"].bytes == 800 or name == "ring"
        array = askew(values(comm.rank, 100))  # one of the host, which is staged where the GPU's are not
        comm.all_reduce(array)
        assert np.array_equal(array, sum(values(rank, 100) for rank in range(comm.size)))


def test_a_library_that_does_not_say_so_is_never_handed_one(gpu, world, monkeypatch):
    monkeypatch.setattr(staging, "self_test", lambda *_: pytest.fail("it was"))
    monkeypatch.setattr(staging, "is_cuda_aware", lambda: world.rank < world.size - 1)  # one rank's does not
    assert not Communicator(world, "mpi", device=gpu).direct
    monkeypatch.setattr(staging, "is_cuda_aware", lambda: pytest.fail("asked without a GPU"))
    assert not Communicator(world, "mpi").direct


@pytest.mark.parametrize("wrong", ["Allreduce", "Sendrecv", "error"])
def test_a_library_that_is_wrong_on_one_rank_is_handed_none(wrong, gpu, world, monkeypatch):
    monkeypatch.setattr(staging, "is_cuda_aware", lambda: True)
    bad = world.rank == world.size - 1

    class Wrong(MPI.Intracomm):
        def Allreduce(self, sendbuf, recvbuf):
            super().Allreduce(sendbuf, recvbuf)
            if bad and wrong == "error":
                raise MPI.Exception(MPI.ERR_BUFFER)
            if bad and wrong == "Allreduce":
                recvbuf[3:4] = -1

        def Sendrecv(self, *arguments):
            super().Sendrecv(*arguments)
            if bad and wrong == "Sendrecv":
                arguments[3][3:4] = -1

    if wrong == "error" and world.size > 1:
        pytest.skip("the others would wait for its message")
    assert staging.supports_device_arrays(world, gpu)
    assert not staging.supports_device_arrays(Wrong(world), gpu)


def test_what_a_library_answers(monkeypatch):
    assert staging.is_cuda_aware() in (False, True)  # this one's; no crash

    def mpich(kind, answer):
        answer._obj.value = kind == 0
        return 0

    for library, aware in [
        (SimpleNamespace(MPIX_Query_cuda_support=lambda: 1), True),
        (SimpleNamespace(MPIX_Query_cuda_support=lambda: 0), False),
        (SimpleNamespace(MPIX_GPU_query_support=mpich), True),
        (SimpleNamespace(MPIX_GPU_query_support=lambda kind, answer: 1), False),
        (SimpleNamespace(), False),
    ]:
        monkeypatch.setattr(staging.ctypes, "CDLL", lambda path, library=library: library)
        assert staging.is_cuda_aware() is aware
