"""Groups of ranks that work on jobs, and rank 0, which hands them out: a free group asks, and waits for no other.

    ranks        0 1 | 2 3 | 4 5 | 6         --ranks-per-trial 2: three groups, and one rank is left over
    first rank   tells rank 0 how its job has ended, and so asks for the next one; it naps until that is there
    the others   nap until the first one has it
    rank 0       a thread beside the training of its own group, which looks for messages and naps between

With a controller of its own (`own`), rank 0 is in no group and needs no thread; where rank 0's group is the only one,
its first rank looks after the search itself, between jobs. Handing each job to who is free first is list scheduling:
the groups are done at most (1 - 1/groups) longest jobs after the best order there is (Graham, "Bounds on
multiprocessing timing anomalies", SIAM Journal on Applied Mathematics, 1969).

Messages are pickled, some hundred bytes a job. Whoever waits here is known to wait, for however long. An error of the
controller (a full disk, a mistake in a method) is no reason to break off what runs: no group gets another job, and when
all have come, all ranks raise it.
"""

import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

from mpi4py import MPI

from hpcdl.comm import failure, refuse_together
from hpcdl.comm.progress import activity, nap_until
from hpcdl.errors import AgreedError, LoneError, TrainingError, UsageError
from hpcdl.formatting import counted
from hpcdl.launch.isolated_run import told
from hpcdl.search.controller import Controller
from hpcdl.search.tasks import Result, SearchJob

TELL, ANSWER = 1, 2  # tags
SHORTEST, LONGEST = 1e-4, 5e-3  # seconds of a nap of who hands out
END = "end"  # the answer to a group for which nothing is left to do

Work = Callable[[SearchJob, MPI.Intracomm], Result]


class Event(NamedTuple):
    """What who watches is told of a group's job. kind: "begin", "again" (one that was interrupted), "end", "stop"."""

    kind: str
    group: int
    job: SearchJob
    result: Result | None = None


class GroupReport(NamedTuple):
    """What a rank tells rank 0: its group has ended a job, if it had one, and asks for one; or it has had a signal."""

    group: int | None = None
    job: SearchJob | None = None
    result: Result | None = None
    signalled: bool = False


class GroupDivision(NamedTuple):
    """Which ranks make which group: `groups` of `ranks` from rank `first` on, and `left` ranks over."""

    ranks: int
    groups: int
    first: int
    left: int

    @property
    def leaders(self) -> list[int]:
        """The first rank of each group."""
        return [self.first + group * self.ranks for group in range(self.groups)]

    def group_of(self, rank: int) -> int | None:
        """Which group a rank is in; None: in none."""
        group = (rank - self.first) // self.ranks
        return group if 0 <= group < self.groups else None

    def __str__(self) -> str:
        """In words, with what is left over."""
        text = f"{counted(self.groups, 'group')} of {counted(self.ranks, 'rank')}"
        text += ", and a controller of its own on rank 0" * self.first
        naps = "naps" if self.left == 1 else "nap"
        return f"{text}; {counted(self.left, 'rank')} left over, which {naps}" if self.left else text


def divided(size: int, ranks: int, own: bool = False) -> GroupDivision:
    """`size` ranks in groups of `ranks`; own: rank 0 is in none. Raises UsageError where there is no group."""
    if ranks < 1:
        raise UsageError(f"--ranks-per-trial {ranks}: a trial takes one rank or more")
    groups, left = divmod(size - own, ranks)
    if groups == 0:
        there = f"there {'is' if size - own == 1 else 'are'} {counted(size - own, 'rank')}"
        beside = " beside the one of --controller own" * own
        raise UsageError(f"--ranks-per-trial {ranks}: {there}{beside}; start mpiexec -n {ranks + own} or more")
    return GroupDivision(ranks, groups, int(own), left)


class Desk:
    """Where groups tell and ask (rank 0). Who asks while there is no job waits in a line; pure, without messages.

    stop(): whether no more jobs are to be handed out. `answers` are to be given: a group and its job, or END.
    """

    def __init__(
        self,
        controller: Controller,
        groups: int,
        stop: Callable[[], bool] = lambda: False,
        watch: Callable[[Event], None] = lambda event: None,
    ):
        self.controller, self.stop, self.watch = controller, stop, watch
        self.waiting: deque[int] = deque()
        self.left = set(range(groups))  # who has not been told the end
        self.stopping = False
        self.error: Exception | None = None
        self.changed = True  # whether somebody has asked or told since the controller had no job

    @property
    def stopped(self) -> bool:
        """Whether something is left to do, of a search that was to stop."""
        return self.stopping and self.error is None and not self.controller.over

    def begin(self, ranks: int) -> None:
        """The journal is told on how many ranks it goes on."""
        self._try(self.controller.begin, ranks, len(self.left))

    def told(self, said: GroupReport) -> None:
        """A group has ended its job and asks, or a rank has had a signal."""
        self.stopping |= said.signalled
        if said.group is None:
            return
        self.waiting.append(said.group)
        if said.job is not None and said.result is not None and self.error is None:
            self.changed, self.stopping = True, self.stopping or said.result.stopped
            self._try(self._ended, said.group, said.job, said.result)

    def answers(self) -> list[tuple[int, Any]]:
        """What is to be answered now: to each group that waits its job, or END to all when there is none any more."""
        self.stopping = self.stopping or self.stop()
        found: list[tuple[int, Any]] = []
        while self.waiting and not self.stopping and self.error is None and self.changed:
            job = self._try(self._next)
            if job is None:
                self.changed = False
            else:
                found.append((self.waiting.popleft(), job))
        over = self.waiting and self.error is None and self._try(lambda: self.controller.over)
        if self.stopping or self.error is not None or over:
            found += [(group, END) for group in self.waiting]
            self.left -= set(self.waiting)
            self.waiting.clear()
        return found

    def _ended(self, group: int, job: SearchJob, result: Result) -> None:
        self.controller.ended(job, result)
        self.watch(Event("stop" if result.stopped else "end", group, job, result))

    def _next(self) -> SearchJob | None:
        group = self.waiting[0]
        before = len(self.controller.interrupted)
        job = self.controller.next(group)
        if job is not None:
            self.watch(Event("begin" if len(self.controller.interrupted) == before else "again", group, job))
        return job

    def _try(self, step: Callable[..., Any], *arguments: Any) -> Any:
        """Whatever goes wrong here is kept for all ranks: a thread must not end with it."""
        try:
            return step(*arguments)
        except Exception as error:
            self.error = error
            return None


class JobServer:
    """The desk's messages (rank 0): `step` takes what has come and answers. One thread at a time steps."""

    def __init__(self, desk: Desk, control: MPI.Intracomm, leaders: list[int]):
        self.desk, self.control, self.leaders = desk, control, leaders
        self.inbox: queue.SimpleQueue = queue.SimpleQueue()  # of the group whose first rank is rank 0
        self.answer: queue.SimpleQueue = queue.SimpleQueue()
        self.sent: list[MPI.Request] = []
        self.signals = 0  # ranks that have told of one

    @property
    def over(self) -> bool:
        """Whether all groups have been told the end."""
        return not self.desk.left and all(request.Test() for request in self.sent)

    def step(self, nap: float = 0.0) -> bool:
        """Take what has come, after a nap at most so long where nothing has; whether there was anything."""
        come = 0
        try:
            self.desk.told(self.inbox.get(timeout=nap) if nap else self.inbox.get_nowait())
            come += 1
        except queue.Empty:
            pass
        while self.control.size > 1 and (message := self.control.improbe(tag=TELL)) is not None:
            said = message.recv()
            self.signals += said.group is None
            self.desk.told(said)
            come += 1
        answers = self.desk.answers()
        for group, job in answers:
            if self.leaders[group] == 0:
                self.answer.put(job)
            else:
                self.sent = [request for request in self.sent if not request.Test()]
                self.sent.append(self.control.isend(job, self.leaders[group], ANSWER))
        return bool(come or answers)

    def serve(self, left: Callable[[], bool] = lambda: False) -> None:
        """Step until all groups have been told the end, or this process has left; it naps where nothing comes."""
        nap = SHORTEST
        while not self.over and not left():
            nap = SHORTEST if self.step(nap) else min(2 * nap, LONGEST)


def run(
    world: MPI.Intracomm,
    ranks: int,
    work: Work,
    controller: Controller | None,
    own: bool = False,
    stop: Callable[[], bool] = lambda: False,
    watch: Callable[[Event], None] = lambda event: None,
) -> bool:
    """Do all jobs of the controller (rank 0's) in groups of `ranks` ranks; collective. Returns whether it was stopped.

    work(job, comm): is called on all ranks of a group, with their communicator, and returns the job's result on the
    first one at least; what it raises is not caught. The communicator is the same from job to job, but for a new one
    after a job that has failed. stop(): asked on all ranks between jobs, and on rank 0 all the time: whether no more
    jobs are to be begun. own: rank 0 works on none. watch(event): is called on rank 0, by who hands out, when a job
    has begun or ended.

    Raises AgreedError where the ranks do not do, TrainingError on all ranks where the controller could not go on.
    """
    with refuse_together(world):
        division = divided(world.size, ranks, own)
        alone = division.groups == 1 and not own
        if world.rank == 0 and not (alone or own) and MPI.Query_thread() < MPI.THREAD_MULTIPLE:
            raise UsageError(
                "this MPI library does not let two threads of a rank send messages, as rank 0 would, which works and "
                "hands out; give --controller own"
            )
    if world.size > 1:
        failure.install()  # an error of the thread ends the job
    control, group, left = world.Dup(), division.group_of(world.rank), threading.Event()
    comm: Any = world.Split(MPI.UNDEFINED if group is None else group, world.rank)
    server = None
    if world.rank == 0 and controller is not None:
        desk = Desk(controller, division.groups, stop, watch)
        desk.begin(world.size)
        server = JobServer(desk, control, division.leaders)
    rank = SearchRank(control, server, alone, stop)
    thread = threading.Thread(target=server.serve, args=(left.is_set,), daemon=True) if server else None
    try:
        if thread is not None and not (alone or own):
            thread.start()
        if server is not None and own:
            with activity.known():
                server.serve()
        elif group is not None:
            rank.work(work, group, comm)
        if thread is not None:
            rank.wait(lambda: not thread.is_alive())
        return rank.leave()
    finally:
        left.set()  # where the job ends early, too
        if thread is not None and thread.is_alive():
            thread.join()


class SearchRank:
    """What a rank does in a search. control: the communicator of all; server: rank 0's, which it steps if `alone`."""

    def __init__(self, control: MPI.Intracomm, server: JobServer | None, alone: bool, stop: Callable[[], bool]):
        self.control, self.server, self.alone, self.stop = control, server, alone, stop
        self.signal: Any = None  # the message that this rank has had one

    def work(self, work: Work, group: int, comm: MPI.Intracomm) -> None:
        """Ask, do and tell, with the ranks of `comm`, until nothing is left; collective. Frees the communicator."""
        inner, failed, said = comm.Dup(), False, GroupReport(group)
        while True:
            job, failed = self.next(inner, said)
            if failed:
                comm = renewed(comm, inner)
            if job == END:
                break
            begun = time.perf_counter()
            result = work(job, comm)
            if comm.rank == 0:
                result = result if result.seconds else result._replace(seconds=time.perf_counter() - begun)
                said = GroupReport(group, job, result, bool(self.stop()))
        inner.Free()
        comm.Free()

    def next(self, inner: MPI.Intracomm, said: GroupReport) -> tuple[Any, bool]:
        """Tell how a job has ended and get the next one, or END; collective over a group, in naps.

        Returns on all its ranks, too, whether the one that has ended has failed.
        """
        job = self.ask(said) if inner.rank == 0 else None
        come = inner.Ibarrier()
        self.wait(come.Test)
        found: tuple[Any, bool] = inner.bcast((job, said.result is not None and said.result.failed is not None))
        return found

    def ask(self, said: GroupReport) -> Any:
        """The first rank of a group tells and asks."""
        server = self.server
        if server is None:
            self.control.send(said, 0, TELL)
            self.wait(lambda: self.control.iprobe(0, ANSWER))
            return self.control.recv(source=0, tag=ANSWER)
        server.inbox.put(said)
        self.wait(lambda: (self.alone and server.step() and False) or not server.answer.empty())
        return server.answer.get()

    def wait(self, condition: Callable[[], object]) -> None:
        """Nap until the condition holds; a signal that comes meanwhile is told to rank 0."""
        with activity.known():
            nap_until(lambda: self.told_signal() or condition(), "search", patient=True)

    def told_signal(self) -> bool:
        """Tell rank 0, once, that this rank is to stop; False."""
        if self.server is None and self.signal is None and self.stop():
            self.signal = self.control.isend(GroupReport(signalled=True), 0, TELL)
        return False

    def leave(self) -> bool:
        """All ranks come out together, with how it has ended; collective."""
        come = self.control.Ibarrier()
        self.wait(come.Test)
        told = self.control.gather(self.signal is not None)
        ended = None
        if self.server is not None:
            desk = self.server.desk
            for _ in range(sum(told or []) - self.server.signals):  # they came too late; the next search must not hear
                self.control.recv(tag=TELL)
            ended = desk.stopped, desk.error and in_words(desk.error)
        stopped, error = self.control.bcast(ended)
        if self.signal is not None:
            self.signal.Wait()
        self.control.Free()
        if error is not None:
            kind, text = error
            raise kind(text)
        return stopped


def renewed(comm: MPI.Intracomm, inner: MPI.Intracomm) -> MPI.Intracomm:
    """A communicator of the same ranks for the jobs after one that has failed; collective. All have come out of that.

    What it had sent, and nobody taken, would be there for a later one: the library gives a context's number again to a
    new communicator, with the messages that lie there. So they are taken out.
    """
    new, status = inner.Dup(), MPI.Status()
    while (message := comm.Improbe(status=status)) is not None:
        message.Recv([bytearray(status.Get_count(MPI.BYTE)), MPI.BYTE])
    comm.Free()
    return new


def in_words(error: Exception) -> tuple[type[Exception], str]:
    """The error of the controller as all ranks raise it."""
    if isinstance(error, UsageError):
        return AgreedError, str(error)
    ours = isinstance(error, TrainingError | LoneError)
    return TrainingError, str(error) if ours else f"the search cannot go on: {told(error)}"
