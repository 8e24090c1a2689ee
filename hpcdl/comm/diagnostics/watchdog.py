"""Watchdog: end a job that hangs, and report which rank waits in which operation, and its call site.

A thread on every rank, one for all its communicators, polls what the rank is doing. A rank that has waited in one
operation for a second, then two, four and so on, sends an alarm to rank 0, whose thread queries all ranks. Their
answers show two errors without any timeout: ranks whose collective calls differ (hpcdl/comm/call_matching.py), and
ranks that wait for one that has left its program (deadlock.py). Either ends the job with one line. With a timeout, a
longer wait ends the job, too, with a line for each rank, unless a rank is inside `activity.exempt()`, as in scoring or
checkpoints.

The threads answer, so the status of a rank that computes, or hangs elsewhere, is known, too. If rank 0 does not react
(it may be stopped), the rank whose timeout is over ends the job with its own report. All this needs MPI's
THREAD_MULTIPLE; without it each rank acts alone, and on timeouts only.

A rank whose program ends reports that to rank 0, and rank 0 listens until all ranks have reported: MPI_Finalize waits
for the other ranks, which may wait for this one.
"""

import functools
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
from hpcdl.comm.diagnostics.call_site import innermost, location
from hpcdl.comm.diagnostics.deadlock import (
    LONG,
    TOGETHER,
    RankStatus,
    call_mismatch,
    conclusions,
    mutual_wait_message,
    mutual_waits,
    status_from_json,
    status_lines,
    stuck,
    stuck_message,
)
from hpcdl.comm.job_abort import end_job
from hpcdl.comm.progress import LONGEST, Wait, WaitTarget, activity

BELOW = (
    *(os.path.dirname(file) + os.sep for file in (os.path.dirname(__file__), kernels.__file__)),
    shared_memory.__file__,
)
SELDOM, PERIOD = 30.0, 0.25  # seconds: longest time between two queries; between two polls
FREED = 1000  # freed communicators that are remembered
MOST = 4  # alarms that are handled in a poll


class WatchThread(threading.Thread):
    """The thread of this process that polls for all its watchdogs. lock: held while it polls or their list changes."""

    def __init__(self) -> None:
        super().__init__(name="hpcdl-watchdog", daemon=True)
        self.lock = threading.Lock()

    def run(self) -> None:
        while True:
            time.sleep(min((each.period for each in list(activity.watchdogs)), default=PERIOD))
            if activity.flight is not None:
                activity.flight.beat()
            if activity.watchdogs and status_signal.received():
                activity.watchdogs[0].on_status_signal()
            for each in list(activity.watchdogs):
                with self.lock:
                    if not each.stopped.is_set():
                        each.poll()


def leave(*_: Any) -> None:
    """Report the end of this rank's program; rank 0 then listens until all ranks have reported theirs."""
    leaving = [each for each in activity.watchdogs if each.process == os.getpid()]  # not those of a forked child
    for each in leaving:
        each.farewell()
    while not all([each.may_end() for each in leaving]):
        time.sleep(LONGEST)


# Also if a program calls MPI.Finalize itself: it first deletes the attributes of COMM_SELF.
@functools.cache
def finalizing() -> int:
    """Return the key of the attribute of COMM_SELF whose deletion calls `leave`."""
    return MPI.Comm.Create_keyval(delete_fn=leave)


def leave_once() -> None:
    """Run `leave` at the end of the program, unless it has run; for the others may go on."""
    if MPI.COMM_SELF.Get_attr(finalizing()):
        MPI.COMM_SELF.Delete_attr(finalizing())


class Watchdog:
    """Watches this rank's calls on a communicator and those derived from it; made and closed collectively.

    timeout: seconds, or 0 for none. ends: True if errors that need no timeout end the job.
    """

    def __init__(self, comm: MPI.Intracomm, timeout: float, ends: bool = True):
        self.comm, self.timeout, self.ends = comm.Dup(), timeout, ends
        self.rank, self.size = comm.Get_rank(), comm.Get_size()
        self.main, self.process = threading.main_thread().ident, os.getpid()  # type: Any, int
        self.stopped = threading.Event()
        self.talks = MPI.Query_thread() == MPI.THREAD_MULTIPLE
        self.grace = min(3.0, max(1.0, timeout / 2)) if timeout else 3.0  # seconds within which other ranks must answer
        self.period = min(PERIOD, timeout / 4) if timeout else PERIOD
        self.groups: dict[
            str, tuple[Any, tuple[int, ...]]
        ] = {}  # by key: a communicator, and its ranks numbered in this one
        self.keys: dict[int, str] = {}  # by id of the communicator
        self.group_counts: Counter[tuple[int, ...]] = Counter()  # communicators by their ranks
        self.alarm, self.after = 0, LONG  # start of the wait reported last, seconds of the next alarm
        self.overdue: float | None = None  # since when the timeout is exceeded
        self.no_timeout_until = 0.0  # end of a period without timeouts
        self.silent: set[int] = set()  # ranks that did not answer the last query
        self.left: dict[int, RankStatus] = {}  # on rank 0: the ranks that have left
        self.suspects: dict[int, Any] = {}  # stuck ranks of the last query, and the start of their waits
        self.next_query: float | None = None  # time of the next query
        self.sent, self.received = np.zeros(self.size, np.int64), 0  # counts of messages, by receiver
        self.sending: list[tuple[MPI.Request, bytes]] = []
        self.alarms: list[Any] = []  # alarms that rank 0 has not handled
        self.question = 0  # number of the last query: answers to earlier ones are ignored
        self.last_print = -math.inf  # time of the last status print
        self.freed: dict[str, int] = {}  # number of the last call on each freed communicator
        if not MPI.COMM_SELF.Get_attr(finalizing()):
            MPI.COMM_SELF.Set_attr(finalizing(), True)
        activity.watchdogs.append(self)
        if activity.watch_thread is None or not activity.watch_thread.is_alive():
            activity.watch_thread = WatchThread()
            activity.watch_thread.start()

    def watch(self, group: Any) -> None:
        """Watch this communicator, too; called on all of its ranks. A closed watchdog ignores it."""
        if self.stopped.is_set():
            return
        ours, mine = self.comm.Get_group(), group.mpi.Get_group()
        ranks = tuple(map(int, mine.Translate_ranks(None, ours)))
        ours.Free()
        mine.Free()
        self.group_counts[ranks] += 1
        key = f"{zlib.crc32(str(ranks).encode()):x}.{self.group_counts[ranks]}"
        self.groups[key], self.keys[id(group)] = (group, ranks), key

    def forget(self, group: Any) -> None:
        """Stop watching a freed communicator."""
        key = self.keys.pop(id(group), None)
        if key is not None:
            self.freed[key] = self.groups.pop(key)[0].sequence
        if len(self.freed) > FREED:
            del self.freed[next(iter(self.freed))]

    # -- the polls of the thread ---------------------------------------------------------------------------------------

    def poll(self) -> None:
        """Poll once: report a long wait, answer queries, end the job if necessary."""
        wait = activity.waiting()
        if self.timeout:
            self.check_timeout(wait)
        if not self.talks:
            return
        if wait is None or wait.since != self.alarm:
            self.alarm, self.after = wait.since if wait is not None else 0, LONG
        if wait is not None and wait.seconds >= self.after:
            self.after = wait.seconds + min(wait.seconds, SELDOM)
            self.send_alarm(wait.awaits, False)
        self.listen()
        if self.next_query is not None and time.monotonic() > self.next_query:
            self.query(None, False)

    def check_timeout(self, wait: Wait | None) -> None:
        """Report a wait that exceeds the timeout; if rank 0 does not react, end the job."""
        now = time.monotonic()
        if (
            wait is None
            or wait.seconds <= self.timeout
            or now < self.no_timeout_until
            or (wait.patient and not self.talks)
        ):
            self.overdue = None
        elif not self.talks:
            self.end_alone()
        elif self.overdue is None:
            self.overdue = now
            self.send_alarm(wait.awaits, True, wait.patient)
        elif now - self.overdue > 2 * self.grace + self.timeout * wait.patient:
            self.end_alone()

    def send_alarm(self, awaits: WaitTarget | None, overdue: bool, patient: bool = False) -> None:
        """Send rank 0 the alarm that this rank has waited long; patient: the wait may last while all ranks answer."""
        key = self.keys.get(id(awaits.group)) if awaits is not None else None
        call = [key, self.number(awaits)] if awaits is not None and awaits.other == ALL else None
        if self.rank > 0:
            self.send({"alarm": call, "overdue": overdue, "patient": patient}, 0)
        else:
            self.query(call, overdue, patient)

    def listen(self) -> None:
        """Handle the arrived messages: alarms and farewells on rank 0, queries on the others."""
        while (message := self.receive()) is not None:
            self.handle(*message)
        for call in self.alarms[:MOST]:
            self.query(call, False)
        self.alarms.clear()

    def handle(self, source: int, message: dict[str, Any]) -> None:
        """Handle a message."""
        if "alarm" in message and message["overdue"]:
            self.query(message["alarm"], True, message["patient"])
        elif "alarm" in message and message["alarm"] not in self.alarms:  # many ranks may wait in the same call
            self.alarms.append(message["alarm"])
        elif "asked" in message:
            self.show()
        elif "left" in message:
            self.left[source] = status_from_json(message["left"])
            self.next_query = time.monotonic() + LONG
        elif "spare" in message:
            self.no_timeout_until, self.overdue = time.monotonic() + self.timeout, None
        elif "ask" in message:
            self.send({"said": self.status(message["ask"])._asdict(), "question": message["question"]}, source)

    # -- rank 0 ------------------------------------------------------------------------------------------------------

    def query(self, call: Any, overdue: bool, patient: bool = False) -> None:
        """Query all ranks, and end the job if their answers show that it cannot go on.

        call: key of a communicator and number of the call in which a rank waits. patient: the wait of a server for
        requests; it exceeds the timeout only if a rank has not answered twice, a timeout apart: it is stopped, or lost.
        """
        statuses = self.collect(call)
        all_answer = patient and not self.silent - {*statuses}
        self.silent = {*range(self.size)} - {*statuses} if patient else self.silent
        if overdue and (all_answer or any(status.busy for status in statuses.values())):  # exempt: query again later
            self.no_timeout_until, self.overdue = time.monotonic() + self.timeout, None
            for rank in set(statuses) - set(self.left) - {0}:
                self.send({"spare": True}, rank)
        elif overdue:
            lines = [
                f"rank {rank}: {statuses[rank].text if rank in statuses else 'no answer'}" for rank in range(self.size)
            ]
            over = f"a rank has waited longer than --timeout {self.timeout:g} s; the job is ended"
            self.end([over, *lines, *conclusions(statuses)])
        members = next((each.members for each in statuses.values() if call and each.key == call[0]), ())
        if mismatch := call_mismatch(statuses, members):
            self.end_if_enabled(mismatch, 2)
        for_ever, mutual = stuck(statuses, self.size), mutual_waits(statuses)
        waiting = {rank: statuses[rank].waits[1] for rank in for_ever | mutual}  # type: ignore[index]
        if waiting and waiting == self.suspects:  # unchanged since the last query
            if mutual:
                self.end_if_enabled(mutual_wait_message(statuses, mutual), 2)
            else:
                self.end_if_enabled(stuck_message(statuses, for_ever), 1)
        self.suspects = waiting
        pause = LONG if waiting else SELDOM if self.next_query is None else 4 * LONG
        self.next_query = time.monotonic() + pause if self.left or waiting else None

    def show(self) -> None:
        """Print the status of all ranks, once for a SIGUSR2 to one rank or, as by schedulers, to all at once."""
        if time.monotonic() - self.last_print > LONG:
            statuses = self.collect(None)
            sys.stderr.write("".join(f"hpcdl: {line}\n" for line in status_lines(statuses, self.size)))
            sys.stderr.flush()
            self.last_print = time.monotonic()

    def collect(self, call: Any) -> dict[int, RankStatus]:
        """Query all ranks; return the statuses that arrive in time."""
        statuses = {0: self.status(call)} | self.left
        self.question += 1
        for rank in sorted(set(range(self.size)) - set(statuses)):
            self.send({"ask": call, "question": self.question}, rank)
        deadline = time.monotonic() + self.grace
        leaves = 0 in self.left  # the program ends: wait for the answers in any case
        while len(statuses) < self.size and time.monotonic() < deadline and (leaves or not self.stopped.is_set()):
            message = self.receive()
            if message is None:
                time.sleep(0.005)
            elif "said" not in message[1]:
                self.handle(*message)
                statuses |= self.left
            elif message[1]["question"] == self.question:
                statuses[message[0]] = status_from_json(message[1]["said"])
        return statuses

    # -- every rank --------------------------------------------------------------------------------------------------

    def number(self, awaits: WaitTarget) -> int:
        """Return the sequence number of the call of a wait."""
        return awaits.group.sequence if awaits.call is None else awaits.call

    def status(self, call: Any, left: bool = False) -> RankStatus:
        """Return this rank's status; left: at the end of its program."""
        calls = {key: group.sequence for key, (group, _) in list(self.groups.items())}
        for request in list(activity.in_flight):  # an incomplete operation does not count as made
            key = self.keys.get(id(request.communicator))
            if left and key is not None and request.awaits.call is not None:
                calls[key] = min(calls[key], request.awaits.call - 1)
        if left:
            return RankStatus("has ended its program", True, self.freed | calls)
        group = self.groups[call[0]][0] if call and call[0] in self.groups else None
        made = group.call_text(call[1]) if group is not None else None
        status = RankStatus(self.report(), False, calls, activity.busy(self.timeout), made)
        wait = activity.waiting()
        key = self.keys.get(id(wait.awaits.group)) if wait is not None and wait.awaits is not None else None
        if wait is None or wait.awaits is None or key is None:  # not one of the watched communicators
            return status
        members, other = self.groups[key][1], wait.awaits.other
        return status._replace(
            waits=(wait.seconds, wait.since) if wait.blocked else None,
            key=key,
            members=members,
            other=members[other] if other >= 0 else other,
            call=self.number(wait.awaits),
            called=wait.awaits.group.call_text(self.number(wait.awaits)) or wait.operation
            if other == ALL
            else wait.operation,
            name=wait.awaits.group.name,
            at=self.line(),
            together=other == ALL and (wait.operation in TOGETHER or wait.awaits.group.checked),
        )

    def line(self) -> str:
        """Return the main thread's call site (call_site.py) of its current communication."""
        top = sys._current_frames()[self.main]
        ours = (each for each, _ in traceback.walk_stack(top) if each.f_code.co_filename.startswith(BELOW))
        return location(innermost(next(ours, top)))

    def report(self) -> str:
        """Return operation, seconds and caller as text: the main thread's innermost frame outside hpcdl.comm."""
        stack = traceback.extract_stack(sys._current_frames()[self.main])
        below = [frame.filename.startswith(BELOW) for frame in stack]
        within = len(stack) - below[::-1].index(True) if True in below else len(stack)
        frame = next((stack[i] for i in reversed(range(within)) if not below[i]), stack[-1])
        place = f"{frame.filename}:{frame.lineno} in {frame.name}"
        wait = activity.waiting()
        if wait is None:
            return f"in no communication (the last was {activity.last}), at {place}"
        return f"waits in {wait.operation} for {wait.seconds:.1f} s, called from {place}"

    def on_status_signal(self) -> None:
        """Handle SIGUSR2 on this rank."""
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

    def end_if_enabled(self, line: str, status: int) -> None:
        """End the job with this line, if `ends`."""
        if self.ends:
            sys.stderr.write(f"error: {line}\n")
            end_job(status, f"ended the job: {line}")

    def end(self, lines: list[str]) -> None:
        sys.stderr.write("".join(f"hpcdl watchdog: {line}\n" for line in lines))
        end_job(1, f"ended the job: {lines[0]}")

    def farewell(self) -> None:
        """Report the end of this rank's program to rank 0."""
        self._stop_polling()
        if self.talks and self.rank == 0:
            self.left[0] = self.status(None, left=True)
        elif self.talks:
            self.send({"left": self.status(None, left=True)._asdict()}, 0)

    def may_end(self) -> bool:
        """True if the program may end: all messages have left and, on rank 0, all ranks have reported their ends."""
        if self.talks and self.rank == 0:
            self.poll()
        self._drop_sent()
        return not self.talks or not (len(self.left) < self.size if self.rank == 0 else self.sending)

    def close(self) -> None:
        """Stop watching, after receiving all messages of the threads; collective."""
        if self.stopped.is_set():  # the program ends
            return
        self._stop_polling()
        if self.talks:
            come = np.empty(1, np.int64)
            self.comm.Reduce_scatter_block(self.sent, come)
            while self.received < come[0] or self.sending:
                self.receive()
                self._drop_sent()
        self.comm.Free()

    def _stop_polling(self) -> None:
        """Remove this watchdog from the thread's list."""
        self.stopped.set()
        with activity.watch_thread.lock:
            activity.watchdogs.remove(self)

    # -- messages ----------------------------------------------------------------------------------------------------

    def send(self, message: dict[str, Any], to: int) -> None:
        text = json.dumps(message).encode()
        self.sending.append((self.comm.Isend(text, to), text))
        self.sent[to] += 1
        self._drop_sent()

    def _drop_sent(self) -> None:
        """Remove completed sends."""
        self.sending = [each for each in self.sending if not each[0].Test()]

    def receive(self) -> tuple[int, dict[str, Any]] | None:
        """Return source and content of an arrived message, or None."""
        status = MPI.Status()
        if not self.comm.Iprobe(status=status):
            return None
        text = bytearray(status.Get_count(MPI.BYTE))
        self.comm.Recv(text, status.source)
        self.received += 1
        return status.source, json.loads(text)
