"""The primitives between two ranks, groups, and the refusals."""

import time

import numpy as np
import pytest
from mpi4py import MPI

from hpcdl.comm import Communicator
from hpcdl.comm.progress import activity
from hpcdl.errors import UsageError


@pytest.fixture
def comm(world):
    made = Communicator(world)
    yield made
    made.free()


@pytest.mark.mpi(min_size=2)
def test_wait_for_anyone_tells_who_and_how_much(comm):
    if comm.rank == 0:
        box, seen = np.zeros(comm.size), {}
        for _ in range(comm.size - 1):
            source, size = comm.wait(box, tag=3)
            seen[source] = size
            assert (box[:size] == source).all()
        assert seen == {rank: rank for rank in range(1, comm.size)}
    else:
        comm.push(np.full(comm.rank, float(comm.rank)), 0, tag=3)


def test_pull_and_push_while_the_owner_never_enters_mpi(world):
    comm = Communicator(world)
    exposed = comm.expose(np.zeros(5 + comm.size))
    mine = exposed.array
    mine[:5] = 100 * comm.rank + np.arange(5)
    comm.barrier()
    if comm.rank == 0:
        deadline = time.monotonic() + 30
        while (mine[5 + 1 : 5 + comm.size] == 0).any():  # computes, and calls nothing of MPI
            assert time.monotonic() < deadline, "a pull did not complete while the owner computed"
    else:
        box = np.zeros(3)
        comm.pull(box, 0, exposed, at=2)
        assert np.array_equal(box, [2, 3, 4])
        comm.push(np.array([7.0]), 0, into=exposed, at=5 + comm.rank)
    comm.barrier()
    if comm.rank == 0:
        assert (mine[6:] == 7).all()


def test_pushes_that_add(comm):
    exposed = comm.expose(np.zeros(4, "int64"))
    for _ in range(10):
        comm.push(np.arange(4), 0, into=exposed, op="sum")
    comm.barrier()
    if comm.rank == 0:
        assert np.array_equal(exposed.array, 10 * comm.size * np.arange(4))


def test_exposed_arrays_of_other_lengths_and_of_none(comm):
    exposed = comm.expose(np.arange(float(comm.rank)))
    last = comm.size - 1
    box = np.zeros(last)
    comm.pull(box, last, exposed)
    assert np.array_equal(box, np.arange(float(last)))
    with pytest.raises(UsageError, match="outside"):
        comm.pull(np.zeros(last + 1), last, exposed)
    with pytest.raises(UsageError, match="holds float64, and the passed array float32"):
        comm.pull(np.zeros(last, "float32"), last, exposed)
    with pytest.raises(UsageError, match="outside"):
        comm.push(np.zeros(last + 1), last, into=exposed)
    with pytest.raises(UsageError, match="outside"):
        comm.push(np.zeros(1), last, 0, exposed, -1)
    comm.barrier()


def test_more_operations_than_there_are_lanes(comm):
    for count in range(1100):
        array = np.array([count])
        comm.all_reduce(array)
        assert array[0] == count * comm.size


def test_blocked_seconds_are_those_spent_waiting_for_others(comm):
    comm.all_reduce(np.zeros(10))  # the first message to a rank may take its sender long: that is no waiting
    late, counted = comm.rank == comm.size - 1, comm.traffic["all_reduce"]
    before = counted.blocked_seconds
    time.sleep(0.8 if late else 0)
    comm.all_reduce(np.zeros(10))
    assert late or counted.blocked_seconds > before + 0.1
    assert activity.operation is None and activity.in_flight == []


def test_groups_inherit_algorithm_and_counts(world):
    comm = Communicator(world, allreduce="naive")
    group = comm.split(comm.rank % 2, name="parity")
    array = np.array([1.0])
    group.all_reduce(array)
    assert array[0] == group.size == len(range(comm.rank % 2, comm.size, 2))
    assert group.allreduce == "naive"
    assert group.traffic is comm.traffic
    nobody = comm.split(None if comm.rank else 0)
    assert (nobody is None) == (comm.rank > 0)
    reversed_order = comm.split(0, key=-comm.rank)
    assert reversed_order.rank == comm.size - 1 - comm.rank
    apart = comm.duplicate("apart")
    before = comm.traffic.bytes
    apart.all_reduce(array)
    assert comm.traffic.bytes == before
    assert apart.size == 1 or apart.traffic.bytes > 0


def test_empty_is_aligned(comm):
    for n in (1, 7, 1000):
        array = comm.empty(n, "float64")
        assert array.size == n and array.dtype == "float64" and array.ctypes.data % 64 == 0
    assert comm.empty(0).size == 0
    assert comm.empty(like=np.zeros(3, "float32")).dtype == "float32"


def test_a_read_only_array_is_read_and_not_written_to(comm, call):
    locked, exposed = np.full(4, 1.0 + comm.rank), comm.expose(np.zeros(4))
    locked.flags.writeable = False
    for name in ("all_reduce", "reduce_scatter", "all_gather", "wait"):
        with pytest.raises(UsageError, match=r"the array is read-only, .*; pass array\.copy\(\)"):
            call(comm, name, locked)
    with pytest.raises(UsageError, match="the array is read-only"):
        call(comm, "pull", locked, 0, exposed)
    with pytest.raises(UsageError, match="the array is read-only"):
        call(comm, "reduce", locked, comm.rank)
    if comm.size > 1:
        with pytest.raises(UsageError, match="the array is read-only"):
            call(comm, "broadcast", locked, (comm.rank + 1) % comm.size)
    comm.barrier()
    received = np.zeros(4)
    request = comm.iwait(received, (comm.rank - 1) % comm.size)
    call(comm, "push", locked, (comm.rank + 1) % comm.size)
    request.wait()
    assert (received == 1 + (comm.rank - 1) % comm.size).all()
    call(comm, "broadcast", locked if comm.rank == 0 else received)
    assert comm.rank == 0 or (received == 1).all()
    received[:] = locked
    call(comm, "reduce", received if comm.rank == 0 else locked)
    assert comm.rank or (received == comm.size * (comm.size + 1) / 2).all()


def test_a_message_that_does_not_fit_is_refused(comm, call):
    left, right = (comm.rank - 1) % comm.size, (comm.rank + 1) % comm.size
    said = {
        (3, "f8"): f"rank {comm.rank}: a message of rank {left} is longer than the receiving array of 3 float64",
        (3, "f4"): f"rank {comm.rank}: a message of rank {left} is longer than the receiving array of 3 float32",
        (9, "f8"): f"rank {comm.rank}: the message of rank {left} has 20 bytes, not a whole number of float64",
    }
    for (length, kind), words in said.items():
        request = comm.ipush(np.ones(5, "f4" if kind == "f8" and length == 9 else "f8"), right)
        with pytest.raises(UsageError, match=words):
            call(comm, "wait", np.zeros(length, kind), left)
        request.wait()
    request = comm.ipush(np.ones(2), right)
    assert comm.wait(np.zeros(5), left) == (left, 2)  # a shorter one is told
    request.wait()


def test_messages_that_say_what_they_are(comm):
    left, right = (comm.rank - 1) % comm.size, (comm.rank + 1) % comm.size
    for sent, kind, fits in [(6, "float32", True), (3, "float32", False), (9, "float32", False), (3, "float64", False)]:
        values = np.arange(sent, dtype=kind)
        request, received = comm.ipush_labelled(values, kind, right, 3), np.zeros(6, "float32")
        coming = comm.iwait_labelled(received, "float32", left, 3)
        if fits:
            assert coming.wait() == (left, sent) and np.array_equal(received, values)
        else:
            with pytest.raises(UsageError, match=f"expects 6 float32, and rank {left} has sent {sent} {kind}"):
                coming.wait()
        request.wait()
    empty = comm.ipush_labelled(np.zeros(0), "float64", right)
    assert comm.iwait_labelled(np.zeros(0), "float64", left).wait() == (left, 0)
    empty.wait()


@pytest.mark.parametrize("name", ["ring", "shared", "mpi"])
def test_free_completes_what_is_in_flight(name, world):
    comm = Communicator(world, allreduce=name)
    vectors = [np.full(length, 1.0) for length in (5, 100_000)]
    requests = [comm.iall_reduce(vector) for vector in vectors]
    comm.free()
    assert all(request.done for request in requests)
    for request, vector in zip(requests, vectors, strict=True):
        request.wait()
        assert (vector == world.size).all()


def test_free_gives_back_the_memory_of_an_algorithm_that_was_in_use(world):
    comm = Communicator(world, allreduce="shared")
    memory = comm.node_memory
    vector = np.ones(1000)
    request = comm.iall_reduce(vector)
    comm.use("ring")
    request.wait()
    assert (vector == world.size).all()
    assert (comm.traffic["all_reduce"].bytes > 0) == (world.size > 1)
    comm.free()
    assert not memory.comm


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("call", ["empty", "split", "duplicate", "expose"])
@pytest.mark.parametrize("name", ["ring", "shared", "auto"])
def test_calls_of_all_ranks_take_forward_what_is_in_flight(name, call, world):
    """Rank 0 calls first and then waits for its all-reduce, which the others need before they call."""
    comm = Communicator(world, allreduce=name)
    calls = {
        "empty": lambda: comm.empty(1000),
        "split": lambda: comm.split(0),
        "duplicate": lambda: comm.duplicate("twin"),
        "expose": lambda: comm.expose(np.zeros(3)),
    }
    vector = np.full(1_000_000, 1.0)
    request = comm.iall_reduce(vector)
    if comm.rank == 0:
        made = calls[call]()
        request.wait()
    else:
        request.wait()
        made = calls[call]()
    assert (vector == comm.size).all()
    if isinstance(made, Communicator):
        made.free()


def test_what_was_derived_is_given_back_with_it(bare):
    comm = Communicator(bare)
    half, own = comm.split(comm.rank % 2), comm.duplicate("own")
    inner, freed = half.duplicate("inner"), comm.duplicate("freed")
    freed.free()
    comm.free()
    assert all(each.mpi == MPI.COMM_NULL for each in (comm, half, own, inner, freed))
    half.free()
    comm.free()  # nothing is left to give back
