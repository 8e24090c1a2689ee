"""End a job that hangs, and say which ranks wait in which operation, called from where.

A thread on every rank, one for all its communicators, looks at what the rank is doing. A rank that has waited long in
one operation, for a second, then two, four and so on, tells rank 0, whose thread asks all ranks. From their answers it
sees what no timeout needs to tell: ranks that call different things together (hpcdl/comm/call_matching.py), and ranks
that wait for one that has left its program (deadlock.py). Either ends the job with one line. With a timeout, so does an
operation that has lasted longer, with a line for each rank, unless a rank does what all know of, as scoring or writing
a checkpoint.

The answers come from the threads, so a rank that computes, or hangs elsewhere, is heard, too. If rank 0 does not react
(it may be stopped), the rank whose timeout is over speaks for itself and ends the job. All this needs MPI's
THREAD_MULTIPLE; without it each rank speaks for itself, and of timeouts alone.

A rank whose program ends says so to rank 0, and rank 0 listens until all ranks have said it. (Python tells nobody of a
SystemExit that ends a program, and MPI_Finalize waits for the others, who may wait for this rank.)
"""

import json
import math
import os
import sys
import threading
import time
import traceback
import zlib
from collections import Counter
from typing import Any

import numpy as np
from mpi4py import MPI

from hpcdl import kernels, shared_memory
from hpcdl.comm.diagnostics import status_signal
from hpcdl.comm.diagnostics.call_signature import ALL
from hpcdl.comm.diagnostics.call_site import innermost, place
from hpcdl.comm.diagnostics.deadlock import (
    LONG,
    TOGETHER,
    RankStatus,
    as_said,
    conclusions,
    crossed,
    different,
    explained,
    stuck,
    wait_for_each_other,
    waits_for_ever,
)
from hpcdl.comm.job_abort import at_the_end, end_job
from hpcdl.comm.progress import Awaits, Wait, activity

BELOW = (
    *(os.path.dirname(file) + os.sep for file in (os.path.dirname(__file__), kernels.__file__)),
    shared_memory.__file__,
)
SELDOM, PERIOD = 30.0, 0.25  # seconds between two questions at most; between two looks
FREED = 1000  # communicators that are remembered when they are freed
MOST = 4  # alarms that are looked into at a time
watching: list["Watchdog"] = []  # of this process
looking = threading.Lock()  # held while the thread looks, and where the list changes


class Eyes(threading.Thread):
    """The one thread of this process, which looks for all its watchdogs."""

    def __init__(self) -> None:
        super().__init__(name="hpcdl-watchdog", daemon=True)

    def run(self) -> None:
        while True:
            time.sleep(min((each.period for each in list(watching)), default=PERIOD))
            if activity.flight is not None:
                activity.flight.beat()
            if watching and status_signal.come():
                watching[0].show_where_asked()
            for each in list(watching):
                with looking:
                    if not each.stopped.is_set():
                        each.look()


eyes = Eyes()


def leave(*_: Any) -> None:
    """The program of this rank ends: the others learn of it, and rank 0 stays to listen until all have left."""
    leaving = [each for each in watching if each.process == os.getpid()]  # and not of one that was forked
    for each in leaving:
        each.farewell()
    while not all([each.last() for each in leaving]):
        time.sleep(0.001)


# Also where a program calls MPI.Finalize itself, which first takes back what is kept with COMM_SELF.
FINALIZING = MPI.Comm.Create_keyval(delete_fn=leave)


def leave_once() -> None:
    """At the end of the program."""
    if MPI.COMM_SELF.Get_attr(FINALIZING):
        MPI.COMM_SELF.Delete_attr(FINALIZING)


at_the_end.append(leave_once)


class Watchdog:
    """Watches this rank's calls on a communicator and all that are derived from it; made and closed by all its ranks.

    timeout: seconds, or 0. ends: whether what is found without a timeout ends the job.
    """

    def __init__(self, comm: MPI.Intracomm, timeout: float, ends: bool = True):
        global eyes
        self.comm, self.timeout, self.ends = comm.Dup(), timeout, ends
        self.rank, self.size = comm.Get_rank(), comm.Get_size()
        self.main, self.process = threading.main_thread().ident, os.getpid()  # type: Any, int
        self.stopped = threading.Event()
        self.talks = MPI.Query_thread() == MPI.THREAD_MULTIPLE
        self.grace = min(3.0, max(1.0, timeout / 2)) if timeout else 3.0  # seconds that others have to answer
        self.period = min(PERIOD, timeout / 4) if timeout else PERIOD
        self.groups: dict[str, tuple[Any, tuple[int, ...]]] = {}  # by key: the communicator, its ranks in this one
        self.keys: dict[int, str] = {}  # by communicator
        self.made: Counter[tuple[int, ...]] = Counter()  # communicators of the same ranks
        self.alarm, self.after = 0, LONG  # since when the wait lasts that was told, and the seconds of the next telling
        self.overdue: float | None = None  # since when the timeout is over
        self.spared = 0.0  # until when that does not count
        self.silent: set[int] = set()  # ranks that did not answer when they were asked last
        self.left: dict[int, RankStatus] = {}  # on rank 0: who has said that it leaves
        self.suspects: dict[int, Any] = {}  # stuck when the others were asked last, and since when each waits
        self.ask_again: float | None = None  # when
        self.sent, self.taken = np.zeros(self.size, np.int64), 0  # messages
        self.sending: list[tuple[MPI.Request, bytes]] = []
        self.alarms: list[Any] = []  # what rank 0 is still to ask about
        self.question = 0  # the number of the last one: an answer to an earlier one is none
        self.shown = -math.inf  # when what the ranks do was printed last
        self.freed: dict[str, int] = {}  # the numbers of the last calls of communicators that are freed
        if not MPI.COMM_SELF.Get_attr(FINALIZING):
            MPI.COMM_SELF.Set_attr(FINALIZING, True)
        watching.append(self)
        if not eyes.is_alive():
            eyes = Eyes()
            eyes.start()
            status_signal.threads.append(eyes)

    def watch(self, group: Any) -> None:
        """Watch this communicator, too; all of its ranks. One that is made of a group when this is closed is not."""
        if self.stopped.is_set():
            return
        ours, mine = self.comm.Get_group(), group.mpi.Get_group()
        ranks = tuple(map(int, mine.Translate_ranks(None, ours)))
        ours.Free()
        mine.Free()
        self.made[ranks] += 1
        key = f"{zlib.crc32(str(ranks).encode()):x}.{self.made[ranks]}"
        self.groups[key], self.keys[id(group)] = (group, ranks), key

    def forget(self, group: Any) -> None:
        """That communicator is freed."""
        key = self.keys.pop(id(group), None)
        if key is not None:
            self.freed[key] = self.groups.pop(key)[0].sequence
        if len(self.freed) > FREED:
            del self.freed[next(iter(self.freed))]

    # -- what the thread does ----------------------------------------------------------------------------------------

    def look(self) -> None:
        """Once: tell of a long wait, answer, end the job where that is due."""
        wait = activity.waiting()
        if self.timeout:
            self.look_at_timeout(wait)
        if not self.talks:
            return
        if wait is None or wait.since != self.alarm:
            self.alarm, self.after = wait.since if wait is not None else 0, LONG
        if wait is not None and wait.seconds >= self.after:
            self.after = wait.seconds + min(wait.seconds, SELDOM)
            self.tell(wait.awaits, False)
        self.listen()
        if self.ask_again is not None and time.monotonic() > self.ask_again:
            self.ask(None, False)

    def look_at_timeout(self, wait: Wait | None) -> None:
        """Tell of a wait that has lasted longer than the timeout; where nobody reacts, end the job."""
        now = time.monotonic()
        if wait is None or wait.seconds <= self.timeout or now < self.spared or (wait.patient and not self.talks):
            self.overdue = None
        elif not self.talks:
            self.end_alone()
        elif self.overdue is None:
            self.overdue = now
            self.tell(wait.awaits, True, wait.patient)
        elif now - self.overdue > 2 * self.grace + self.timeout * wait.patient:
            self.end_alone()

    def tell(self, awaits: Awaits | None, overdue: bool, patient: bool = False) -> None:
        """Rank 0 learns that this rank has waited long; patient: which it may, as long as all are there."""
        key = self.keys.get(id(awaits.group)) if awaits is not None else None
        about = [key, self.number(awaits)] if awaits is not None and awaits.other == ALL else None
        if self.rank > 0:
            self.send({"alarm": about, "overdue": overdue, "patient": patient}, 0)
        else:
            self.ask(about, overdue, patient)

    def listen(self) -> None:
        """Take what has come: rank 0 alarms and farewells, the others questions."""
        while (came := self.receive()) is not None:
            self.hear(*came)
        for about in self.alarms[:MOST]:
            self.ask(about, False)
        self.alarms.clear()

    def hear(self, source: int, message: dict[str, Any]) -> None:
        """Take a message."""
        if "alarm" in message and message["overdue"]:
            self.ask(message["alarm"], True, message["patient"])
        elif "alarm" in message and message["alarm"] not in self.alarms:  # all may wait in the same call
            self.alarms.append(message["alarm"])
        elif "asked" in message:
            self.show()
        elif "left" in message:
            self.left[source] = as_said(message["left"])
            self.ask_again = time.monotonic() + LONG
        elif "spare" in message:
            self.spared, self.overdue = time.monotonic() + self.timeout, None
        elif "ask" in message:
            self.send({"said": self.said(message["ask"])._asdict(), "question": message["question"]}, source)

    # -- rank 0 ------------------------------------------------------------------------------------------------------

    def ask(self, about: Any, overdue: bool, patient: bool = False) -> None:
        """Ask all ranks what they do, and end the job where the answers say that it cannot go on.

        about: key of a communicator and number of a call, in which a rank waits. patient: a rank that serves waits for
        requests; that is only too long where a rank does not answer, now and a timeout ago: it is stopped, or lost.
        """
        said = self.answers(about)
        there = patient and not self.silent - {*said}
        self.silent = {*range(self.size)} - {*said} if patient else self.silent
        if overdue and (there or any(each.busy for each in said.values())):  # with what all know: look again later
            self.spared, self.overdue = time.monotonic() + self.timeout, None
            for rank in set(said) - set(self.left) - {0}:
                self.send({"spare": True}, rank)
        elif overdue:
            lines = [f"rank {rank}: {said[rank].text if rank in said else 'no answer'}" for rank in range(self.size)]
            over = f"a rank has waited longer than --timeout {self.timeout:g} s; the job is ended"
            self.end([over, *lines, *conclusions(said)])
        members = next((each.members for each in said.values() if about and each.key == about[0]), ())
        if found := different(said, members):
            self.end_where_told(found, 2)
        for_ever, each_other = stuck(said, self.size), crossed(said)
        waiting = {rank: said[rank].waits[1] for rank in for_ever | each_other}  # type: ignore[index]
        if waiting and waiting == self.suspects:  # since the last time, too: nothing has moved
            if each_other:
                self.end_where_told(wait_for_each_other(said, each_other), 2)
            else:
                self.end_where_told(waits_for_ever(said, for_ever), 1)
        self.suspects = waiting
        pause = LONG if waiting else SELDOM if self.ask_again is None else 4 * LONG
        self.ask_again = time.monotonic() + pause if self.left or waiting else None

    def show(self) -> None:
        """Print what all ranks do: somebody has asked by SIGUSR2, of one rank or, as schedulers do, of all at once."""
        if time.monotonic() - self.shown > LONG:
            said = self.answers(None)
            sys.stderr.write("".join(f"hpcdl: {line}\n" for line in explained(said, self.size)))
            sys.stderr.flush()
            self.shown = time.monotonic()

    def answers(self, about: Any) -> dict[int, RankStatus]:
        """What each rank says of itself, as far as it answers in time."""
        said = {0: self.said(about)} | self.left
        self.question += 1
        for rank in sorted(set(range(self.size)) - set(said)):
            self.send({"ask": about, "question": self.question}, rank)
        deadline = time.monotonic() + self.grace
        leaves = 0 in self.left  # then this is the program's end, which waits for nothing else
        while len(said) < self.size and time.monotonic() < deadline and (leaves or not self.stopped.is_set()):
            came = self.receive()
            if came is None:
                time.sleep(0.005)
            elif "said" not in came[1]:
                self.hear(*came)
                said |= self.left
            elif came[1]["question"] == self.question:
                said[came[0]] = as_said(came[1]["said"])
        return said

    # -- every rank --------------------------------------------------------------------------------------------------

    def number(self, awaits: Awaits) -> int:
        """Of the call that is waited in."""
        return awaits.group.sequence if awaits.call is None else awaits.call

    def said(self, about: Any, left: bool = False) -> RankStatus:
        """What this rank says of itself."""
        calls = {key: group.sequence for key, (group, _) in list(self.groups.items())}
        for request in list(activity.in_flight):  # what was begun and is not done is not made
            key = self.keys.get(id(request.communicator))
            if left and key is not None and request.awaits.call is not None:
                calls[key] = min(calls[key], request.awaits.call - 1)
        if left:
            return RankStatus("has ended its program", True, self.freed | calls)
        group = self.groups[about[0]][0] if about and about[0] in self.groups else None
        made = group.called(about[1]) if group is not None else None
        here = RankStatus(self.report(), False, calls, activity.busy(self.timeout), made)
        wait = activity.waiting()
        key = self.keys.get(id(wait.awaits.group)) if wait is not None and wait.awaits is not None else None
        if wait is None or wait.awaits is None or key is None:  # of others than ours nothing is known
            return here
        members, other = self.groups[key][1], wait.awaits.other
        return here._replace(
            waits=(wait.seconds, wait.since) if wait.blocked else None,
            key=key,
            members=members,
            other=members[other] if other >= 0 else other,
            call=self.number(wait.awaits),
            called=wait.awaits.group.called(self.number(wait.awaits)) or wait.operation
            if other == ALL
            else wait.operation,
            name=wait.awaits.group.name,
            at=self.line(),
            together=other == ALL and (wait.operation in TOGETHER or wait.awaits.group.checked),
        )

    def line(self) -> str:
        """Of the program of the main thread, which makes the call (call_site.py), whatever is called in there."""
        top = sys._current_frames()[self.main]
        ours = (each for each, _ in traceback.walk_stack(top) if each.f_code.co_filename.startswith(BELOW))
        return place(innermost(next(ours, top)))

    def report(self) -> str:
        """Operation, seconds and caller: of the main thread the innermost frame that calls hpcdl.comm, or any."""
        stack = traceback.extract_stack(sys._current_frames()[self.main])
        below = [frame.filename.startswith(BELOW) for frame in stack]
        within = len(stack) - below[::-1].index(True) if True in below else len(stack)
        frame = next((stack[i] for i in reversed(range(within)) if not below[i]), stack[-1])
        where = f"{frame.filename}:{frame.lineno} in {frame.name}"
        wait = activity.waiting()
        if wait is None:
            return f"in no communication (the last was {activity.last}), at {where}"
        return f"waits in {wait.operation} for {wait.seconds:.1f} s, called from {where}"

    def show_where_asked(self) -> None:
        """The signal that asks has come to this rank."""
        if not self.talks:
            sys.stderr.write(f"hpcdl: rank {self.rank}: {self.report()}\n")
        elif self.rank > 0:
            self.send({"asked": True}, 0)
        else:
            self.show()

    # -- the end -----------------------------------------------------------------------------------------------------

    def end_alone(self) -> None:
        over = f"--timeout {self.timeout:g} s is over, rank 0 does not answer"
        self.end([over, f"rank {self.rank}: {self.report()}"])

    def end_where_told(self, line: str, status: int) -> None:
        """End the job, unless that is left to the program."""
        if self.ends:
            sys.stderr.write(f"error: {line}\n")
            end_job(status, f"ended the job: {line}")

    def end(self, lines: list[str]) -> None:
        sys.stderr.write("".join(f"hpcdl watchdog: {line}\n" for line in lines))
        end_job(1, f"ended the job: {lines[0]}")

    def farewell(self) -> None:
        """The program of this rank ends: rank 0 learns of it."""
        self._end_looking()
        if self.talks and self.rank == 0:
            self.left[0] = self.said(None, left=True)
        elif self.talks:
            self.send({"left": self.said(None, left=True)._asdict()}, 0)

    def last(self) -> bool:
        """Whether the program may end now: what was sent has left and, on rank 0, all have said farewell."""
        if self.talks and self.rank == 0:
            self.look()
        self._sent()
        return not self.talks or not (len(self.left) < self.size if self.rank == 0 else self.sending)

    def close(self) -> None:
        """Stop watching; collective. What threads have sent each other is taken: the communicator may be made anew."""
        if self.stopped.is_set():  # the program ends
            return
        self._end_looking()
        if self.talks:
            come = np.empty(1, np.int64)
            self.comm.Reduce_scatter_block(self.sent, come)
            while self.taken < come[0] or self.sending:
                self.receive()
                self._sent()
        self.comm.Free()

    def _end_looking(self) -> None:
        """The thread looks no more for this one."""
        self.stopped.set()
        with looking:
            watching.remove(self)

    # -- messages ----------------------------------------------------------------------------------------------------

    def send(self, message: dict[str, Any], to: int) -> None:
        text = json.dumps(message).encode()
        self.sending.append((self.comm.Isend(text, to), text))
        self.sent[to] += 1
        self._sent()

    def _sent(self) -> None:
        """Forget the messages that have left."""
        self.sending = [each for each in self.sending if not each[0].Test()]

    def receive(self) -> tuple[int, dict[str, Any]] | None:
        """Source and text of a message that has come, or None."""
        status = MPI.Status()
        if not self.comm.Iprobe(status=status):
            return None
        text = bytearray(status.Get_count(MPI.BYTE))
        self.comm.Recv(text, status.source)
        self.taken += 1
        return status.source, json.loads(text)
