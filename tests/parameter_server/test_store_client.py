"""What a client knows of its servers, and which elements it exchanges with each."""

import numpy as np
from mpi4py import MPI

from hpcdl.comm import Communicator
from hpcdl.parameter_server.clocks import Clocks
from hpcdl.parameter_server.consistency import BSP
from hpcdl.parameter_server.slice_server import SliceServer
from hpcdl.parameter_server.store_client import Asking, Connection, LocalConnection, overlap, within


def test_a_header_that_arrives_before_its_values_changes_nothing():
    """Parameters are as old as what came with them says, not as what has come since."""
    connection = Connection(None, 0, slice(0, 3))
    connection.answer["seen"], connection.answer["version"], connection.answer["apart"] = 4, 5, 0.5
    connection.read()
    connection.answer["seen"], connection.answer["version"], connection.answer["apart"] = 6, 7, 0.75
    assert (connection.seen, connection.version, connection.apart_seconds) == (4, 5, 0.5)


def test_a_signal_is_not_forgotten():
    connection = Connection(None, 0, slice(0, 3))
    for signal, known in ((0, False), (1, True), (0, True)):
        connection.answer["signal"] = signal
        connection.read()
        assert connection.signalled is known


def test_what_is_exchanged_with_each_server():
    """The parts of all servers together are what was asked for; a server that has none of it is asked for nothing."""
    array, slices = np.arange(10), [slice(0, 4), slice(4, 5), slice(5, 10)]
    for start in range(11):
        for stop in range(start, 11):
            parts = [overlap(held, slice(start, stop)) for held in slices]
            assert all(
                held.start <= each.start <= each.stop <= held.stop for held, each in zip(slices, parts, strict=True)
            )
            found = [within(array[start:stop], slice(start, stop), each) for each in parts]
            assert np.concatenate(found).tolist() == list(range(start, stop))


def test_a_server_on_this_rank_is_called_and_calls_back():
    """Nothing travels, and what was pulled does not change with the slice."""
    comm, whole = Communicator(MPI.COMM_SELF, allreduce="ring"), slice(0, 3)

    def update(values, pushed, push):
        values += pushed

    server = SliceServer(comm, np.ones(3), Clocks([0], BSP), update)
    client = Asking(comm, [LocalConnection(comm, server, whole)], np.dtype(float), BSP, server.attend)
    values, pushed = np.empty(3), np.arange(3.0)
    assert client.pull(values, None) == 0
    client.push(pushed, None, count=1, total=1, loss=0, norm=0)
    pushed[:] = 9
    assert values.tolist() == [1, 1, 1]
    assert client.pull(values, None) == 1 and values.tolist() == [1, 2, 3]
    assert client.pull(values[:1], slice(1, 2)) == 1 and values.tolist() == [2, 2, 3]
    client.close(values)
    assert values.tolist() == [1, 2, 3] and not server.clocks.open
    assert comm.traffic.messages == 0
    comm.free()
