"""The trace: counters by operation, spans of all ranks in one file that Perfetto opens, on one clock."""

import json
import time

import numpy as np
import pytest
from mpi4py import MPI

from hpcdl.comm import Communicator
from hpcdl.comm.trace import clock_offset, rows


@pytest.mark.mpi(min_size=2)
def test_messages_between_two_ranks_name_the_other(world, mpi_tmp_path):
    comm = Communicator(world, trace=10)
    right, left, got = (world.rank + 1) % world.size, (world.rank - 1) % world.size, np.empty(3)
    sent = [comm.ipush(np.zeros(3), right), comm.inotify(left, tag=1), comm.ipush(np.zeros(5), left, tag=2)]
    comm.wait(got, left)
    comm.wait(source=right, tag=1)
    comm.wait(np.empty(5), right, tag=2)
    for request in sent:
        request.wait()
    path = mpi_tmp_path / "trace.json"
    comm.timeline.write(path)
    if world.rank == 0:
        spans = [event for event in json.loads(path.read_text())["traceEvents"] if event["ph"] == "X"]
        for rank in range(world.size):
            right, left = (rank + 1) % world.size, (rank - 1) % world.size
            mine = [(span["name"], span["args"]) for span in spans if span["tid"] % world.size == rank]
            assert ("push", {"bytes sent": 24, "to": right}) in mine
            assert ("notify", {"bytes sent": 0, "to": left}) in mine
            assert ("push", {"bytes sent": 40, "to": left}) in mine  # though both were in flight at once
            assert ("wait", {"bytes sent": 0, "from": left}) in mine and len(mine) == 6


def test_a_barrier_overlaps_on_all_ranks_when_they_share_a_clock(world, mpi_tmp_path):
    comm = Communicator(world, trace=10)
    time.sleep(0.02 * world.rank)
    comm.barrier()
    path = mpi_tmp_path / "trace.json"
    comm.timeline.write(path)
    if world.rank == 0:
        spans = [event for event in json.loads(path.read_text())["traceEvents"] if event["name"] == "barrier"]
        assert max(event["ts"] for event in spans) <= min(event["ts"] + event["dur"] for event in spans)


def test_the_offset_of_a_clock_that_is_wrong_is_found(world, monkeypatch):
    """Each rank is taken for a host of its own, whose clock is 3 s per rank ahead."""
    right = time.perf_counter_ns
    monkeypatch.setattr(time, "perf_counter_ns", lambda: right() + 3_000_000_000 * world.rank)
    offset = clock_offset(world, MPI.COMM_SELF)
    assert abs(offset + 3_000_000_000 * world.rank) < 500_000_000


def test_operations_in_flight_at_once_get_rows_of_their_own():
    def span(start, end):
        return f"{start}-{end}", start, end - start, None

    spans = [span(0, 10), span(1, 4), span(2, 6), span(4, 9), span(12, 14), span(5, 13)]
    spread = rows(spans)
    assert sorted(each for row in spread for each in row) == sorted(spans)
    for row in spread:
        for _, a, length, _ in row:
            for _, b, other, _ in row:
                assert not a < b < a + length < b + other  # none begins in another and ends after it
    assert [each[0] for each in spread[0]] == ["0-10", "1-4", "4-9", "12-14"]
    assert len(rows([span(0, 5), span(1, 2), span(6, 7)])) == 1


@pytest.mark.parametrize("in_flight", [False, True])
def test_the_last_spans_of_all_ranks_have_the_end_in_common(in_flight, world, mpi_tmp_path):
    """However busy a rank was, and whichever way its calls went: what all did last is there of each of them."""
    comm = Communicator(world, trace=8)
    for number in range(40 * (1 + world.rank)):
        with comm.timeline.span(f"own {number}"):
            pass
    for _ in range(5):
        (comm.ibarrier().wait if in_flight else comm.barrier)()
    with comm.timeline.span("evaluate"):
        pass
    path = mpi_tmp_path / "trace.json"
    comm.timeline.write(path)
    if world.rank == 0:
        events = json.loads(path.read_text())["traceEvents"]
        rows = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
        for rank in range(world.size):
            spans = [event["name"] for event in events if event["ph"] == "X" and event["tid"] == rank]
            count = 40 * (1 + rank)
            assert spans == [f"own {count - 2}", f"own {count - 1}", *["barrier"] * 5, "evaluate"]
            assert rows[rank].endswith(f"({count - 2} earlier spans not kept)")


@pytest.mark.mpi(min_size=3)
def test_messages_within_a_group_name_the_rows_of_the_trace(world):
    comm = Communicator(world, trace=10)
    group = comm.split(0 if comm.rank else None, key=-comm.rank)  # all but rank 0, the last one first
    if group is not None and group.rank < 2:
        other, got = 1 - group.rank, np.empty(2)
        request = group.iwait(got, other)
        group.push(np.zeros(2), other)
        request.wait()
        peers = {details.get("to", details.get("from")) for _, _, _, details in comm.timeline.spans}
        assert peers == {comm.size - 1 - other}
    own = comm.duplicate("own")
    before = len(comm.timeline.spans)
    own.barrier()
    assert len(comm.timeline.spans) == before  # what is no part of the training is not in its picture


@pytest.mark.parametrize("algorithm", ["ring", "tree", "recursive", "shared", "hierarchical"])
def test_the_bytes_of_the_spans_are_the_bytes_counted(algorithm, world):
    """Also with several operations of one kind in flight at once, and where memory is shared."""
    comm = Communicator(world, algorithm, trace=10)
    vectors = [comm.empty(1000), comm.empty(77)]
    requests = [comm.iall_reduce(vector) for vector in vectors]
    for request in requests:
        request.wait()
    spans = [details["bytes sent"] for name, _, _, details in comm.timeline.spans if name == "all_reduce"]
    assert len(spans) == 2 and sum(spans) == comm.traffic["all_reduce"].bytes
