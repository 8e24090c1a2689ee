"""What is counted is what passes, whatever call an algorithm makes."""

import numpy as np
import pytest
from mpi4py import MPI

from hpcdl.comm import Communicator
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


def test_whom_a_message_goes_to_and_how_large_it_is(world):
    """The ranks are those of the communicator that was there first, whatever was derived from it."""
    comm, y = CountingIntracomm(world), np.empty(9, "u1")
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    for size in (0, 1, 2, 3, 4, 5, 8, 9):
        request = comm.Isend(np.zeros(size, "u1"), right)
        comm.Recv(y, left)
        request.Wait()
    assert list(comm.sent) == [right]
    assert comm.sent[right][:7] == [1, 1, 1, 2, 2, 1, 0] and comm.sent[right][-1] == 32
    back = comm.Split(0, -comm.rank)
    again = back.Dup()
    again.Sendrecv(np.zeros(4), again.size - 1 - right, recvbuf=np.empty(4), source=again.size - 1 - left)
    assert list(comm.sent) == [right] and comm.sent[right][6] == 1 and comm.sent[right][-1] == 64
    again.Send(np.zeros(4), MPI.PROC_NULL)
    comm.Allreduce(MPI.IN_PLACE, np.zeros(4))
    comm.Bcast(np.zeros(4))
    assert sum(sum(row[:-1]) for row in comm.sent.values()) == 9  # nobody in particular has got the others
    again.Free()
    back.Free()


def test_what_a_group_sends_goes_to_ranks_of_all(world):
    comm = Communicator(world, "ring")
    group = comm.split(0, key=-comm.rank)  # the last one first
    own, last = comm.duplicate("own"), comm.size - 1 - group.rank
    got, right, left = np.empty(100), (group.rank + 1) % group.size, (group.rank - 1) % group.size
    for _ in range(3):
        request = group.ipush(np.zeros(100), right)
        group.wait(got, left)
        request.wait()
    own.barrier()
    with comm.traffic.uncounted():
        comm.barrier()
        comm.all_reduce(got)
    assert group.sent_to == [[right, 2400, 3]] and comm.sent_to == [[(last - 1) % comm.size, 2400, 3]]
    assert comm.traffic.message_sizes == {"1024": 3} and comm.traffic["all_reduce"].calls == 0
    assert own.traffic.messages == sum(messages for _, _, messages in own.sent_to)


@pytest.mark.parametrize("name", ["ring", "tree", "naive", "direct", "recursive"])
def test_all_that_is_counted_goes_to_somebody(name, bare):
    """Both ways of a call, and whatever else a communicator sends."""
    comm = Communicator(bare, name)
    comm.all_reduce(np.zeros(1000))
    comm.iall_reduce(np.zeros(7)).wait()
    comm.barrier()
    comm.broadcast(np.zeros(3))
    window = comm.expose(np.zeros(4))
    comm.push(np.ones(2), (comm.rank + 1) % comm.size, into=window)
    comm.pull(np.ones(4), 0, of=window)
    sent = comm.sent_to
    assert sum(size for _, size, _ in sent) == comm.traffic.bytes
    assert sum(count for _, _, count in sent) == sum(comm.traffic.message_sizes.values()) == comm.traffic.messages


def test_payload():
    x = np.zeros((3, 2), "float32")
    assert nbytes(x) == nbytes([x, MPI.FLOAT]) == 24
    assert nbytes([x, 5, MPI.FLOAT]) == 20
    assert nbytes(b"abc") == 3
