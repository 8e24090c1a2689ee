"""Whatever a client sends to a server: a line refuses it, or it is served; nothing is written beyond the slice.

Here a server takes what a wrong client may send from a list, on one rank; tests/faults/wrong_client.py sends it in a
job. HPCDL_FUZZ=N tries N times as many cases, and new ones each time."""

import contextlib
import itertools
import math
import subprocess
import sys
from collections import Counter, defaultdict, deque
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from fuzz import TIMES, cases, tried
from hypothesis import given
from hypothesis import strategies as st
from mpi4py import MPI

from hpcdl.comm.point_to_point import Arrival
from hpcdl.comm.trace import Traffic
from hpcdl.data import open_data
from hpcdl.data_server import data_messages
from hpcdl.data_server.batch_server import BatchServer
from hpcdl.errors import UsageError
from hpcdl.machine.launcher import clean_environment, mpiexec
from hpcdl.parameter_server.clocks import Clocks
from hpcdl.parameter_server.consistency import BSP, Consistency
from hpcdl.parameter_server.parameter_store import add
from hpcdl.parameter_server.slice_server import SliceServer
from hpcdl.parameter_server.sparse_keys import VectorRows
from hpcdl.parameter_server.store_messages import REQUEST, StoreOperation, StoreTag

PROGRAM = Path(__file__).parents[1] / "faults" / "wrong_client.py"
JOBS = 3 * max(1, TIMES)  # of three ranks
SECONDS = 60  # a job that takes longer hangs
TOLD = "error: ", "hpcdl watchdog: a rank has waited"  # a client that asks who is gone: only a timeout ends that
ELEMENTS, CLIENTS = 23, (1, 2)
ROWS = VectorRows(4, 20)
KINDS = [BSP, Consistency("ssp", 1), Consistency("async")]
ODD = [0, 1, 2, 3, -1, 5, 9, 23, 24, 1000, 0.5, 1e9, 2.0**53, 2.0**63, 1e308, -1e308, math.inf, -math.inf, math.nan]
FIELDS, VALUE = st.sampled_from(REQUEST.dtype.names), st.sampled_from(ODD) | st.floats()


class Late(Exception):
    """The server waits for a message that does not come; in a job it waits for a client that has left, and is told."""


class Wire:
    """In the place of a communicator: what comes is in `coming`, by sender and tag; what is sent is forgotten."""

    rank, size = 0, 3

    def __init__(self):
        self.coming, self.traffic, self.sent = defaultdict(deque), Traffic(), 0

    def iwait(self, array, source, tag):
        return Receive(self, array, source, tag)

    def wait(self, array, source, tag):
        return self.iwait(array, source, tag).wait()

    def ipush(self, array, to, tag):
        self.sent += 1
        return SimpleNamespace(done=True, wait=lambda doze=False: None)

    def wait_until(self, condition, meanwhile=None, patient=False):
        if not condition():
            raise Late


class Receive:
    """A receive that is posted."""

    def __init__(self, wire, array, source, tag):
        self.queue, self.array, self.source, self.taken = wire.coming[source, tag], array, source, None

    @property
    def done(self):
        return self.taken is not None or bool(self.queue)

    def test(self):
        return self.done

    def wait(self, doze=False):
        if self.taken is None:
            if not self.queue:
                raise Late
            message = self.queue.popleft()
            if message.nbytes > self.array.nbytes:
                raise UsageError("a message is longer")
            self.array.view(np.uint8)[: message.nbytes] = message.view(np.uint8)
            self.taken = Arrival(self.source, message.nbytes // self.array.itemsize)
        return self.taken


REQUESTS = st.tuples(
    st.sampled_from(CLIENTS),
    st.sampled_from([*StoreOperation, StoreOperation.PUSH, StoreOperation.PULL, StoreOperation.PUSH]),
    st.lists(st.tuples(FIELDS, VALUE), max_size=2),
    st.sampled_from([0, 0, 0, 0, 0, 0, -1, -5, -8, 1, 8, 1000]),  # bytes that the header is too long by
    st.sampled_from([0, 0, 0, 0, -1, 1, 7, 10**5]),  # values that come with it, beyond those that should
    st.lists(st.sampled_from([0, 1, 2, 3, 4, 5, -1, 2**62]), max_size=4),  # keys
    st.booleans(),  # whether they are sorted
)


def send(wire, server, client, operation, odd, longer, more, keys, tidy):
    """Put into the wire what this client may send: right but for what is odd."""
    keys = sorted({key for key in keys if 0 <= key < 5}) if tidy else keys
    of_keys = len(keys) if operation == StoreOperation.KEYS else len(server.touched.get(client, ((), ()))[1])
    stop = of_keys if operation in (StoreOperation.KEYS, StoreOperation.PUSH_AT) else ELEMENTS
    clocks = server.clocks
    known = {
        "reply": StoreTag.ANSWER,
        "clock": clocks.of_client[client],
        "seen": clocks.of_store,
        "stop": stop,
        "total": 8,
    }
    if operation == StoreOperation.OVER:
        known["reply"] = 0
    known |= {"version": clocks.version} | dict(odd)
    header = REQUEST.header(**{"operation": operation} | known).tobytes()
    header = header[: len(header) + longer] if longer < 0 else header + b"\1" * longer
    wire.coming[client, StoreTag.REQUEST].append(np.frombuffer(header, np.uint8))
    if operation == StoreOperation.KEYS:
        wire.coming[client, StoreTag.VALUES].append(np.array([*keys, *[4] * max(0, more)], np.int64))
    elif operation in (StoreOperation.PUSH, StoreOperation.PUSH_AT):
        wire.coming[client, StoreTag.VALUES].append(np.full(max(0, stop + more), 1e6))


def served(serve):
    """Whether the server has taken all that came; else a line says why not."""

    def taken():
        with contextlib.suppress(Late):
            serve()
        return True

    return bool(tried(taken))


@cases(250)
@given(st.sampled_from(KINDS), st.booleans(), st.lists(REQUESTS, min_size=1, max_size=12))
def check_store(consistency, keyed, requests):
    around = np.full(ELEMENTS + 64, -7.0)  # nothing of it may change but the slice
    values = around[32:-32]
    values[:] = 0
    wire = Wire()
    server = SliceServer(wire, values, Clocks(CLIENTS, consistency), add, rows=ROWS if keyed else None)
    for request in requests:
        client = request[0]
        if client not in server.inbox.pending:
            continue  # it has closed, and nobody listens
        send(wire, server, *request)
        before = values.copy()
        if not served(server.attend):
            break
        assert len(server.buffers) <= len(CLIENTS) + 1 and len(server.waiting) <= 4 * len(CLIENTS)
        moved = values != before
        assert not moved.any() or request[1] in (StoreOperation.PUSH, StoreOperation.PUSH_AT, StoreOperation.LAST)
    assert (around[:32] == -7).all() and (around[-32:] == -7).all()
    assert np.isin(values % 1e6, 0).all() and (values <= 12e6).all()  # nothing counts that was not pushed


def test_a_store_refuses_what_no_client_sends():
    check_store()


def test_right_requests_are_all_served():
    """What the fuzzer calls right is: without anything odd, no request is refused."""
    for consistency, keyed in itertools.product(KINDS, (True, False)):
        wire, values = Wire(), np.zeros(ELEMENTS)
        server = SliceServer(wire, values, Clocks(CLIENTS, consistency), add, rows=ROWS if keyed else None)
        for _ in range(3):
            for operation in (StoreOperation.PULL, StoreOperation.PUSH):
                for client in CLIENTS:
                    send(wire, server, client, operation, (), 0, 0, (), True)
                    assert served(server.attend)
        if keyed:
            for operation in (StoreOperation.KEYS, StoreOperation.PUSH_AT):
                for client in CLIENTS:
                    send(wire, server, client, operation, (), 0, 0, (0, 3), True)
                    assert served(server.attend)
        assert values.max() == 1e6 * (8 if keyed else 6)
        for client in CLIENTS:
            send(wire, server, client, StoreOperation.LAST, (), 0, 0, (), True)
            assert served(server.attend)
        assert not server.clocks.open


NUMBER = st.sampled_from([0, 1, 2, 3, 5, 7, -1, 97, 1000, 10**6, 2**31, 2**40, 2**62, -(2**63)])
ASKED = st.tuples(
    st.integers(0, 5) | NUMBER,
    st.lists(st.integers(0, 9) | NUMBER, max_size=7),
    st.sampled_from([0, 0, 0, 0, -8, -3, 8]),  # bytes that the request is too long by
    st.lists(st.integers(0, 9) | NUMBER, max_size=4),  # row numbers that come with it
)


@pytest.fixture(scope="module")
def digits():
    data = open_data("digits", comm=MPI.COMM_SELF)
    yield data
    data.close()


@cases(200)
@given(st.lists(ASKED, min_size=1, max_size=6))
def check_data(data, requests):
    wire = Wire()
    server = BatchServer(wire, data, CLIENTS)
    for operation, arguments, longer, index in requests:
        message = np.array([operation, *arguments, *[0] * (7 - len(arguments))], np.int64).tobytes()
        message = message[:longer] if longer < 0 else message + b"\1" * longer
        wire.coming[1, data_messages.REQUEST.tag].append(np.frombuffer(message, np.uint8))
        wire.coming[1, data_messages.REQUEST.payload].append(np.array(index, np.int64))

        def answer():
            client, *request = server.receive()
            if request[0] != 5:
                server.answer(client, *request)

        if not served(answer) or 1 not in server.inbox.pending:
            break
    server.close()


def test_a_data_server_refuses_what_no_client_sends(digits):
    check_data(digits)


@pytest.mark.long
def test_a_job_with_a_wrong_client_ends_with_a_line():
    """With a server and a good client: one line and its status, or all is well; nothing hangs."""
    ended, environment = {}, clean_environment() | {"OMPI_MCA_smsc": "^cma"}  # docs/security.md: messages too long
    for case in range(JOBS):
        command = [mpiexec(), "-n", "3", sys.executable, str(PROGRAM), str(case)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=SECONDS)
        lines = [line for line in done.stderr.splitlines() if line.startswith(TOLD)]
        assert "Traceback" not in done.stderr, f"case {case}: {done.stderr}"
        assert done.returncode in (0, 1, 2) and bool(lines) == (done.returncode > 0), f"case {case}: {done}"
        assert len(lines) <= 1, f"case {case}: {done.stderr}"
        ended[case] = done.returncode
    assert 2 in ended.values(), ended
    print(f"{JOBS} jobs ended with status: {dict(Counter(ended.values()))}")
