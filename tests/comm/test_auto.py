"""The table: measured once, kept, read again, and the same choice on all ranks."""

import json
import logging
import time

import numpy as np
import pytest
from mpi4py import MPI

from hpcdl.comm import Communicator
from hpcdl.comm.allreduce import ALGORITHMS, auto
from hpcdl.comm.allreduce.record import Algorithm
from hpcdl.comm.call_matching import CallComparison
from hpcdl.comm.node_memory import node_memory

pytestmark = [pytest.mark.four, pytest.mark.mpi(min_size=2)]


@pytest.fixture
def cache(mpi_tmp_path, monkeypatch, world):
    """An empty folder for tables, and none known to the process."""
    monkeypatch.setenv("HPCDL_CACHE", str(mpi_tmp_path / "cache"))
    monkeypatch.setattr(auto, "tables", {})
    return mpi_tmp_path / "cache"


def test_measured_once_and_kept(world, cache, caplog, monkeypatch):
    with caplog.at_level(logging.INFO, "hpcdl"):
        comm = Communicator(world, allreduce="auto")
    assert caplog.text.count(f"all-reduce measured on {world.size} ranks") == (world.rank == 0)
    table = comm.by_length
    assert len(table) == len(auto.SIZES) and set(table) <= set(auto.CANDIDATES)
    assert world.allgather(table) == [table] * world.size
    comm.free()
    world.Barrier()
    (path,) = cache.iterdir()
    kept = json.loads(path.read_text())
    assert kept["table"] == table
    halving = "circulant" if world.size & (world.size - 1) else "recursive"
    for medians, name in zip(kept["microseconds"], table, strict=True):
        assert set(medians) <= {"shared", halving, "ring", "tree", "double_tree", "mpi"}
        assert name in medians and "mpi" in medians
        others = [time for other, time in medians.items() if other != "shared"]
        assert name == "shared" or medians[name] == min(others)
    monkeypatch.setattr(auto, "measure", None)  # not called any more
    monkeypatch.setattr(auto, "tables", {})
    again = Communicator(world, allreduce="auto")
    assert again.by_length == table
    again.free()


@pytest.mark.parametrize("content", ["", "{", '{"table": ["shared"]}', '{"about": {}, "table": [1, 2, 3, 4, 5]}', "[]"])
def test_a_file_that_makes_no_sense_is_measured_anew(world, cache, content, monkeypatch):
    monkeypatch.setattr(auto, "measure", lambda comm: (["ring"] * len(auto.SIZES), []))
    first = Communicator(world, allreduce="auto")
    world.Barrier()
    (path,) = cache.iterdir()
    world.Barrier()
    if world.rank == 0:
        path.write_text(content)
    world.Barrier()
    monkeypatch.setattr(auto, "tables", {})
    second = Communicator(world, allreduce="auto")
    assert first.by_length == second.by_length == ["ring"] * len(auto.SIZES)
    world.Barrier()
    assert json.loads(path.read_text())["table"] == second.by_length
    first.free()
    second.free()


def test_a_folder_that_cannot_be_written_is_no_error(world, cache, monkeypatch):
    monkeypatch.setenv("HPCDL_CACHE", "/proc/nowhere")
    comm = Communicator(world, allreduce="auto")
    assert len(comm.by_length) == len(auto.SIZES)


def test_the_length_decides(world, cache, monkeypatch):
    names = ["tree", "recursive", "ring", "shared", "mpi"]
    monkeypatch.setattr(auto, "measure", lambda comm: (names, []))
    comm = Communicator(world, allreduce="auto")
    expected = {4: "tree", 2048: "tree", 2052: "recursive", 16384: "recursive", 16388: "ring", 131072: "ring"}
    expected |= {131076: "shared", 1 << 20: "shared", (1 << 20) + 4: "mpi"}
    for size, name in expected.items():
        assert auto.choose(comm._collective, np.empty(size // 4, "float32")) is ALGORITHMS[name]
    for length in (10, 5_000, 30_000, 40_000, 300_000):
        vector = np.full(length, float(comm.rank), "float32")
        comm.all_reduce(vector)
        comm.iall_reduce(vector).wait()
        assert (vector == comm.size * comm.size * (comm.size - 1) / 2).all()


def test_one_rank_measures_nothing(cache):
    comm = Communicator(MPI.COMM_SELF, allreduce="auto")
    vector = np.arange(5.0)
    comm.all_reduce(vector)
    assert np.array_equal(vector, np.arange(5.0)) and not cache.exists()
    comm.free()


def test_the_hopeless_are_left_out_but_not_the_librarys_own(world):
    def slow(comm, vector, op=None):
        time.sleep(0.002)

    def fast(comm, vector, op=None):
        pass

    vector = np.ones(8, "float32")
    timed = {"fast": fast, "slow": slow, "mpi": slow, "elsewhere": slow}
    medians = auto.race(world, {name: (Algorithm(name, blocking=run), vector) for name, run in timed.items()})
    assert set(medians) == {"fast", "mpi", "elsewhere"} and medians["mpi"] >= 2_000 > medians["fast"]
    assert world.allgather(medians) == [medians] * world.size


def test_timed_at_the_cost_of_a_blocking_call(world, monkeypatch):
    """What `bind` returns is timed, not the bare algorithm; and before mpi's call the ranks compare theirs."""
    calls = {"bare": 0, "bound": 0, "compared": 0}

    def count(name):
        return lambda *_: calls.update({name: calls[name] + 1})

    compared = CallComparison.__enter__
    monkeypatch.setattr(CallComparison, "__enter__", lambda self: (count("compared")(), compared(self))[1])
    bound = Algorithm("bound", blocking=count("bare"), bind=lambda *_: count("bound"))
    met = Algorithm("met", blocking=lambda *_: None, meets=True)
    monkeypatch.setattr(auto, "MAX_TURNS", auto.TRIAL)
    for length, in_a_row in ((256, auto.CALLS), (1 << 16, 1)):
        calls.update(bare=0, bound=0, compared=0)
        vector = np.ones(length, "float32")
        auto.race(world, {"mpi": (bound, vector), "elsewhere": (met, vector)})
        assert calls == {"bare": 0, "bound": 1 + auto.TRIAL * in_a_row, "compared": 1 + auto.TRIAL * in_a_row}


def test_on_a_slow_link_longer_vectors_are_not_measured(world, monkeypatch):
    """Nor are there more turns than those of the trial."""
    turns = {size: 0 for size in auto.SIZES}

    def crawl(comm, vector, op):
        turns[vector.nbytes] += 1
        time.sleep(0 if vector.nbytes < auto.SIZES[2] else 0.03)

    for name in auto.CANDIDATES:
        monkeypatch.setitem(auto.CANDIDATES, name, Algorithm(name, blocking=crawl))
    monkeypatch.setattr(auto, "SECONDS", 0.025)
    table, microseconds = auto.measure(world)
    assert len(table) == len(auto.SIZES) and len(microseconds) == 3 and table[3:] == table[2:3] * 2
    assert turns[auto.SIZES[3]] == turns[auto.SIZES[4]] == 0
    assert (
        turns[auto.SIZES[2]] % (1 + auto.TRIAL) == 0 < turns[auto.SIZES[2]] <= len(auto.CANDIDATES) * (1 + auto.TRIAL)
    )


@pytest.mark.parametrize(("nodes", "taken"), [(1, "mpi"), (2, "ring")])
def test_between_nodes_the_librarys_own_has_to_be_faster_by_more_than_a_little(world, nodes, taken, monkeypatch):
    own = world.Dup()
    memory = node_memory(own)
    monkeypatch.setattr(memory, "nodes", nodes)
    times = {"mpi": 1.0, "ring": 1.04}
    monkeypatch.setattr(auto, "race", lambda comm, vectors: {name: times.get(name, 2.0) for name in vectors})
    assert auto.measure(own)[0] == [taken] * len(auto.SIZES)
    memory.free()
    own.Free()


def test_not_taken_where_it_is_far_behind_in_other_vectors(world, monkeypatch):
    """The algorithm in shared memory is the fastest in windows, and elsewhere far behind the library's own."""

    def timed(name, seconds):
        run = Algorithm(name, blocking=lambda comm, vector, op: time.sleep(seconds(vector)))
        monkeypatch.setitem(auto.CANDIDATES, name, run)

    own, windows = world.Dup(), []
    memory = node_memory(own)
    monkeypatch.setattr(memory, "empty", lambda n, dtype: windows.append(np.ones(n, dtype)) or windows[-1])
    timed("shared", lambda vector: 0.0001 if np.shares_memory(vector, windows[0]) else 0.005)
    others = set(auto.CANDIDATES) - set(auto.SHARING)
    for name in others:
        timed(name, lambda vector: 0.001)
    monkeypatch.setattr(auto, "SIZES", [1 << 10])
    table, _ = auto.measure(own)
    assert table[0] in others
    memory.free()
    own.Free()
