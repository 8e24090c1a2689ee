"""End a hung job, and say which ranks wait in which operation, called from where.

A thread on every rank looks at what its rank is doing. When one operation has lasted longer than the timeout, the rank
raises an alarm with rank 0, whose thread asks all ranks, prints one line for each and aborts the job. The answer comes
from the threads, so a rank that computes, or hangs elsewhere, is in the report too. If rank 0 does not react (it may be
stopped), the rank that raised the alarm speaks for itself and aborts. Needs MPI's THREAD_MULTIPLE; without it each rank
speaks for itself.
"""

import os
import sys
import threading
import time
import traceback
from typing import Any

from mpi4py import MPI

from hpcdl import kernels, shared_memory
from hpcdl.comm.ending import end_job
from hpcdl.comm.progress import activity

ALARM, ASK, ANSWER = 1, 2, 3
BELOW = *(os.path.dirname(file) + os.sep for file in (__file__, kernels.__file__)), shared_memory.__file__


class Watchdog(threading.Thread):
    """Reads `activity` (progress.py) now and then; a collective call makes it, for it has messages of its own."""

    def __init__(self, comm: MPI.Intracomm, timeout: float):
        super().__init__(name="hpcdl-watchdog", daemon=True)
        self.comm, self.timeout = comm.Dup(), timeout
        self.main: Any = threading.main_thread().ident
        self.stopped = threading.Event()
        self.talks = MPI.Query_thread() == MPI.THREAD_MULTIPLE
        self.grace = min(3.0, max(1.0, timeout / 2))  # seconds that others have to answer
        self.alarmed: float | None = None
        self.start()

    def run(self) -> None:
        period = min(0.25, self.timeout / 4)
        while not self.stopped.wait(period):
            waiting = activity.waiting()
            overdue = waiting is not None and waiting[1] > self.timeout
            if overdue and not self.talks:
                self.end_alone()
            if overdue and self.alarmed is None:
                self.alarmed = time.monotonic()
                if self.comm.rank != 0:
                    self.send("", 0, ALARM)
            if self.alarmed is not None and self.comm.rank == 0:
                self.end_all()
            if self.alarmed is not None and time.monotonic() - self.alarmed > 2 * self.grace:
                self.end_alone()
            if self.talks:
                self.listen()

    def listen(self) -> None:
        """Rank 0 takes alarms; the others answer when asked."""
        expected = ALARM if self.comm.rank == 0 else ASK
        if self.receive(expected) is not None:
            if expected == ALARM:
                self.alarmed = time.monotonic()
            else:
                self.send(self.report(), 0, ANSWER)

    def end_all(self) -> None:
        """Ask every rank what it is doing, print the answers, abort."""
        answers = {0: self.report()}
        for other in range(1, self.comm.size):
            self.send("", other, ASK)
        deadline = time.monotonic() + self.grace
        while len(answers) < self.comm.size and time.monotonic() < deadline:
            answer = self.receive(ANSWER)
            if answer is None:
                time.sleep(0.01)
            else:
                answers[answer[0]] = answer[1]
        lines = [f"rank {rank}: {answers.get(rank, 'no answer')}" for rank in range(self.comm.size)]
        self.abort([f"a rank has waited longer than --timeout {self.timeout:g} s; the job is ended", *lines])

    def end_alone(self) -> None:
        self.abort(
            [f"--timeout {self.timeout:g} s is over, rank 0 does not answer", f"rank {self.comm.rank}: {self.report()}"]
        )

    def report(self) -> str:
        """Operation, seconds and caller: the main thread's innermost frame outside of hpcdl.comm and what it calls."""
        stack = traceback.extract_stack(sys._current_frames()[self.main])
        frame = next((frame for frame in reversed(stack) if not frame.filename.startswith(BELOW)), stack[-1])
        where = f"{frame.filename}:{frame.lineno} in {frame.name}"
        waiting = activity.waiting()
        if waiting is None:
            return f"in no communication (the last was {activity.last}), at {where}"
        return f"waits in {waiting[0]} for {waiting[1]:.1f} s, called from {where}"

    def abort(self, lines: list[str]) -> None:
        sys.stderr.write("".join(f"hpcdl watchdog: {line}\n" for line in lines))
        end_job(1)

    def send(self, text: str, to: int, tag: int) -> None:
        self.comm.Isend(text.encode(), to, tag).Free()  # never waited for: the job is about to end

    def receive(self, tag: int) -> tuple[int, str] | None:
        """(source, text) of a message with this tag that has come, or None."""
        status = MPI.Status()
        if not self.comm.Iprobe(MPI.ANY_SOURCE, tag, status):
            return None
        text = bytearray(status.Get_count(MPI.BYTE))
        self.comm.Recv(text, status.source, tag)
        return status.source, text.decode()

    def close(self) -> None:
        """Stop watching."""
        self.stopped.set()
        self.join()
        self.comm.Free()
