"""What a rank has done last stands in a file, however the rank ends."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from hpcdl.comm import Communicator
from hpcdl.comm.diagnostics import flight_recorder as flight
from hpcdl.comm.progress import activity
from hpcdl.errors import AgreedError


@pytest.fixture
def recorder(tmp_path, monkeypatch):
    """A function: record what this process does from now on."""

    def start(capacity=100, groups=()):
        made = flight.FlightRecorder(tmp_path / f"rank-{0:04d}.bin", 0, 1, capacity, groups)
        monkeypatch.setattr(activity, "flight", made)
        return made

    return start


def read(recorder):
    """Head, texts, groups and records, as another process would find them."""
    data = recorder.path.read_bytes()
    head = np.frombuffer(data, flight.HEAD, 1)[0]
    texts, groups, records, length = flight.sizes(int(head["capacity"]))
    assert len(data) == length
    found = np.frombuffer(data, flight.RECORD, int(head["capacity"]), records)
    rows = (data[texts + i * flight.WIDTH :][: flight.WIDTH] for i in range(head["texts"]))
    words = [row.rstrip(b"\0").decode() for row in rows]
    table = np.frombuffer(data, flight.GROUP, int(head["groups"]), groups)
    return head, words, table, np.sort(found[found["number"] > 0], order="number")


@pytest.mark.mpi(min_size=2)
def test_each_operation_is_recorded(world, recorder):
    comm = Communicator(world, "ring")
    group, record = comm.split(0, name="half"), recorder(groups=comm.family())
    comm.all_reduce(np.ones(100, "f4"))
    comm.broadcast(np.ones(3, "i8"), 1)
    group.barrier()
    if comm.rank == 0:
        comm.push(np.ones(5), 1, 7)
    elif comm.rank == 1:
        comm.wait(np.ones(5), 0, 7)
    request = comm.iall_gather(np.ones(8))
    _, words, groups, records = read(record)
    assert records["state"].tolist()[-1] in (flight.STARTED, flight.DONE)
    request.wait()
    _, words, groups, records = read(record)
    names = [words[each] for each in records["operation"]]
    between = {0: ["push"], 1: ["wait"]}.get(comm.rank, [])
    assert names == ["all_reduce", "broadcast", "barrier", *between, "all_gather"]
    assert (records["state"] == flight.DONE).all() and (records["end"] > records["start"]).all()
    assert [groups["name"][each].decode() for each in records["group"]][:3] == ["world", "world", "half"]
    assert records["elements"][[0, 1, 2, -1]].tolist() == [100, 3, 0, 8] and records["root"][1] == 1
    assert records["other"].tolist()[3:-1] == [1 - comm.rank] * len(between)
    assert records["bytes"][0] == comm.traffic["all_reduce"].bytes
    assert records["call"][0] + 1 == records["call"][1] == comm.sequence - 1
    assert all("test_flight_recorder.py:" in words[each] for each in records["line"]), words
    assert world.allgather(groups["key"].tolist())[0] == groups["key"].tolist()  # the same on all ranks


@pytest.mark.mpi(min_size=2)
def test_what_is_refused_has_failed(world, recorder):
    comm, record = Communicator(world, "shared"), recorder()
    with pytest.raises(AgreedError):
        comm.all_reduce(np.ones(2 + comm.rank))
    with pytest.raises(AgreedError):
        comm.iall_reduce(np.ones(2 + comm.rank)).wait()
    assert read(record)[3]["state"].tolist() == [flight.FAILED, flight.FAILED]


def test_the_last_ones_are_kept_and_calls_are_counted_all(world, recorder):
    comm = Communicator(world)
    other, record = comm.split(0, name="other"), recorder(capacity=10)
    other.barrier()
    other.barrier()
    for _ in range(37):
        comm.all_reduce(np.ones(4))
    _, words, groups, records = read(record)
    assert records["number"].tolist() == list(range(30, 40)) and record.count == 39
    assert {words[each] for each in records["operation"]} == {"all_reduce"}
    known = dict(zip(groups["name"].tolist(), groups["last"].tolist(), strict=True))
    assert known[b"other"] == other.sequence  # its records are overwritten
    other.free()
    for _ in range(10):
        comm.all_reduce(np.ones(4))
    assert dict(zip(*(read(record)[2][name].tolist() for name in ("name", "last")), strict=True))[b"other"] >= 2


def test_where_there_is_no_room_for_more_names(world, recorder, monkeypatch):
    monkeypatch.setattr(flight, "TEXTS", 20)
    monkeypatch.setattr(flight, "GROUPS", 6)
    comm, record = Communicator(world), recorder(capacity=5)
    for i in range(30):
        exec(compile("comm.barrier()", f"line{i}.py", "exec"), {"comm": comm})
    for _ in range(10):
        group = comm.split(0)
        group.barrier()
        group.free()
    head, words, groups, records = read(record)
    assert len(words) == head["texts"] == 20 and len(groups) == 6 and len(records) == 5
    assert (records["line"] < 20).all() and (records["group"] < 6).all()


def test_how_a_rank_has_ended_is_said_once(recorder):
    record = recorder()
    assert read(record)[0]["state"] == flight.RUNS
    record.ended(flight.BROKE, "failed with ZeroDivisionError: division by zero")
    record.ended(flight.LEFT, "left its program")
    head = read(record)[0]
    assert head["state"] == flight.BROKE and head["why"] == b"failed with ZeroDivisionError: division by zero"
    assert head["ended"] >= head["clock"] and head["process"] == os.getpid()
    assert head["born"] == flight.process_start(os.getpid())
    seen = head["seen"]
    record.beat()
    assert read(record)[0]["seen"] > seen
    record.discard()
    assert not record.path.exists()


def test_another_rank_may_remove_the_folder_while_its_tries_are_looked_for(tmp_path, monkeypatch):
    (tmp_path / flight.FOLDER).mkdir()
    entries = Path.iterdir

    def remove(path):
        path.rmdir()
        return entries(path)

    monkeypatch.setattr(Path, "iterdir", remove)
    assert flight.earlier_tries(tmp_path) == {}
    (tmp_path / flight.FOLDER).write_text("no folder")
    monkeypatch.undo()
    assert flight.earlier_tries(tmp_path) == {}


def test_a_disk_without_room_is_an_error_and_leaves_nothing(tmp_path, no_room):
    no_room(rank=0)
    with pytest.raises(OSError, match="No space"):
        flight.FlightRecorder(tmp_path / "rank-0000.bin", 0, 1, 100)
    assert not list(tmp_path.iterdir())


KILLED = """
import os, signal, sys
from pathlib import Path
import numpy as np
from hpcdl.comm import Communicator
from hpcdl.comm.diagnostics.flight_recorder import FlightRecorder
from hpcdl.comm.progress import activity

comm = Communicator()
activity.flight = FlightRecorder(Path(sys.argv[1]), 0, 1, 50)
for _ in range(7):
    comm.all_reduce(np.ones(3))
def wait():
    activity.flight.begin(comm, "wait", 1, 0)

def program():
    wait()

program()
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_it_outlives_a_rank_that_is_killed(alone, environment, tmp_path):
    path = tmp_path / "rank-0000.bin"
    done = subprocess.run([sys.executable, "-c", KILLED, str(path)], env=environment, timeout=60)
    assert done.returncode == -signal.SIGKILL
    head, words, _, records = read(SimpleNamespace(path=path))
    assert head["state"] == flight.RUNS and flight.process_start(int(head["process"])) != head["born"]
    assert (
        records["state"].tolist() == [flight.DONE] * 7 + [flight.WAITING] and words[records["operation"][-1]] == "wait"
    )
