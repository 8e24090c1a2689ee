"""Schedules in compiled code: the messages, the additions and the counts of the generators that they are made from."""

import numpy as np
import pytest
from mpi4py import MPI

from hpcdl.chunks import chunks
from hpcdl.comm import Communicator
from hpcdl.comm.allreduce import ALGORITHMS
from hpcdl.comm.collective_schedule import Until
from hpcdl.comm.compiled_schedule import LONGEST, Recorder, ScheduleRunner, functions, record
from hpcdl.comm.counting import CountingIntracomm
from hpcdl.comm.operations import SUM
from hpcdl.comm.progress import activity
from hpcdl.kernels import schedule as kernels
from hpcdl.kernels import shared

pytestmark = pytest.mark.four
FIXED = sorted(name for name, each in ALGORITHMS.items() if each.fixed)
LENGTHS = [0, 1, 2, 7, 100, 5003]


def counted(comm):
    """Return what the communicator has counted: bytes, messages, and the sizes by receiver."""
    costs = comm.traffic["all_reduce"]
    return costs.bytes, costs.messages, {to: list(row) for to, row in comm.traffic.sent.items()}


@pytest.mark.parametrize("name", FIXED)
@pytest.mark.parametrize("case", ["float32 sum", "float64 mean", "int16 max", "float64 min"])
def test_it_does_what_the_generator_does(name, case, world):
    dtype, op = case.split()
    fast, slow = (Communicator(world, allreduce=name) for _ in range(2))
    for size in LENGTHS:
        given = (100 * np.random.default_rng([size, world.rank]).standard_normal(size)).astype(dtype)
        if op == "min" and size:
            given[world.rank % size] = np.nan
        vectors = given.copy(), given.copy()
        for _ in range(2):
            fast.all_reduce(vectors[0], op)
            slow.iall_reduce(vectors[1], op).wait()
            assert vectors[0].tobytes() == vectors[1].tobytes()
    assert (fast._runner is not None) == (world.size > 1) and counted(fast) == counted(slow)


@pytest.mark.parametrize("name", FIXED)
def test_one_rank_may_take_it_and_another_the_generator(name, world):
    """Both send the same messages with the same tags."""
    comm = Communicator(world, allreduce=name)
    for turn in range(3):
        vector = np.arange(50.0)
        if (world.rank + turn) % 2:
            comm.all_reduce(vector)
        else:
            comm.iall_reduce(vector).wait()
        assert np.array_equal(vector, world.size * np.arange(50.0))


@pytest.mark.parametrize(("name", "compiles"), [("ring", True), ("auto", True), ("mpi", False)])
def test_it_is_compiled_before_the_first_all_reduce(name, compiles, world, monkeypatch):
    comm, asked = Communicator(world, allreduce=name), []
    monkeypatch.setattr("hpcdl.comm.collectives.compile_for", asked.append)
    comm.compile_for(np.dtype("float64"))
    assert asked == [np.dtype("float64")] * (compiles and world.size > 1)


@pytest.mark.parametrize("case", ["long", "survive", "drill", "no functions"])
def test_it_gives_way_to_the_generator(case, world, monkeypatch):
    class Drill(CountingIntracomm):
        sends = 0

        def Isend(self, *arguments):
            Drill.sends += 1
            return super().Isend(*arguments)

    comm = Communicator(world, allreduce="ring")
    size = 1 + LONGEST // 8 if case == "long" else 100
    if case == "survive":
        monkeypatch.setattr(activity, "survives", True)
    if case == "no functions":
        monkeypatch.setattr("hpcdl.comm.compiled_schedule.functions", lambda: None)
    if case == "drill":
        comm.send_through(Drill)
    ran = []
    monkeypatch.setattr(ScheduleRunner, "bind", lambda *given: lambda vector: ran.append(vector))
    vector = np.full(size, 1.0)
    comm.all_reduce(vector)
    assert (vector == world.size).all() and not ran
    assert Drill.sends == (2 * (world.size - 1) if case == "drill" else 0)


def exchanging(comm, vector, op):
    """A generator with several messages in flight, tags, and a part of a part of its scratch memory."""
    rank, size = comm.Get_rank(), comm.Get_size()
    boxes = np.empty((2, vector.size), vector.dtype)
    half = chunks(vector.size, 2)
    coming = [comm.Irecv(boxes[1][part], (rank - 1) % size, tag) for tag, part in enumerate(half)]
    going = [comm.Issend(vector[half[1]], (rank + 1) % size, 1), comm.Isend(vector[half[0]], (rank + 1) % size, 0)]
    yield [coming[1]]
    yield going
    op(vector[half[1]], boxes[1][half[1]])
    yield coming[:1]
    op(vector[half[0]], boxes[1][half[0]])


def test_requests_stay_in_flight_over_waits_and_slots_are_used_again(world):
    comm = world.Dup()
    vector = np.arange(11.0) * (world.rank + 1)
    schedule = record(exchanging, comm, vector, SUM)
    assert schedule.slots == 4 and schedule.messages == 2 and schedule.bytes == vector.nbytes
    ring = record(ALGORITHMS["ring"].steps, comm, vector, SUM)
    assert ring.slots == (2 if world.size > 1 else 0)
    ScheduleRunner(comm).bind(schedule, vector, SUM)(vector)
    assert np.array_equal(vector, np.arange(11.0) * (world.rank + 1 + (world.rank - 1) % world.size + 1))
    comm.Free()


def test_what_is_not_fixed_is_refused():
    vector = np.ones(4)

    def unfinished(comm, vector, op):
        comm.Isend(vector, 0)
        yield []

    with pytest.raises(TypeError, match="for all its messages"):
        record(unfinished, MPI.COMM_SELF, vector, SUM)
    with pytest.raises(TypeError, match="for messages only"):
        record(lambda *_: iter([Until(lambda: True)]), MPI.COMM_SELF, vector, SUM)


def test_a_signal_handler_has_its_turn_and_may_end_the_call(world, monkeypatch):
    """After that, the memory that MPI may still write to is not used again."""
    comm = world.Dup()
    runner, vector = ScheduleRunner(comm), np.ones(1000)
    schedule = record(ALGORITHMS["tree"].steps, comm, vector, SUM)
    turns = []

    def loop(*given):
        turns.append(given[0])
        if len(turns) == 3:
            raise KeyboardInterrupt
        return shared.WAITING

    with monkeypatch.context() as patched:
        patched.setattr(kernels.run, "version", lambda _: loop, raising=False)
        run = runner.bind(schedule, vector, SUM)
        before, runner.words[kernels.ROW] = runner.scratch, 1
        with pytest.raises(KeyboardInterrupt):
            run(vector)
    assert len(turns) == 3 and runner.words[kernels.ROW] == 0
    given, _, scratch = activity.abandoned.pop()
    assert given is vector and scratch is before and not np.shares_memory(scratch, runner.scratch)
    runner.bind(schedule, vector, SUM)(vector)
    assert (vector == world.size).all()
    comm.Free()


@pytest.mark.mpi(min_size=2)
def test_an_error_of_mpi_is_raised(world):
    """Here a message that is longer than its buffer; then all memory is new."""
    comm = world.Dup()
    runner, vector = ScheduleRunner(comm), np.ones(10 + 10 * (world.rank == 1))

    def to_rank_0(comm, vector, op):
        if comm.Get_rank() < 2:
            message = comm.Isend(vector, 0) if comm.Get_rank() else comm.Irecv(vector, 1)
            yield [message]

    run = runner.bind(record(to_rank_0, comm, vector, SUM), vector, SUM)
    if world.rank == 0:
        with pytest.raises(MPI.Exception) as raised:
            run(vector)
        assert raised.value.Get_error_class() == MPI.ERR_TRUNCATE and activity.abandoned.pop()[0] is vector
    else:
        run(vector)
    comm.Barrier()
    comm.Free()


def test_functions_are_those_of_this_library():
    """So the fast path is taken on this machine, and not quietly left out."""
    assert functions() is not None and len(set(functions())) == 4


def test_places_in_the_scratch_begin_at_cache_lines():
    recorder = Recorder(MPI.COMM_SELF, np.empty(3))
    one, other = np.empty(5), np.empty((2, 3), np.float32)
    assert [recorder.place(part) for part in (one[2:], other[1], one, other)] == [-17, -1 - 64 - 12, -1, -65]
    assert recorder.place(recorder.vector[1:]) == 8 and recorder.bytes == 128
