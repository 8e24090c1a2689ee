"""A server, a good client and a wrong one: mpiexec -n 3 python tests/faults/wrong_client.py CASE

Rank 0 serves a vector or a data set, rank 1 asks as it should, and so does rank 2 for some steps; then it sends a
message that is drawn from CASE: a wrong number in a header, a wrong length, type or tag, values that do not come, or
some too many. The job has to end with a line that says so, or as if nothing had been, and must not hang."""

import sys

import numpy as np
from mpi4py import MPI

from hpcdl.comm import Communicator
from hpcdl.comm.operations import SUM
from hpcdl.data import open_data
from hpcdl.data_server import data_messages
from hpcdl.data_server.batch_server import introduce, serve
from hpcdl.data_server.remote_data import RemoteData
from hpcdl.errors import UsageError
from hpcdl.parameter_server.consistency import Consistency
from hpcdl.parameter_server.parameter_store import ParameterStore
from hpcdl.parameter_server.sparse_keys import VectorRows
from hpcdl.parameter_server.store_messages import REQUEST, StoreOperation, StoreTag
from hpcdl.parameter_server.store_settings import Serving, StoreLayout
from hpcdl.random import Random

SIZE, STEPS, WRONG = 40, 6, 2
TIMEOUT = 8.0  # a client that has closed, and asks again, waits for a server that is gone: only a timeout ends that
KINDS = Consistency("bsp"), Consistency("ssp", 1), Consistency("async")
ODD = (-1.0, 0.5, 3.0, 41.0, 1e6, 2.0**53, 1e300, float("nan"), float("inf"))
COUNTS = (-1, 7, 41, 99, 10**6, 2**40, 2**62)
TAGS = StoreTag.REQUEST, StoreTag.VALUES, StoreTag.ANSWER, StoreTag.BESIDE, 77


def one(random, values):
    """One of these values."""
    return values[random.integers(len(values))]


def wrong_request(random, store):
    """A request of the store, of which a number is odd, or the length."""
    client, held = store.client, store.client.connections[0]
    operation = one(random, tuple(StoreOperation))
    request = client.request(operation, held)
    if random.integers(3):
        request[one(random, REQUEST.dtype.names)] = one(random, ODD)
    message = REQUEST.vector(request)
    how = random.integers(6)
    if how == 0:
        return message[: random.integers(len(REQUEST.dtype))].copy()
    if how == 1:
        return np.append(message, np.ones(one(random, (1, 1000, 10**6))))
    return message.view("i1") if how == 2 else message


def ask_wrongly(random, store):
    """Send something that no client sends; what it would bring is taken by nobody."""
    what = random.integers(4)
    if what < 2:
        store.comm.ipush(wrong_request(random, store), 0, StoreTag.REQUEST)
        if random.integers(2):
            store.comm.ipush(np.ones(one(random, (SIZE, SIZE + 1, 3, 10**5))), 0, StoreTag.VALUES)
    elif what == 2:  # a push whose values are others
        request = store.client.request(StoreOperation.PUSH, store.client.connections[0], count=1, total=2)
        values = np.ones(one(random, (SIZE - 1, SIZE + 1, 2 * SIZE)), one(random, ("f8", "i4")))
        REQUEST.send(store.comm, 0, request, values)
    else:
        store.comm.ipush(REQUEST.vector(REQUEST.header(operation=one(random, ODD))), 0, int(one(random, TAGS)))


def vector(comm, random):
    """A store of a vector."""
    keyed = bool(random.integers(2))
    kind = one(random, KINDS)
    layout = StoreLayout(SIZE, comm.size, "f8", rows=VectorRows(4, 32) if keyed else None)
    store = ParameterStore(comm, layout, Serving(kind))
    values, after = np.zeros(SIZE), random.integers(STEPS)
    if store.serves:
        store.serve()
    else:
        for step in range(STEPS):
            store.pull(values)
            if comm.rank == WRONG and step == after:
                ask_wrongly(random, store)
            store.push(np.ones(SIZE))
        store.close(values)
    store.free()


def rows(comm, random):
    """A data server."""
    clients, after = [1, 2], random.integers(STEPS)
    part = comm.mpi.Split(int(comm.rank == 0), comm.rank)
    if comm.rank == 0:
        data = open_data("digits", comm=part)
        introduce(comm, data, clients)
        serve(comm, data, clients)
        data.close()
    else:
        data = RemoteData(comm, 0)
        for step, batch in zip(range(STEPS), data.batches(0, 64, (comm.rank - 1, 2)), strict=False):
            assert len(batch.y) == 32
            if comm.rank == WRONG and step == after:
                frame = data_messages.REQUEST
                words = np.array([one(random, (0, 1, 2, 3, 4, 5, *COUNTS)) for _ in range(8)], np.int64)
                words[0] = one(random, (0, 1, 2, 3, 3, 6, 9, -1))
                cut = one(random, (8, 8, 8, 3, 9))
                comm.ipush(np.resize(words, cut), 0, one(random, (frame.tag, frame.tag, frame.tag, 77)))
        data.close()
    part.Free()


def main(case):
    comm = Communicator(MPI.COMM_WORLD, timeout=TIMEOUT)
    SUM(np.zeros(1), np.zeros(1))  # is compiled, where nobody waits yet
    random = Random(int(case))("wrong client", 0, 0)
    if comm.rank == WRONG:
        print(f"case {case}: rank {WRONG} goes wrong", flush=True)
    (vector if random.integers(3) else rows)(comm, random)
    comm.free()


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except UsageError:
        if MPI.COMM_WORLD.rank == 1:  # the good client has nothing to be told
            raise AssertionError("a good client was refused") from None
        raise
