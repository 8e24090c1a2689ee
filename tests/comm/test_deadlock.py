"""Ranks that differ in what they call together, and ranks that would wait for ever, are told, whoever sees it."""

import re
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from mpi4py import MPI
from sums import check_sum

from hpcdl.comm import Communicator
from hpcdl.comm.call_matching import number, numbers
from hpcdl.comm.diagnostics.call_signature import ALL, SOME, describe_call, format_ranks, mismatch_message
from hpcdl.comm.diagnostics.deadlock import RankStatus, stuck, stuck_message
from hpcdl.errors import AgreedError

SHARING = ["shared", "hierarchical", "mpi"]  # algorithms under which all ranks see it
WAYS = {  # of rank 1, or the last one, to call something else: elements, type, operation
    "length": (20_000, "f4", "sum"),
    "little longer": (101, "f4", "sum"),
    "type": (100, "i4", "sum"),
    "type of another size": (100, "f8", "sum"),
    "operation": (100, "f4", "max"),
    "mean": (100, "f4", "mean"),
}


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", SHARING)
def test_all_ranks_are_told_and_may_go_on(name, way, world):
    comm = Communicator(world, allreduce=name)
    last = comm.size - 1
    for short in (True, False):  # the plain way, too
        size, kind, op = WAYS[way] if comm.rank == last else (100, "f4", "sum")
        vector = np.full(size + 8, 3, kind)
        with pytest.raises(AgreedError) as told_all:
            if short:
                comm.all_reduce(vector[:size], op)
            else:
                comm.iall_reduce(vector[:size], op).wait()
        words = str(told_all.value)
        others = format_ranks(range(last))
        assert f"{others}: all_reduce of 100 float32 (sum); rank {last}: all_reduce of " in words, words
        assert (vector == 3).all()
        assert world.allreduce(len({*world.allgather(words)})) == comm.size
    check_sum(comm, np.empty(5))


@pytest.mark.mpi(min_size=2)
def test_vectors_in_windows_are_compared_too(world):
    """Longer than what goes through the buffers beside the flags; and nothing was overwritten."""
    comm = Communicator(world, allreduce="shared")
    window = comm.empty(12_000)
    window[:] = 7
    with pytest.raises(AgreedError, match="all_reduce of 6000 float32"):
        comm.all_reduce(window[:6000] if comm.rank == 0 else window)
    assert (window == 7).all()
    comm.all_reduce(window)
    assert (window == 7 * comm.size).all()


@pytest.mark.mpi(min_size=2)
def test_other_calls_that_make_something_are_compared_too(world):
    comm, last = Communicator(world, allreduce="shared"), world.rank == world.size - 1
    here = r".*\((call number \d+ of 'world', )?called from ranks? 0.*: \w+\.py:\d+ in \w+"
    with pytest.raises(AgreedError, match=rf"split; rank {world.size - 1}: duplicate{here}"):
        comm.duplicate("a") if last else comm.split(0)
    with pytest.raises(AgreedError, match=rf"all-reduce by ring; rank {world.size - 1}: all-reduce by tree{here}"):
        Communicator(world, allreduce="tree" if last else "ring")
    with pytest.raises(AgreedError, match=rf"expose; rank {world.size - 1}: empty"):
        comm.empty(3) if last else comm.expose(np.ones(3))
    for size, kind in (0, "f4"), (11, "f4"), (10, "f8"):
        with pytest.raises(AgreedError, match=rf"rank {world.size - 1}: empty of {size} float"):
            comm.empty(*((size, kind) if last else (10, "f4")))
    comm.all_reduce(comm.empty(10))


@pytest.mark.mpi(min_size=2)
def test_an_error_is_that_of_its_request(world):
    """Not of another one that took it forward."""
    comm = Communicator(world, allreduce="shared")
    other = comm.split(0, allreduce="ring")
    first, second = np.ones(4 + world.rank), np.ones(5)
    requests = comm.iall_reduce(first), other.iall_reduce(second)
    requests[1].wait()
    assert (second == world.size).all()
    with pytest.raises(AgreedError):
        requests[0].wait()


PROGRAM = """
import sys
import numpy as np
from hpcdl.comm import Communicator
from hpcdl.comm.exchange import exchange
from hpcdl.comm.primitives import chain

comm = Communicator(allreduce=sys.argv[1])
comm.several_nodes, chain.LATENCY_BYTES = comm.size > 2, 10  # chains of short messages, which MPI buffers
for _ in range(100):
    comm.all_reduce(np.ones(50))


def gather(root):
    comm.run(("gather", np.dtype(float), 9, "", root), lambda lane: exchange.steps(lane, [(np.ones(9), root)], []))


mine = sys.argv[2 + (comm.rank == comm.size - 1)]
if sys.argv[4:]:
    comm.iwait(np.zeros(3), 0, 9)  # something in flight: the plain way
eval(mine)
print("nobody saw it")
"""


GROUP = "comm.split(int(comm.rank > 0))"  # rank 0 is not in that of the last two
LONG = "comm.broadcast(np.ones(64), comm.rank)"  # along a chain: all three ranks send, none waits
DIFFERENT = [  # algorithm, what the first rank calls, and the last one
    ("ring", "comm.all_reduce(np.ones(100))", "comm.all_reduce(np.ones(20000))"),
    ("ring", "comm.broadcast(np.ones(9), comm.rank)", "comm.broadcast(np.ones(9), comm.rank)"),  # all send, none waits
    ("ring", LONG, LONG),
    ("ring", "gather(1)", "gather(0)"),
    ("auto", "comm.all_reduce(np.ones(100))", "comm.all_reduce(np.ones(1_000_000))"),
    ("shared", "comm.barrier()", "comm.split(0)"),
    ("ring", f"{GROUP}.all_reduce(np.ones(9))", f"{GROUP}.all_reduce(np.ones(7))"),
]


def last_of(way):
    return 2 if GROUP in way[1] or way[1] == LONG else 1


def test_otherwise_the_job_is_ended_with_one_line(launch):
    ways = [(*each, *["plain"][: i % 2]) for i, each in enumerate(DIFFERENT)]
    with ThreadPoolExecutor(4) as pool:
        ends = pool.map(lambda way: launch(1 + last_of(way), "-c", PROGRAM, *way), ways)
    for way, done in zip(ways, ends, strict=True):
        assert done.returncode == 2, (way, done.stderr)
        (line,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
        assert re.search(rf"the ranks make different collective calls \(rank .*; rank {last_of(way)}: ", line)
        assert way[0] in ("auto", "shared") or re.search(r"\(called from ranks? .*: \S+:\d+ in \S+", line), line
        assert done.stdout.count("nobody") == (GROUP in way[1]), way  # rank 0 is alone in its group
        assert "Traceback" not in done.stderr


LEFT = RankStatus("has ended its program", True, {"all": 7})


def waits(other, call=0, seconds=9.0, key="all", members=(0, 1, 2, 3), calls=7):
    return RankStatus("waits", False, {key: calls}, False, None, (seconds, 1), key, members, other, call)


COMPUTES = RankStatus("in no communication", False, {"all": 7})


@pytest.mark.parametrize(
    "said, wanted",
    [
        ([waits(ALL, 8), LEFT, COMPUTES, COMPUTES], {0}),
        ([waits(ALL, 7), LEFT, COMPUTES, COMPUTES], set()),  # it has made that call
        ([waits(ALL, 8, seconds=0.5), LEFT, COMPUTES, COMPUTES], set()),
        ([waits(ALL, 8, members=(0, 2, 3)), LEFT, COMPUTES, COMPUTES], set()),  # among others
        ([waits(ALL, 8, key="other"), LEFT, COMPUTES, COMPUTES], set()),  # it does not know that communicator
        ([waits(1), LEFT, COMPUTES, COMPUTES], {0}),
        ([waits(2), LEFT, COMPUTES, COMPUTES], set()),
        ([waits(2), LEFT, waits(1), COMPUTES], {0, 2}),  # waits for one that waits for it
        ([waits(1, seconds=3.0), LEFT, COMPUTES, COMPUTES], set()),  # a message may be on its way
        ([waits(SOME), LEFT, COMPUTES, COMPUTES], set()),
        ([waits(SOME), LEFT, LEFT, LEFT], {0}),
        ([waits(SOME), LEFT, waits(1), waits(2)], {0, 2, 3}),
        ([waits(SOME), LEFT, waits(0), waits(0)], set()),  # a server's answers may be on their way
        ([waits(1), waits(0), COMPUTES, COMPUTES], set()),  # nobody has left
    ],
)
def test_stuck(said, wanted):
    assert stuck(dict(enumerate(said)), len(said)) == wanted
    silent = {rank: each for rank, each in enumerate(said) if rank != 1}
    assert stuck(silent, len(said)) <= wanted


def test_the_words():
    assert describe_call(("all_reduce", np.dtype("f4"), 1000, "mean", 0)) == "all_reduce of 1000 float32 (mean)"
    assert describe_call(("broadcast", np.dtype("i8"), 3, "", 2)) == "broadcast of 3 int64, root 2"
    assert describe_call(("barrier", None, 0, "", 0)) == "barrier"
    assert format_ranks([4]) == "rank 4" and format_ranks([0, 1, 5]) == "ranks 0, 1 and 5"
    assert format_ranks(range(100)) == "ranks 0, 1, 2, 3, 4, 5, 6, 7 and 92 more"
    assert mismatch_message({0: "a", 1: "b", 2: "a"}).startswith(
        "the ranks make different collective calls (ranks 0 and 2: a; "
    )
    line = stuck_message(dict(enumerate([waits(1), LEFT, waits(1), LEFT])), {0, 2})
    assert line == "ranks 1 and 3 have left the program before its end; ranks 0 and 2 would wait for ever: rank 0 waits"


def test_calls_that_differ_have_other_numbers():
    """So that their messages do not meet: few share a number, of those that are near each other none."""
    f4, i8 = np.dtype("f4"), np.dtype("i8")
    calls = [("all_reduce", kind, size, op, 0) for kind in (f4, i8) for size in range(1000) for op in ("sum", "max")]
    found = [number(call) for call in calls]
    assert all(0 <= each < numbers() for each in found)
    assert len(set(found)) > 0.7 * len(calls)  # of 8192 numbers, 4000 calls have 3,100 and more
    assert number(("all_reduce", np.dtype("q"), 5, "sum", 0)) == number(("all_reduce", np.dtype("l"), 5, "sum", 0))
    assert MPI.COMM_WORLD.Get_attr(MPI.TAG_UB) >= numbers() << 15
