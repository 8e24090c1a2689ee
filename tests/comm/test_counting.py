"""What is counted is what passes, whatever call an algorithm makes."""

import numpy as np
import pytest
from mpi4py import MPI

from hpcdl.comm.counting import CountingIntracomm, nbytes


def test_every_kind_of_send_is_counted(world):
    comm = CountingIntracomm(world)
    right, left, x = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size, np.arange(4.0)
    y = np.zeros(4)
    for send in (comm.Isend, comm.Issend):
        request = send(x, right)
        comm.Recv(y, left)
        request.Wait()
        assert np.array_equal(x, y)
    comm.Sendrecv(x, right, recvbuf=y, source=left)
    comm.Sendrecv([x, 2, MPI.DOUBLE], right, 5, [y, 2, MPI.DOUBLE], left, 5)
    comm.Sendrecv_replace(y, right, source=left)
    assert (comm.counters.messages, comm.counters.bytes) == (5, 4 * 32 + 16)
    comm.Allreduce(MPI.IN_PLACE, y)
    assert (comm.counters.messages, comm.counters.bytes) == (None, 5 * 32 + 16)


def test_arguments_by_name_and_derived_communicators(world):
    comm = CountingIntracomm(world)
    x, y = np.ones(4), np.zeros(4 * world.size)
    comm.Allreduce(sendbuf=MPI.IN_PLACE, recvbuf=x)
    comm.Bcast(buf=x, root=0)
    comm.Allgather(x, y)
    counts = [4] * world.size
    comm.Allgatherv(x, [y, counts])
    comm.Reduce_scatter(y, x, counts)
    comm.Iallreduce(MPI.IN_PLACE, x).Wait()
    assert comm.counters.bytes == 5 * 32 + y.nbytes
    request = comm.Isendrecv(x, dest=world.rank, recvbuf=y[:4], source=world.rank)
    request.Wait()
    assert comm.counters.bytes == 6 * 32 + y.nbytes
    for derived in (comm.Dup(), comm.Split(0), comm.Split_type(MPI.COMM_TYPE_SHARED)):
        before = comm.counters.bytes
        derived.Sendrecv(x, derived.rank, recvbuf=y[:4], source=derived.rank)
        assert comm.counters.bytes == before + 32
        derived.Free()


@pytest.mark.mpi(min_size=2)
def test_lanes_keep_operations_apart(world):
    first, second = CountingIntracomm(world), CountingIntracomm(world)
    second.lane = 9
    if world.rank == 0:
        first.Send(np.array([1.0]), 1)
        second.Send(np.array([2.0]), 1)
    elif world.rank == 1:
        box = np.zeros(1)
        second.Recv(box, 0)  # names no tag, and yet does not take the message that came first
        assert box[0] == 2
        first.Recv(box, 0)
        assert box[0] == 1


def test_payload():
    x = np.zeros((3, 2), "float32")
    assert nbytes(x) == nbytes([x, MPI.FLOAT]) == 24
    assert nbytes([x, 5, MPI.FLOAT]) == 20
    assert nbytes(b"abc") == 3
