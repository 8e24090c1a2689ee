"""Groups of ranks that run jobs, and rank 0, which hands out the jobs: dynamic scheduling, no group waits for another.

    ranks        0 1 | 2 3 | 4 5 | 6         --ranks-per-trial 2: three groups, and one rank is left over
    first rank   reports the end of its job to rank 0, and so requests the next job; sleeps until this job comes
    the others   sleep until the first rank of their group has a job
    rank 0       serves requests in a thread beside the training of its own group

With a dedicated controller (`own`), rank 0 is in no group and needs no thread. If rank 0's group is the only one, its
first rank serves itself between jobs. Handing each job to the first free group is list scheduling: it ends at most (1 -
1/groups) longest jobs after the best order (Graham, "Bounds on multiprocessing timing anomalies", 1969). An error of
the controller (a full disk, a bug in a method) does not interrupt running jobs; at the end all ranks raise it."""

import contextlib
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from mpi4py import MPI

from hpcdl.comm import failure, refuse_together
from hpcdl.comm.progress import exempt, nap_until
from hpcdl.errors import AgreedError, LoneError, TrainingError, UsageError
from hpcdl.formatting import counted
from hpcdl.launch.isolated_run import told
from hpcdl.search.controller import Controller
from hpcdl.search.tasks import Result, SearchJob

TELL, ANSWER = 1, 2  # tags
SHORTEST, LONGEST = 1e-4, 5e-3  # seconds that the server sleeps between polls
END = "end"  # the reply to a group when no jobs are left

Work = Callable[[SearchJob, MPI.Intracomm], Result]


class Event(NamedTuple):
    """An event of a job, for observers. kind: begin, again (an interrupted job begins), end or stop (interrupted)."""

    kind: str
    group: int
    job: SearchJob
    result: Result | None = None


class GroupReport(NamedTuple):
    """Message to rank 0: `group` ended `job` with `result` (None: no job yet), requests the next; or a signal came."""

    group: int | None = None
    job: SearchJob | None = None
    result: Result | None = None
    signalled: bool = False


class GroupDivision(NamedTuple):
    """`groups` groups of `ranks` ranks, from rank `first` on, and `left` ranks left over."""

    ranks: int
    groups: int
    first: int
    left: int

    @property
    def leaders(self) -> list[int]:
        return [self.first + group * self.ranks for group in range(self.groups)]

    def group_of(self, rank: int) -> int | None:
        """Return the group of a rank; None: the rank is in no group."""
        group = (rank - self.first) // self.ranks
        return group if 0 <= group < self.groups else None

    def __str__(self) -> str:
        text = f"{counted(self.groups, 'group')} of {counted(self.ranks, 'rank')}"
        text += ", and a controller of its own on rank 0" * self.first
        return f"{text}; {counted(self.left, 'rank')} left over, without work" if self.left else text


def divide_ranks(size: int, ranks: int, own: bool = False) -> GroupDivision:
    """Divide `size` ranks into groups of `ranks`; own: rank 0 is in no group. Raises UsageError if no group fits."""
    if ranks < 1:
        raise UsageError(f"--ranks-per-trial {ranks}: a trial needs one rank or more")
    groups, left = divmod(size - own, ranks)
    if groups == 0:
        available = f"there {'is' if size - own == 1 else 'are'} {counted(size - own, 'rank')}"
        beside = " beside rank 0, which --controller own takes" * own
        raise UsageError(f"--ranks-per-trial {ranks}: {available}{beside}; start mpiexec -n {ranks + own} or more")
    return GroupDivision(ranks, groups, int(own), left)


class JobQueue:
    """Queue, on rank 0, of groups that wait for a job; sends no messages. stop(): True if no more jobs are to begin."""

    def __init__(
        self,
        controller: Controller,
        groups: int,
        stop: Callable[[], bool] = lambda: False,
        watch: Callable[[Event], None] = lambda event: None,
    ):
        self.controller, self.stop, self.watch = controller, stop, watch
        self.waiting: deque[int] = deque()
        self.left = set(range(groups))  # groups that have not received END
        self.stopping = False
        self.error: Exception | None = None
        self.changed = True  # True if a job ended since the controller last had none

    @property
    def stopped(self) -> bool:
        """True if the search was stopped before all jobs were done."""
        return self.stopping and self.error is None and not self.controller.over

    def begin(self, ranks: int) -> None:
        """Record the number of ranks in the journal."""
        with self._kept_error():
            self.controller.begin(ranks, len(self.left))

    def receive(self, report: GroupReport) -> None:
        """Process a report: a group requests a job, or a rank has received a signal."""
        self.stopping |= report.signalled
        if report.group is None:
            return
        self.waiting.append(report.group)
        if report.job is not None and report.result is not None and self.error is None:
            self.changed, self.stopping = True, self.stopping or report.result.stopped
            with self._kept_error():
                self.controller.ended(report.job, report.result)
                kind = "stop" if report.result.stopped else "end"
                self.watch(Event(kind, report.group, report.job, report.result))

    def replies(self) -> list[tuple[int, Any]]:
        """Return (group, reply) that are due: a job, or END for each waiting group if no more jobs begin."""
        self.stopping = self.stopping or self.stop()
        replies: list[tuple[int, Any]] = []
        over = False
        with self._kept_error():
            while self.waiting and not self.stopping and self.error is None and self.changed:
                interrupted = len(self.controller.interrupted)
                job = self.controller.next(self.waiting[0])
                if job is None:
                    self.changed = False
                    break
                again = len(self.controller.interrupted) < interrupted
                self.watch(Event("again" if again else "begin", self.waiting[0], job))
                replies.append((self.waiting.popleft(), job))
            over = bool(self.waiting) and self.error is None and self.controller.over
        if self.stopping or self.error is not None or over:
            replies += [(group, END) for group in self.waiting]
            self.left -= set(self.waiting)
            self.waiting.clear()
        return replies

    @contextlib.contextmanager
    def _kept_error(self) -> Iterator[None]:
        """Context that keeps an exception in `error`: the serving thread goes on, and all ranks raise it at the end."""
        try:
            yield
        except Exception as error:
            self.error = error


class JobServer:
    """Serves `desk` on rank 0: `step` receives reports and replies to them. Call `step` from one thread at a time."""

    def __init__(self, desk: JobQueue, control: MPI.Intracomm, leaders: list[int]):
        self.desk, self.control, self.leaders = desk, control, leaders
        self.inbox: queue.SimpleQueue = queue.SimpleQueue()  # reports of rank 0's own group
        self.reply: queue.SimpleQueue = queue.SimpleQueue()
        self.sent: list[MPI.Request] = []
        self.signals = 0  # number of ranks that reported a signal

    @property
    def over(self) -> bool:
        """True if every group has received END."""
        return not self.desk.left and all(request.Test() for request in self.sent)

    def step(self, nap: float = 0.0) -> bool:
        """Receive all reports, waiting up to `nap` seconds for one, and reply; return True if any message passed."""
        received = 0
        with contextlib.suppress(queue.Empty):
            self.desk.receive(self.inbox.get(timeout=nap) if nap else self.inbox.get_nowait())
            received += 1
        while self.control.size > 1 and (message := self.control.improbe(tag=TELL)) is not None:
            report = message.recv()
            self.signals += report.group is None
            self.desk.receive(report)
            received += 1
        replies = self.desk.replies()
        for group, job in replies:
            if self.leaders[group] == 0:
                self.reply.put(job)
            else:
                self.sent = [request for request in self.sent if not request.Test()]
                self.sent.append(self.control.isend(job, self.leaders[group], ANSWER))
        return bool(received or replies)

    def serve(self, left: Callable[[], bool] = lambda: False) -> None:
        """Step until every group has received END or `left()` is true; sleeps longer the longer nothing arrives."""
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
    """Run all jobs of rank 0's controller in groups of `ranks` ranks; collective. Returns True if it was stopped early.
    work(job, comm): called on all ranks of a group with their communicator; returns the job's result, at least on the
    first rank; its exceptions are not caught. The communicator stays the same until a job fails. stop(): polled on all
    ranks between jobs, on rank 0 all the time; True once no more jobs are to begin. own: rank 0 runs no jobs.
    watch(event): called on rank 0, perhaps in the serving thread, when a job has begun or ended. Raises AgreedError if
    the ranks cannot be divided, TrainingError on all ranks if the controller failed."""
    with refuse_together(world):
        division = divide_ranks(world.size, ranks, own)
        alone = division.groups == 1 and not own
        if world.rank == 0 and not (alone or own) and MPI.Query_thread() < MPI.THREAD_MULTIPLE:
            raise UsageError(
                "this MPI library does not let two threads of rank 0 send messages (MPI_THREAD_MULTIPLE), one to train "
                "and one to hand out trials; give --controller own"
            )
    if world.size > 1:
        failure.install()  # an error of the thread ends the job
    control, group, left = world.Dup(), division.group_of(world.rank), threading.Event()
    comm: Any = world.Split(MPI.UNDEFINED if group is None else group, world.rank)
    server = None
    if world.rank == 0 and controller is not None:
        desk = JobQueue(controller, division.groups, stop, watch)
        desk.begin(world.size)
        server = JobServer(desk, control, division.leaders)
    rank = SearchRank(control, server, alone, stop)
    thread = threading.Thread(target=server.serve, args=(left.is_set,), daemon=True) if server else None
    try:
        if thread is not None and not (alone or own):
            thread.start()
        if server is not None and own:
            with exempt():
                server.serve()
        elif group is not None:
            rank.work(work, group, comm)
        if thread is not None:
            rank.wait(lambda: not thread.is_alive())
        return rank.leave()
    finally:
        left.set()  # also if the job ends early
        if thread is not None and thread.is_alive():
            thread.join()


class SearchRank:
    """One rank in a search. control: communicator of all ranks. server: None but on rank 0. alone: `ask` steps it."""

    def __init__(self, control: MPI.Intracomm, server: JobServer | None, alone: bool, stop: Callable[[], bool]):
        self.control, self.server, self.alone, self.stop = control, server, alone, stop
        self.signal: Any = None  # request of the message that reports a signal

    def work(self, work: Work, group: int, comm: MPI.Intracomm) -> None:
        """Run jobs on the ranks of `comm` until none is left; collective. Frees the communicator."""
        inner, failed, report = comm.Dup(), False, GroupReport(group)
        while True:
            job, failed = self.next(inner, report)
            if failed:
                comm = replace_communicator(comm, inner)
            if job == END:
                break
            begun = time.perf_counter()
            result = work(job, comm)
            if comm.rank == 0:
                result = result if result.seconds else result._replace(seconds=time.perf_counter() - begun)
                report = GroupReport(group, job, result, bool(self.stop()))
        inner.Free()
        comm.Free()

    def next(self, inner: MPI.Intracomm, report: GroupReport) -> tuple[Any, bool]:
        """Report the end of a job; return (the next job or END, True if the ended job failed); collective."""
        job = self.ask(report) if inner.rank == 0 else None
        self.wait(inner.Ibarrier().Test)
        reply: tuple[Any, bool] = inner.bcast((job, report.result is not None and report.result.failed is not None))
        return reply

    def ask(self, report: GroupReport) -> Any:
        server = self.server
        if server is None:
            self.control.send(report, 0, TELL)
            self.wait(lambda: self.control.iprobe(0, ANSWER))
            return self.control.recv(source=0, tag=ANSWER)
        server.inbox.put(report)
        self.wait(lambda: (self.alone and server.step() and False) or not server.reply.empty())
        return server.reply.get()

    def wait(self, condition: Callable[[], object]) -> None:
        """Sleep until the condition holds; report a signal that arrives meanwhile to rank 0, once."""

        def holds() -> object:
            if self.server is None and self.signal is None and self.stop():
                self.signal = self.control.isend(GroupReport(signalled=True), 0, TELL)
            return condition()

        with exempt():
            nap_until(holds, "search", patient=True)

    def leave(self) -> bool:
        """Leave the search together; return True if it was stopped, or raise the controller's error; collective."""
        self.wait(self.control.Ibarrier().Test)
        signalled = self.control.gather(self.signal is not None)
        ended: Any = None
        if self.server is not None:
            desk = self.server.desk
            for _ in range(sum(signalled or []) - self.server.signals):  # reports that the next search must not receive
                self.control.recv(tag=TELL)
            ended = desk.stopped, None
            if isinstance(desk.error, UsageError):
                ended = desk.stopped, AgreedError(str(desk.error))
            elif desk.error is not None:
                ours = isinstance(desk.error, TrainingError | LoneError)
                why = str(desk.error) if ours else f"the search cannot go on: {told(desk.error)}"
                ended = desk.stopped, TrainingError(why)
        stopped, error = self.control.bcast(ended)
        if self.signal is not None:
            self.signal.Wait()
        self.control.Free()
        if error is not None:
            raise error
        return stopped


def replace_communicator(comm: MPI.Intracomm, inner: MPI.Intracomm) -> MPI.Intracomm:
    """Return a duplicate of `inner` to replace `comm` after a failed job that all ranks have left; collective. Receives
    the messages pending in `comm` and frees it: MPI may reuse its context number for another communicator."""
    new, status = inner.Dup(), MPI.Status()
    while (message := comm.Improbe(status=status)) is not None:
        message.Recv([bytearray(status.Get_count(MPI.BYTE)), MPI.BYTE])
    comm.Free()
    return new
