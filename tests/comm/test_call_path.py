"""The short way of a blocking call does what the plain way does: the same bits, counts and spans, and they mix."""

import contextlib
import sys
import types

import numpy as np
import pytest
from mpi4py import MPI

from hpcdl.comm import Communicator, collectives, point_to_point, requests
from hpcdl.comm.allreduce import ALGORITHMS
from hpcdl.comm.allreduce.ring import ring_all_reduce
from hpcdl.comm.allreduce.tree import tree_all_reduce
from hpcdl.comm.progress import activity
from hpcdl.errors import UsageError

THEIRS = "plain", "generator", "record"  # a user's own algorithms, as functions of the module `theirs`
NAMES = [*sorted(ALGORITHMS), *(f"theirs:{name}" for name in THEIRS)]


@pytest.fixture(autouse=True)
def theirs(monkeypatch):
    module = types.ModuleType("theirs")
    module.plain = lambda comm, vector, op: tree_all_reduce(comm, vector, op)
    module.generator, module.record = ring_all_reduce, ALGORITHMS["recursive"]
    monkeypatch.setitem(sys.modules, "theirs", module)


@pytest.fixture
def helper():
    """A communicator of this rank alone."""
    comm = Communicator(MPI.COMM_SELF, "tree")
    yield comm
    comm.free()


@contextlib.contextmanager
def in_flight(helper, wanted=True):
    """While this lasts, this rank has something in flight, on `helper`, a communicator of its own."""
    request = helper.iwait(source=0, tag=1) if wanted else None
    yield
    if wanted:
        helper.notify(0, tag=1)
        request.wait()


def drawn(random, rank, size):
    """The next operation, the same on all ranks: its name, this rank's array and the other arguments."""
    others = ["broadcast", "reduce", "reduce_scatter", "all_gather", "barrier", "ring"]
    name = random.choice([*["all_reduce"] * 3, *others])
    shape = [(0,), (1,), (3,), (64,), (4, 5), (1000,), (5003,)][random.integers(7)]
    dtype, ops = [("f4", 4), ("f8", 4), ("i8", 3)][random.integers(3)]
    op, root = ["sum", "max", "min", "mean"][random.integers(ops)], int(random.integers(size))
    rows = random.standard_normal((size, *shape)) * 10
    array, shared = rows[rank].astype(dtype), bool(random.integers(2))
    arguments = {"all_reduce": (op,), "broadcast": (root,), "reduce": (root, op), "reduce_scatter": (op,)}.get(name, ())
    return name, array, arguments, shared


def carry_out(comm, name, array, arguments, shared=False):
    """The operation on a copy of the array, in memory that the node shares where wanted; that copy and the result."""
    mine = comm.empty(array.size, array.dtype).reshape(array.shape) if shared else np.empty_like(array)
    mine[...] = array
    if name == "barrier":
        return mine, comm.barrier()
    if name == "ring":  # the even ranks first, for a push may wait until it is received
        right, left, got = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size, np.zeros_like(mine)
        calls = [lambda: comm.push(mine, right, 5), lambda: comm.wait(got, left, 5)]
        if comm.size == 1:
            request = comm.iwait(got, left, 5)
            comm.push(mine, right, 5)
            arrival = request.wait()
        elif comm.rank % 2:
            arrival, _ = calls[1](), calls[0]()
        else:
            _, arrival = calls[0](), calls[1]()
        sign = comm.inotify(right, 6)
        assert comm.wait(source=left, tag=6) == (left, 0)
        sign.wait()
        assert arrival == (left, mine.size)
        return got, None
    return mine, getattr(comm, name)(mine, *arguments)


def counted(comm):
    return {name: (each.calls, each.bytes, each.messages) for name, each in comm.traffic.items()}


def spans(comm):
    return [(name, details) for name, start, stop, details in comm.timeline.spans if start <= stop]


@pytest.mark.parametrize("name", NAMES)
def test_the_same_bits_counts_and_spans(name, helper, bare):
    short, plain = (Communicator(bare, allreduce=name, trace=1000) for _ in range(2))
    random = np.random.default_rng(7)
    for _ in range(25):
        operation = drawn(random, bare.rank, bare.size)
        found, result = carry_out(short, *operation)
        with in_flight(helper):
            wanted, wanted_result = carry_out(plain, *operation)
        assert found.tobytes() == wanted.tobytes(), operation
        assert type(result) is type(wanted_result)
        if result is not None:
            assert result.tobytes() == wanted_result.tobytes()
            assert np.shares_memory(result, found) == (result.size > 0)
    assert counted(short) == counted(plain) and short.sequence == plain.sequence
    assert spans(short) == spans(plain)
    assert len(spans(short)) == sum(each.calls for each in short.traffic.values())
    for each in (*short.traffic.values(), *plain.traffic.values()):
        assert 0 <= each.blocked_seconds <= each.seconds
    assert activity.in_flight == [] and activity.operation is None


@pytest.mark.parametrize("name", NAMES)
def test_ranks_go_different_ways(name, helper, bare):
    """What is in flight differs from rank to rank, and from call to call; some calls are asynchronous."""
    mixed, plain = (Communicator(bare, allreduce=name) for _ in range(2))
    random, own = np.random.default_rng(11), np.random.default_rng(100 + bare.rank)
    flying = []

    def finish(flight):
        request, found, wanted = flight
        request.wait()
        assert found.tobytes() == wanted.tobytes()

    for _ in range(25):
        operation = drawn(random, bare.rank, bare.size)
        with in_flight(helper):
            wanted, _ = carry_out(plain, *operation)
        kind, array, arguments, shared = operation
        asynchronous = kind in ("all_reduce", "broadcast") and random.integers(3) == 0
        if asynchronous:  # on all ranks alike, for a blocking mpi is no asynchronous one; each waits when it likes
            # In the same memory as the other way has it: what is copied to be shared counts.
            mine = mixed.empty(array.size, array.dtype).reshape(array.shape) if shared else np.empty_like(array)
            mine[...] = array
            flying.append((getattr(mixed, "i" + kind)(mine, *arguments), mine, wanted))
            while flying and own.integers(2):
                finish(flying.pop(own.integers(len(flying))))
        else:
            with in_flight(helper, own.integers(2)):
                found, _ = carry_out(mixed, *operation)
            assert found.tobytes() == wanted.tobytes(), operation
    for each in flying:
        finish(each)
    assert counted(mixed) == counted(plain)


@pytest.mark.parametrize("name", ["shared", "tree", "mpi"])
def test_no_request_is_made_where_nothing_is_in_flight(name, helper, world, monkeypatch):
    comm, made = Communicator(world, allreduce=name), []

    class Noted(requests.Request):
        def __init__(self, communicator, name, *arguments):
            made.append(name)
            super().__init__(communicator, name, *arguments)

    for module in (collectives, point_to_point):
        monkeypatch.setattr(module, "Request", Noted)
    array, root = np.arange(6.0), world.size - 1
    calls = {
        "all_reduce": lambda: comm.all_reduce(array),
        "broadcast": lambda: comm.broadcast(array, root),
        "reduce": lambda: comm.reduce(array, root),
        "reduce_scatter": lambda: comm.reduce_scatter(array),
        "all_gather": lambda: comm.all_gather(array),
        "barrier": comm.barrier,
    }
    if world.size > 1 and world.rank < 2:
        other = 1 - world.rank
        calls["push"] = lambda: comm.push(array, other) if world.rank else comm.wait(array, other)
        calls["notify"] = lambda: comm.notify(other) if world.rank else comm.wait(source=other)
    for call in calls.values():
        call()
    assert made == []
    with in_flight(helper):
        del made[:]
        for call in calls.values():
            call()
        assert len(made) == len(calls)


def test_a_refusal_is_that_of_the_plain_way_and_leaves_nothing_behind(helper, world):
    comm = Communicator(world, allreduce="ring")
    row, numbers = np.zeros((4, 6)), np.zeros(3)
    wrong = [
        (lambda: comm.all_reduce(row[:, :3]), r"shape \(4, 3\) is not contiguous"),
        (lambda: comm.all_reduce(np.zeros(3, ">f4")), "MPI has no type for elements of >f4"),
        (lambda: comm.all_reduce(np.zeros(3, "f2")), "float16"),
        (lambda: comm.all_reduce(np.array([None])), "object"),
        (lambda: comm.all_reduce([1.0]), "not list"),
        (lambda: comm.all_reduce(numbers, "product"), "unknown reduction 'product'"),
        (lambda: comm.all_reduce(numbers, None), "a reduction is one of the words sum, .*, not None"),
        (lambda: comm.all_reduce(numbers, ["sum"]), r"a reduction is one of the words sum, .*, not \['sum'\]"),
        (lambda: comm.all_reduce(np.zeros(3, int), "mean"), "mean of int64"),
        (lambda: comm.broadcast(numbers, comm.size), f"no rank {comm.size} in a group of {comm.size}"),
        (lambda: comm.broadcast(row[:, :3]), "not contiguous"),
        (lambda: comm.reduce(numbers, -1), "no rank -1"),
        (lambda: comm.reduce(numbers, 0, None), "a reduction is one of the words"),
        (lambda: comm.reduce_scatter(np.zeros(3, "c8")), "reductions take integers, float32 and float64"),
        (lambda: comm.reduce_scatter(numbers, None), "a reduction is one of the words"),
        (lambda: comm.all_gather(np.array(["a"])), "MPI has no type for elements"),
        (lambda: comm.push(numbers, comm.size), f"no rank {comm.size}"),
        (lambda: comm.push(numbers, 0, tag=-1), "a tag is a number"),
        (lambda: comm.push(row[:, 0], 0), "not contiguous"),
        (lambda: comm.notify(-1), "no rank -1"),
        (lambda: comm.notify(0, tag=1 << 20), "a tag is a number"),
        (lambda: comm.wait(numbers, comm.size), f"no rank {comm.size}"),
        (lambda: comm.wait(numbers, tag=-2), "a tag is a number"),
    ]

    def refusals():
        said = []
        for call, words in wrong:
            with pytest.raises(UsageError, match=words) as refused:
                call()
            said.append(str(refused.value))
        return said

    short, sequence = refusals(), comm.sequence
    assert activity.operation is None and activity.in_flight == []
    with in_flight(helper):
        assert refusals() == short
    assert all(each.calls == 0 for each in comm.traffic.values()) or sequence == 0
    comm.all_reduce(numbers)  # all ranks are at the same place still


def test_an_algorithm_that_fails(world, monkeypatch):
    """On all ranks: the error comes through, the call counts, and the next one works."""

    def fails(comm, vector, op):
        seen.append(activity.waiting()[0])
        raise RuntimeError("no")

    sys.modules["theirs"].fails, seen = fails, []
    comm = Communicator(world, allreduce="theirs:fails", trace=5)
    with pytest.raises(RuntimeError, match="no"):
        comm.all_reduce(np.zeros(3))
    assert seen == ["all_reduce"] and activity.waiting() is None and activity.last == "all_reduce"
    assert comm.traffic["all_reduce"].calls == 1 and not comm.timeline.spans
    comm.use("tree")
    vector = np.ones(3)
    comm.all_reduce(vector)
    assert (vector == comm.size).all() and len(comm.timeline.spans) == 1


def test_what_is_looked_up_once_is_bounded_and_belongs_to_the_algorithm(world, monkeypatch):
    monkeypatch.setattr(collectives, "MOST_CALLS", 3)
    comm = Communicator(world, allreduce="tree")
    for length in (1, 2, 3, 4, 5, 1, 2):
        vector = np.full(length, 1.0)
        comm.all_reduce(vector)
        assert (vector == comm.size).all() and len(comm._fast_calls) <= 3
    messages = comm.traffic["all_reduce"].messages
    comm.use("shared")
    comm.all_reduce(np.zeros(2))
    assert comm.traffic["all_reduce"].messages == messages


@pytest.mark.parametrize("name", ["shared", "auto", "tree"])
def test_a_communicator_that_was_freed_is_refused(name, world):
    comm, vector = Communicator(world, allreduce=name), np.zeros(3)
    comm.all_reduce(vector)
    comm.free()
    with pytest.raises(MPI.Exception):
        comm.all_reduce(vector)
    assert activity.operation is None
