"""hpcdl/search/groups.py: groups of ranks do all jobs, each once; what goes wrong reaches all ranks."""

import collections
import os
import time

import pytest
from mpi4py import MPI
from searching import Rungs, ends, events, results

from hpcdl.errors import AgreedError, TrainingError, UsageError
from hpcdl.search import groups
from hpcdl.search.controller import Controller
from hpcdl.search.groups import END, GroupDivision, GroupReport, JobQueue, divide_ranks, run
from hpcdl.search.journal import NAME, Journal
from hpcdl.search.tasks import Result


def started(comm, method=None, folder=None, seeds=1):
    """A controller on rank 0."""
    return Controller(method or Rungs(6), seeds, False, Journal.open(folder, {}, True)) if comm.rank == 0 else None


class Work:
    """What the ranks of a group have seen."""

    def __init__(self, fails=()):
        self.seen, self.comms, self.fails = [], set(), fails

    def __call__(self, job, comm):
        assert comm.allreduce(job.task.trial) == comm.size * job.task.trial, "all ranks of a group have the same job"
        self.seen.append(job.key)
        self.comms.add(comm.size)
        if job.task.trial in self.fails:
            comm.isend("late", (comm.rank + 1) % comm.size, 7)  # nobody takes it
            return Result(failed="no luck")
        while comm.iprobe(MPI.ANY_SOURCE, 7):
            raise AssertionError("a message of a job that has failed")
        return Result(job.task.values["x"])


@pytest.mark.least(1)
@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("rungs", [1, 3])
def test_all_is_done_once(comm, own, ranks, rungs):
    if comm.size < ranks + own:
        with pytest.raises(AgreedError, match="--ranks-per-trial"):
            run(comm, ranks, Work(), started(comm), own)
        return
    controller, work = started(comm, Rungs(8, rungs), seeds=2), Work(fails=(2,))
    assert run(comm, ranks, work, controller, own) is False
    division = divide_ranks(comm.size, ranks, own)
    assert work.comms <= {ranks} and (division.group_of(comm.rank) is not None or not work.seen)
    seen = comm.allgather(work.seen)
    if comm.rank == 0:
        failed = sum(each.failed is not None for each in results(controller))
        assert controller.over and (failed == 2 or rungs > 1)
        led = collections.Counter(key for leader in division.leaders for key in seen[leader])
        assert set(led.values()) == {1} and set(led) == {
            (*task, seed) for task, found in controller.results.items() for seed in found
        }
        leg = next(event for event in controller.journal.events if event["event"] == "leg")
        assert (leg["ranks"], leg["groups"]) == (comm.size, division.groups)


def test_nothing_to_do(each_group):
    each_group(lambda comm: run(comm, 1, Work(), started(comm, Rungs(0))), least=1)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("own", [False, True])
def test_no_group_waits_for_another(world, mpi_tmp_path, own):
    """Trial 0 ends when all others have been done, by whatever group it is on."""
    if world.size < 2 + own:
        return

    def work(job, comm):
        (mpi_tmp_path / str(job.task.trial)).touch()
        begun = time.monotonic()
        while job.task.trial == 0 and len([*mpi_tmp_path.iterdir()]) < 12:
            assert time.monotonic() - begun < 30, "the others wait for this one"
            time.sleep(1e-3)
        return Result(1.0)

    assert run(world, 1, work, started(world, Rungs(12)), own) is False


@pytest.mark.least(1)
@pytest.mark.parametrize("own", [False, True])
def test_a_signal_on_any_rank_ends_it_in_good_order(comm, own):
    if comm.size < 1 + own:
        return
    for signalled in {0, comm.size - 1}:
        begun, controller = [], started(comm, Rungs(1000))

        def work(job, group, begun=begun, signalled=signalled):
            begun.append(job)
            return Result(1.0)

        def stop(begun=begun, signalled=signalled):
            return comm.rank == signalled and (len(begun) > 2 or (own and comm.rank == 0))

        assert run(comm, 1, work, controller, own, stop) is True
        if comm.rank == 0:
            assert len(results(controller)) < 1000 and not controller.running and not controller.over


def test_a_signal_that_comes_when_all_is_done_is_no_word_for_the_next_search(each_group, monkeypatch):
    """The library gives the context of a communicator to the next one, with what nobody has taken."""
    leaving, leave = [], groups.SearchRank.leave

    def left(self):
        leaving.append(True)
        return leave(self)

    monkeypatch.setattr(groups.SearchRank, "leave", left)

    def body(comm):
        def stop():
            if leaving and comm.rank == comm.size - 1:
                time.sleep(0.02)  # rank 0 has left meanwhile, unless it asks who has told
            return bool(leaving) and comm.rank == comm.size - 1

        for _ in range(3):
            leaving.clear()
            assert run(comm, 1, Work(), started(comm), stop=stop) is False

    each_group(body, least=2)


@pytest.mark.least(1)
def test_a_job_that_was_stopped_has_no_end(comm):
    controller = started(comm)
    stopped = []

    def work(job, group):
        stopped.append(job.task.trial >= 2)
        return Result(stopped=True) if stopped[-1] else Result(1.0)

    assert run(comm, 1, work, controller) is True
    if comm.rank == 0:
        names = collections.Counter(event["event"] for event in controller.journal.events)
        assert names["begin"] - names["end"] == len(controller.interrupted) > 0
    assert any(comm.allgather(any(stopped)))


class Mistaken(Rungs):
    def tell(self, task, loss):
        raise ZeroDivisionError("a mistake of the method")


class Refuses(Rungs):
    def ask(self):
        raise UsageError("give another space")


@pytest.mark.least(1)
@pytest.mark.parametrize("own", [False, True])
def test_what_goes_wrong_in_the_controller_reaches_all_ranks(comm, own, mpi_tmp_path, monkeypatch):
    if comm.size < 1 + own:
        return
    with pytest.raises(TrainingError, match=r"the search cannot go on: ZeroDivisionError: a mistake of the method"):
        run(comm, 1, Work(), started(comm, Mistaken(5)), own)
    with pytest.raises(AgreedError, match="give another space"):
        run(comm, 1, Work(), started(comm, Refuses(5)), own)

    def watch(event):
        raise RuntimeError("no terminal")

    with pytest.raises(TrainingError, match="no terminal"):
        run(comm, 1, Work(), started(comm), own, watch=watch)
    controller = started(comm, Rungs(20), mpi_tmp_path if comm.rank == 0 else None)
    synced = []

    def full(file):
        synced.append(file)
        if len(synced) == 5:
            raise OSError(28, os.strerror(28))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(TrainingError, match=f"{NAME} cannot be written: No space left"):
        run(comm, 1, Work(), controller, own)
    monkeypatch.undo()
    if comm.rank == 0:
        found = events(mpi_tmp_path / NAME)
        assert len(found) == 6 and len(ends(found)) < 5
        (mpi_tmp_path / NAME).unlink()
    assert run(comm, 1, Work(), started(comm), own) is False  # and the ranks are as before


@pytest.mark.least(1)
def test_who_watches_sees_each_job(comm):
    seen, controller = [], started(comm)
    run(comm, 1, Work(fails=(1,)), controller, watch=seen.append)
    assert (len(seen) == 12) == (comm.rank == 0)
    for trial in range(6) if seen else ():
        begin, end = (each for each in seen if each.job.task.trial == trial)
        assert (begin.kind, end.kind, begin.group) == ("begin", "end", end.group)
        assert begin.result is None and end.result.seconds > 0 and (end.result.failed is not None) == (trial == 1)


def test_communicators_are_given_back():
    """MPICH has 2048."""
    for _ in range(2100):
        run(MPI.COMM_SELF, 1, Work(), started(MPI.COMM_SELF, Rungs(0)))


@pytest.mark.mpi(min_size=2)
def test_a_library_without_threads_is_refused(world, monkeypatch):
    monkeypatch.setattr(groups.MPI, "Query_thread", lambda: MPI.THREAD_FUNNELED, raising=False)
    with pytest.raises(AgreedError, match="give --controller own"):
        run(world, 1, Work(), started(world))
    assert run(world, world.size, Work(), started(world)) is False  # one group needs no thread
    assert run(world, 1, Work(), started(world), own=True) is False


OWN = ", and a controller of its own on rank 0"


@pytest.mark.parametrize(
    "size, ranks, own, division, text",
    [
        (8, 2, False, GroupDivision(2, 4, 0, 0), "4 groups of 2 ranks"),
        (8, 3, False, GroupDivision(3, 2, 0, 2), "2 groups of 3 ranks; 2 ranks left over, without work"),
        (8, 3, True, GroupDivision(3, 2, 1, 1), f"2 groups of 3 ranks{OWN}; 1 rank left over, without work"),
        (1, 1, False, GroupDivision(1, 1, 0, 0), "1 group of 1 rank"),
    ],
)
def test_how_ranks_are_divided(size, ranks, own, division, text):
    assert divide_ranks(size, ranks, own) == division and str(division) == text
    found = collections.Counter(division.group_of(rank) for rank in range(size))
    assert found.pop(None, 0) == division.left + own and found == dict.fromkeys(range(division.groups), ranks)
    assert [division.group_of(leader) for leader in division.leaders] == [*range(division.groups)]


def test_too_few_ranks_are_told():
    with pytest.raises(UsageError, match="--ranks-per-trial 3: there are 2 ranks; start mpiexec -n 3 or more"):
        divide_ranks(2, 3)
    with pytest.raises(UsageError, match="there are 0 ranks beside rank 0, which --controller own takes"):
        divide_ranks(1, 1, own=True)
    with pytest.raises(UsageError, match="one rank or more"):
        divide_ranks(4, 0)


def test_the_desk_is_list_scheduling():
    """Each job goes to who is free first: with these lengths the groups end when the best list schedule does."""
    lengths = [5, 3, 8, 1, 4, 9, 2, 6, 7, 3]
    desk, clock, running = JobQueue(started(MPI.COMM_SELF, Rungs(10)), 3), 0, {}
    free, given = [0] * 3, []
    for group in range(3):
        desk.receive(GroupReport(group))
    while desk.left:
        for group, job in desk.replies():
            if job != END:
                given.append((job.task.trial, group, clock))
                running[group] = clock + lengths[job.task.trial], job
        if running:
            group = min(running, key=lambda each: (running[each][0], each))
            clock, job = running.pop(group)
            desk.receive(GroupReport(group, job, Result(1.0)))
    for trial, group, begin in given:  # as of a list: the next one to who is free first
        assert begin == min(free) == free[group] and trial == given.index((trial, group, begin))
        free[group] = begin + lengths[trial]
    assert clock == max(free)
