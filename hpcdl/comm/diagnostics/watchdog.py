"""Watchdog: end a job that hangs, and report which rank waits in which operation, and its call site.

A thread on every rank polls what the rank is doing. A rank that has waited in one operation for a second, then two,
four and so on, sends an alarm to rank 0, whose thread queries all ranks. Their answers show, without any timeout, ranks
whose collective calls differ (call_matching.py) and ranks that wait for ever (deadlock.py). Either ends the job with
one line. With a timeout, a longer wait ends the job, too, with a line for each rank, unless a rank is inside
`activity.exempt()`. The threads answer while their ranks compute, or hang elsewhere, too.

If rank 0 does not react (it may be stopped), the rank whose timeout is over ends the job. All this needs MPI's
THREAD_MULTIPLE; without it each rank acts alone, and on timeouts only. A rank whose program ends reports that to rank
0, which listens until all have: MPI_Finalize waits for the other ranks, which may wait for this one. A rank whose
launcher is gone ends."""

import functools
import json
import math
import os
import sys
import threading
import time
import zlib
from collections import Counter
from typing import Any

import numpy as np
from mpi4py import MPI

from hpcdl import kernels, shared_memory
from hpcdl.comm.counting import translate_ranks
from hpcdl.comm.diagnostics import deadlock, status_signal
from hpcdl.comm.diagnostics.call_signature import ALL
from hpcdl.comm.diagnostics.call_site import Place, place_in, stack_of
from hpcdl.comm.diagnostics.deadlock import LONG, RankStatus
from hpcdl.comm.job_abort import end_job, end_without, launcher, print_error
from hpcdl.comm.progress import LONGEST, Wait, WaitTarget, activity

FOLDERS = os.path.dirname(os.path.dirname(__file__)), os.path.dirname(kernels.__file__)
BELOW = *(folder + os.sep for folder in FOLDERS), shared_memory.__file__
SELDOM, PERIOD = 30.0, 0.25  # seconds: longest time between two queries; between two polls
FREED = 1000  # freed communicators that are remembered
MOST = 4  # alarms that are handled in a poll


polling = threading.Lock()  # held while the thread polls, or the list of watchdogs changes


def poll_all() -> None:
    """Poll for all watchdogs of this process, for ever; the body of their thread."""
    parent = launcher()
    while True:
        time.sleep(min((each.period for each in list(activity.watchdogs)), default=PERIOD))
        end_without(parent)
        if activity.flight is not None:
            activity.flight.beat()
        if activity.watchdogs and status_signal.received():
            activity.watchdogs[0].on_status_signal()
        for each in list(activity.watchdogs):
            with polling:
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
    """Run `leave`, unless it has run: this rank's program ends, and other ranks may go on."""
    if MPI.COMM_SELF.Get_attr(finalizing()):
        MPI.COMM_SELF.Delete_attr(finalizing())


class Watchdog:
    """Watches this rank's calls on a communicator and on communicators derived from it; made and closed collectively.
    timeout: longest wait in seconds; 0: no limit. ends: True if differing calls, and deadlocks, end the job."""

    def __init__(self, comm: MPI.Intracomm, timeout: float, ends: bool = True):
        self.comm, self.timeout, self.ends = comm.Dup(), timeout, ends
        self.rank, self.size = comm.Get_rank(), comm.Get_size()
        self.main, self.process = threading.main_thread().ident, os.getpid()  # type: Any, int
        self.stopped = threading.Event()
        self.talks = MPI.Query_thread() == MPI.THREAD_MULTIPLE
        self.grace = min(3.0, max(1.0, timeout / 2)) if timeout else 3.0  # seconds within which other ranks must answer
        self.period = min(PERIOD, timeout / 4) if timeout else PERIOD
        # by key: a communicator, and its ranks numbered in this one
        self.groups: dict[str, tuple[Any, tuple[int, ...]]] = {}
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
            activity.watch_thread = threading.Thread(target=poll_all, name="hpcdl-watchdog", daemon=True)
            activity.watch_thread.start()

    def watch(self, group: Any) -> None:
        """Watch communicator `group`, too; called on all of its ranks. A closed watchdog ignores the call."""
        if self.stopped.is_set():
            return
        ranks = tuple(translate_ranks(group.mpi, self.comm))
        self.group_counts[ranks] += 1
        key = f"{zlib.crc32(str(ranks).encode()):x}.{self.group_counts[ranks]}"
        self.groups[key], self.keys[id(group)] = (group, ranks), key

    def forget(self, group: Any) -> None:
        """Stop watching a freed communicator."""
        key = self.keys.pop(id(group), None)
        if key is not None:
            self.freed[key] = self.groups[key][0].sequence  # first: the thread finds it in one of the two
            del self.groups[key]
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
        while (message := self.receive()) is not None:
            self.handle(*message)
        for call in self.alarms[:MOST]:
            self.query(call, False)
        self.alarms.clear()
        if self.next_query is not None and time.monotonic() > self.next_query:
            self.query(None, False)

    def check_timeout(self, wait: Wait | None) -> None:
        """Report a wait that exceeds the timeout; if rank 0 does not react, end the job."""
        now = time.monotonic()
        over = wait is not None and wait.seconds > self.timeout and now >= self.no_timeout_until
        if wait is None or not over or (wait.patient and not self.talks):
            self.overdue = None
        elif self.talks and self.overdue is None:
            self.overdue = now
            self.send_alarm(wait.awaits, True, wait.patient)
        elif self.overdue is None or now - self.overdue > 2 * self.grace + self.timeout * wait.patient:
            said = f"a rank has waited longer than --timeout {self.timeout:g} s, and rank 0 does not answer"
            self.end([said, f"rank {self.rank}: {self.report()}"])

    def send_alarm(self, awaits: WaitTarget | None, overdue: bool, patient: bool = False) -> None:
        """Alert rank 0 to a long wait. overdue: it exceeds the timeout. patient: it may last while all ranks answer."""
        key = self.keys.get(id(awaits.group)) if awaits is not None else None
        call = [key, self.number(awaits)] if awaits is not None and awaits.other == ALL else None
        if self.rank > 0:
            self.send({"alarm": call, "overdue": overdue, "patient": patient}, 0)
        else:
            self.query(call, overdue, patient)

    def handle(self, source: int, message: dict[str, Any]) -> None:
        """Handle a message: alarms, farewells and status requests on rank 0; queries and new deadlines elsewhere."""
        if "alarm" in message and message["overdue"]:
            self.query(message["alarm"], True, message["patient"])
        elif "alarm" in message and message["alarm"] not in self.alarms:  # many ranks may wait in the same call
            self.alarms.append(message["alarm"])
        elif "asked" in message:
            self.show()
        elif "left" in message:
            self.left[source] = deadlock.status_from_json(message["left"])
            self.next_query = time.monotonic() + LONG
        elif "spare" in message:
            self.no_timeout_until, self.overdue = time.monotonic() + self.timeout, None
        elif "ask" in message:
            self.send({"said": self.status(message["ask"])._asdict(), "question": message["question"]}, source)

    # -- rank 0 ------------------------------------------------------------------------------------------------------

    def query(self, call: Any, overdue: bool, patient: bool = False) -> None:
        """Query all ranks; end the job if the answers show that it cannot go on. call: [communicator key, call number]
        of a wait, or None. overdue: beyond the timeout. patient: a server's wait, ended if a rank is silent twice."""
        statuses = self.collect(call)
        all_answer = patient and not self.silent - {*statuses}
        self.silent = {*range(self.size)} - {*statuses} if patient else self.silent
        if overdue and (all_answer or any(status.busy for status in statuses.values())):  # exempt: query again later
            self.no_timeout_until, self.overdue = time.monotonic() + self.timeout, None
            for rank in set(statuses) - set(self.left) - {0}:
                self.send({"spare": True}, rank)
        elif overdue:
            over = f"a rank has waited longer than --timeout {self.timeout:g} s; the job is ended"
            texts = {rank: "no answer" for rank in range(self.size)} | {rank: s.text for rank, s in statuses.items()}
            self.end([over, *(f"rank {rank}: {text}" for rank, text in texts.items()), *deadlock.conclusions(statuses)])
        members = next((each.members for each in statuses.values() if call and each.key == call[0]), ())
        if mismatch := deadlock.call_mismatch(statuses, members):
            self.end_if_enabled(mismatch, 2)
        for_ever, mutual = deadlock.stuck(statuses, self.size), deadlock.mutual_waits(statuses)
        waiting = {rank: statuses[rank].waits[1] for rank in for_ever | mutual}  # type: ignore[index]
        if waiting and waiting == self.suspects:  # unchanged since the last query
            say, ranks = (deadlock.mutual_wait_message, mutual) if mutual else (deadlock.stuck_message, for_ever)
            self.end_if_enabled(say(statuses, ranks), 2 if mutual else 1)
        self.suspects = waiting
        pause = LONG if waiting else SELDOM if self.next_query is None else 4 * LONG
        self.next_query = time.monotonic() + pause if self.left or waiting else None

    def show(self) -> None:
        """Print the status of all ranks after SIGUSR2; only once if all ranks get the signal, as from a scheduler."""
        if time.monotonic() - self.last_print > LONG:
            statuses = self.collect(None)
            sys.stderr.write("".join(f"hpcdl: {line}\n" for line in deadlock.status_lines(statuses, self.size)))
            sys.stderr.flush()
            self.last_print = time.monotonic()

    def collect(self, call: Any) -> dict[int, RankStatus]:
        """Query all ranks about `call` (see `query`); return, by rank, the statuses that arrive in time."""
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
                statuses[message[0]] = deadlock.status_from_json(message[1]["said"])
        return statuses

    # -- every rank --------------------------------------------------------------------------------------------------

    def number(self, awaits: WaitTarget) -> int:
        """Return the sequence number of the collective call for which a rank waits."""
        return awaits.group.sequence if awaits.call is None else awaits.call

    def status(self, call: Any, left: bool = False) -> RankStatus:
        """Return this rank's status. call: as in `query`. left: True at the end of its program."""
        # Also of communicators that this rank has freed: another rank may still be at the end of their last call.
        calls = self.freed | {key: group.sequence for key, (group, _) in list(self.groups.items())}
        for request in list(activity.in_flight):  # an incomplete operation does not count as made
            key = self.keys.get(id(request.communicator))
            if left and key is not None and request.awaits.call is not None:
                calls[key] = min(calls[key], request.awaits.call - 1)
        if left:
            return RankStatus("has ended its program", True, calls)
        asked = self.groups.get(call[0]) if call else None
        made = asked[0].call_text(call[1]) if asked is not None else None
        status = RankStatus(self.report(), False, calls, activity.busy(self.timeout), made)
        wait = activity.waiting()
        key = self.keys.get(id(wait.awaits.group)) if wait is not None and wait.awaits is not None else None
        watched = self.groups.get(key) if key is not None else None  # the main thread may free it meanwhile
        if wait is None or wait.awaits is None or key is None or watched is None:
            return status
        members, other = watched[1], wait.awaits.other
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
            at=str(place_in(self.stack())),
            together=other == ALL and (wait.operation in deadlock.TOGETHER or wait.awaits.group.checker is not None),
        )

    def stack(self) -> list[Place]:
        """Return the main thread's stack, innermost first; during communication, from hpcdl.comm's innermost on."""
        stack = stack_of(self.main)
        below = [place.file.startswith(BELOW) for place in stack]
        return stack[below.index(True) :] if True in below else stack

    def report(self) -> str:
        """Return what the rank does as text: operation, seconds, and the innermost line outside hpcdl.comm."""
        stack = self.stack()
        at = next((place for place in stack if not place.file.startswith(BELOW)), stack[0])
        place = f"{at.file}:{at.line} in {at.function}"
        wait = activity.waiting()
        if wait is None:
            return f"in no communication (the last was {activity.last}), at {place}"
        return f"waits in {wait.operation} for {wait.seconds:.1f} s, called from {place}"

    def on_status_signal(self) -> None:
        if not self.talks:
            sys.stderr.write(f"hpcdl: rank {self.rank}: {self.report()}\n")
        elif self.rank > 0:
            self.send({"asked": True}, 0)
        else:
            self.show()

    # -- the end -----------------------------------------------------------------------------------------------------

    def end_if_enabled(self, line: str, status: int) -> None:
        """If `ends`, print this line as an error and end the job with this status."""
        if self.ends:
            print_error(f"error: {line}\n")
            end_job(status, f"ended the job: {line}")

    def end(self, lines: list[str]) -> None:
        print_error("".join(f"hpcdl watchdog: {line}\n" for line in lines))
        end_job(1, f"ended the job: {lines[0]}")

    def farewell(self) -> None:
        """Report the end of this rank's program to rank 0."""
        self._stop_polling()
        if self.talks and self.rank == 0:
            self.left[0] = self.status(None, left=True)
        elif self.talks:
            self.send({"left": self.status(None, left=True)._asdict()}, 0)

    def may_end(self) -> bool:
        """True if the program may end: all ranks have reported their ends (rank 0), all messages are sent (others)."""
        if self.talks and self.rank == 0:
            self.poll()
        self._drop_sent()
        return not self.talks or not (len(self.left) < self.size if self.rank == 0 else self.sending)

    def close(self) -> None:
        """Stop watching, after receiving all messages of the other threads; collective."""
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
        self.stopped.set()
        with polling:
            activity.watchdogs.remove(self)

    # -- messages ----------------------------------------------------------------------------------------------------

    def send(self, message: dict[str, Any], to: int) -> None:
        text = json.dumps(message).encode()
        self.sending.append((self.comm.Isend(text, to), text))
        self.sent[to] += 1
        self._drop_sent()

    def _drop_sent(self) -> None:
        self.sending = [each for each in self.sending if not each[0].Test()]

    def receive(self) -> tuple[int, dict[str, Any]] | None:
        """Return the source and the content of a message that has arrived, or None."""
        status = MPI.Status()
        if not self.comm.Iprobe(status=status):
            return None
        text = bytearray(status.Get_count(MPI.BYTE))
        self.comm.Recv(text, status.source)
        self.received += 1
        return status.source, json.loads(text)
