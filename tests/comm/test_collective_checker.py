"""Every way in which ranks can differ in what they call together is told to all of them, by name and line."""

import contextlib
import os
import re
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest
from sums import check_sum

from hpcdl.comm import Communicator
from hpcdl.comm.diagnostics.call_signature import format_ranks
from hpcdl.comm.diagnostics.collective_checker import VARIABLE, enabled_by_environment
from hpcdl.errors import AgreedError, UsageError

F8, F4 = "all_reduce of 9 float64 (sum)", "all_reduce of 9 float32"
WAYS = {  # what most ranks call, what the last one calls, and what either is told to have called
    "kind": ("barrier()", "all_reduce(vector(9))", "barrier", F8),
    "length": ("all_reduce(vector(9))", "all_reduce(vector(8))", F8, "all_reduce of 8"),
    "type": ("all_reduce(vector(9))", "all_reduce(vector(9, 'f4'))", F8, F4),
    "operation": ("all_reduce(vector(9))", "all_reduce(vector(9), 'max')", F8, "of 9 float64 (max)"),
    "root": ("broadcast(vector(9), 0)", "broadcast(vector(9), 1)", "broadcast of 9 float64, root 0", "root 1"),
    "root of a sum": ("reduce(vector(9), 0)", "reduce(vector(9), 1)", "reduce of 9 float64 (sum), root 0", "root 1"),
    "parts": ("reduce_scatter(vector(9))", "reduce_scatter(vector(5))", "reduce_scatter of 9", "reduce_scatter of 5"),
    "gathered": ("all_gather(vector(9))", "all_gather(vector(9, 'i8'))", "all_gather of 9 float64", "of 9 int64"),
    "split": ("split(0)", "barrier()", "split", "barrier"),
    "duplicate": ("duplicate('a')", "expose(vector(3))", "duplicate", "expose"),
}


def vector(n, kind="f8"):
    return np.full(n, 3, kind)


def call(comm, text):
    return eval(f"comm.{text}", {"comm": comm, "vector": vector})


def refused(comm, mine, theirs, how=call):
    """What all are told, the same on all, when the last rank calls something else."""
    with pytest.raises(AgreedError) as told:
        how(comm, theirs if comm.rank == comm.size - 1 else mine)
    words = str(told.value)
    assert comm.mpi.allgather(words) == [words] * comm.size
    return words


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("name", ["ring", "shared"])
@pytest.mark.parametrize("way", WAYS)
def test_all_ranks_are_told(way, name, world):
    comm = Communicator(world, name, check=True)
    mine, theirs, first, second = WAYS[way]
    words = refused(comm, mine, theirs)
    others, last = format_ranks(range(comm.size - 1)), comm.size - 1
    assert re.search(rf"\({others}: .*{re.escape(first)}.*; rank {last}: .*{re.escape(second)}", words), words
    assert "of 'world', called from" in words and f"ranks {'0, ' if last > 1 else '0 '}" in words
    assert "<string>:1 in <module>" in words  # the line that calls, which `eval` has made
    check_sum(comm, np.empty(5))  # nothing was sent, and all go on


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("way", ["length", "root", "parts", "kind"])
def test_asynchronous_calls_are_told_where_they_are_waited_for(way, world):
    comm = Communicator(world, "ring", check=True)
    before, after = np.ones(4), np.ones(6)

    def in_the_middle(comm, text):
        requests = comm.iall_reduce(before), call(comm, f"i{text}"), comm.iall_reduce(after)
        requests[0].wait()
        requests[2].wait()
        requests[1].wait()

    refused(comm, *WAYS[way][:2], in_the_middle)
    assert (before == comm.size).all() and (after == comm.size).all()


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("blocking", [False, True])
def test_of_several_calls_that_differ_each_is_told_as_what_it_is(blocking, world):
    """In whatever order a rank comes to see it, and whatever it has begun beside."""
    comm = Communicator(world, "ring", check=True)
    length, before, after = 9 - (comm.rank == comm.size - 1), np.ones(2), np.ones(3)
    first, between = comm.iall_reduce(vector(length)), comm.iall_reduce(before)
    if blocking:
        second = SimpleNamespace(wait=lambda: comm.broadcast(vector(length)))
    else:
        second = comm.ibroadcast(vector(length))
    last = comm.iall_reduce(after) if comm.rank % 2 or blocking else None  # others begin it when they have been told
    world.Barrier()
    said = {}
    for name, request in [("all_reduce", first), ("broadcast", second)][:: -1 if comm.rank % 2 else 1]:
        while not (request is second and blocking) and comm.rank % 2 and not request.done:  # this one alone
            with contextlib.suppress(AgreedError):
                request.advance()
            os.sched_yield()
        with pytest.raises(AgreedError) as told:
            request.wait()
        said[name] = str(told.value)
    (last or comm.iall_reduce(after)).wait()
    between.wait()
    assert (before == comm.size).all() and (after == comm.size).all()
    for name, words in said.items():
        assert words.count(f"{name} of 9 float64") == words.count(f"{name} of 8 float64") == 1, words
    assert world.allgather(said) == [said] * comm.size


@pytest.mark.mpi(min_size=2)
def test_starting_an_asynchronous_call_waits_for_nobody(world):
    """As without the check: rank 1 takes what rank 0 sends after its start, and only then starts its own."""
    comm, array, sign = Communicator(world, "ring", check=True), np.ones(3), np.zeros(1)
    if comm.rank == 1:
        comm.wait(sign, 0)
    request = comm.iall_reduce(array)
    if comm.rank == 0:
        comm.push(sign, 1)
    request.wait()
    assert (array == comm.size).all()


@pytest.mark.mpi(min_size=2)
def test_calls_in_the_memory_of_a_node_begin_in_their_order(world):
    """Whichever of the comparisons is seen to be complete first."""
    comm, arrays = Communicator(world, "shared", check=True), [np.full(n, n * 1.0) for n in (1, 2, 3, 40_000, 5)]
    requests = [comm.iall_reduce(array) for array in arrays]
    world.Barrier()
    for _ in range(5000 if comm.rank == 1 else 0):  # the others take all forward, this one the second alone
        requests[1].advance()
        os.sched_yield()
    for request in requests[:: 1 if comm.rank % 2 else -1]:
        request.wait()
    assert all((array == len(array) * comm.size).all() for array in arrays)


@pytest.mark.mpi(min_size=2)
def test_groups_inherit_it_and_another_algorithm_is_told(world):
    comm = Communicator(world, "ring", check=True)
    group = comm.split(0, name="half")
    assert "of 'half', called from" in refused(group, *WAYS["length"][:2])
    if group.rank == group.size - 1:
        group.allreduce = "tree"
    words = refused(group, "all_reduce(vector(2))", "all_reduce(vector(2))")
    assert "of 2 float64 (sum) by ring; " in words and "by tree)" in words


@pytest.mark.mpi(min_size=2)
def test_nothing_of_it_is_counted_and_it_is_off_unless_asked_for(world, monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    counted = []
    for check in (None, True):
        comm = Communicator(world, "ring", check=check)
        assert (comm.checker is not None) == bool(check)
        comm.all_reduce(np.ones(100))
        comm.iall_gather(np.ones(100)).wait()
        counted.append((comm.traffic.bytes, comm.traffic.messages, comm.traffic.message_sizes))
        comm.free()
    assert counted[0] == counted[1]


@pytest.mark.mpi(min_size=2)
def test_one_rank_that_asks_for_it_is_enough(world, monkeypatch):
    monkeypatch.setenv(VARIABLE, "1" if world.rank == 0 else "0")
    comm = Communicator(world)
    assert comm.checker is not None


def test_the_variable(monkeypatch):
    for value, on in {"": False, "0": False, "1": True, "collectives": True}.items():
        monkeypatch.setenv(VARIABLE, value)
        assert enabled_by_environment() == on
    monkeypatch.setenv(VARIABLE, "yes")
    with pytest.raises(UsageError, match="HPCDL_CHECK=yes"):
        enabled_by_environment()


PROGRAM = """
import sys, time
import numpy as np
from hpcdl.comm import Communicator

def ones():
    return np.ones(30)

comm = Communicator(timeout=float(sys.argv[1]), allreduce="ring")
group = comm.split(0, name="part")
comm.barrier()
exec(sys.argv[3] if comm.rank == comm.size - 1 else sys.argv[2])
comm.barrier()
print("nobody saw it")
"""

SUM, BARRIER = "comm.all_reduce(ones())", "group.barrier()"
WORLD = r"ranks 0 and 1 in call number \d+ of 'world', all_reduce of 30 float64 \(sum\), at .*"
CROSSED = r"ranks 0, 1 and 2 wait for each other for ever \("
ENDED = [  # --timeout, what most call, what the last rank calls, status, and what the line says
    (0, SUM, BARRIER, 2, rf"{CROSSED}{WORLD}; rank 2 in call number 1 of 'part', barrier, at "),
    (0, f"comm.barrier(); {BARRIER}", f"{BARRIER}; comm.barrier()", 2, rf"{CROSSED}.*'world'.*'part'"),
    (2, SUM, "time.sleep(50)", 1, r"ranks 0 and 1 wait for rank 2, which has not come to call number \d+ of 'world'"),
    (0, SUM, "comm.all_reduce(ones()[1:])", 2, r"rank 2: all_reduce of 29 float64 \(sum\)\); .* \(call number"),
]


@pytest.mark.parametrize("checked", ["0", pytest.param("1", marks=pytest.mark.long)])
def test_a_rank_that_does_not_come_or_calls_on_another_communicator(checked, launch):
    """The job is ended in one line, also where calls are not compared; what follows is then in other words."""
    ways = ENDED if checked == "1" else ENDED[:3]
    with ThreadPoolExecutor(2) as pool:
        ends = pool.map(lambda way: launch(3, "-c", PROGRAM, *way[:3], HPCDL_CHECK=checked), ways)
    for (*_, status, line), done in zip(ways, ends, strict=True):
        assert done.returncode == status, done.stderr
        assert re.search(line, done.stderr), done.stderr
        assert "nobody" not in done.stdout and "Traceback" not in done.stderr
