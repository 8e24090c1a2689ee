"""Stop broadcast: a signal to one rank, or the time limit, stops all trainings of a job in good order.

rank 0   signal --- a message of one byte to every other rank --->   rank 1   its run is at a boundary: it polls
                                                              --->   rank 2   it waits for a trial: it polls
every rank   once its own clock is past the limit, it acts as after a signal, and the byte says so"""

import math
import threading
import time
from typing import Any

import numpy as np
from mpi4py import MPI

from hpcdl.runs import signals

TAG = 1
LATE, OTHERS = "the time limit", "a signal to another rank"


class StopBroadcast:
    """Stops trainings; one object per rank of `world`. Constructor and `close` are collective. seconds: time limit from
    now; 0: none. reason: LATE or OTHERS; "": no stop, or this rank had the signal. `close` takes it off the signals."""

    def __init__(self, world: MPI.Intracomm, seconds: float = 0.0):
        self.comm: Any = world.Dup()
        self.deadline = time.monotonic() + seconds if seconds else math.inf
        self.requests: list[MPI.Request] = []
        self.received: dict[int, bool] = {}  # by rank: True if its reason was the time limit
        self.reason, self.lock = "", threading.Lock()
        signals.watchers.append(self.poll)

    def poll(self) -> bool:
        """Return True if the job is to stop; a rank that learns of it first tells all other ranks."""
        with self.lock:  # the search's serving thread polls, too
            if not signals.received:
                while self.comm.Iprobe(MPI.ANY_SOURCE, TAG):
                    self._receive(MPI.ANY_SOURCE)
                self.reason = self._received_reason() or (LATE if time.monotonic() >= self.deadline else "")
                signals.received += [self.reason] if self.reason else []
            if signals.received and not self.received and not self.requests:
                others = (rank for rank in range(self.comm.size) if rank != self.comm.rank)
                time_limit = np.array([self.reason == LATE])
                self.requests = [self.comm.Isend(time_limit, rank, TAG) for rank in others]
        return bool(signals.received)

    def _received_reason(self) -> str:
        """Return the reason received from other ranks: LATE if all senders say so, else OTHERS; "": none received."""
        return (LATE if all(self.received.values()) else OTHERS) if self.received else ""

    def _receive(self, source: int) -> None:
        status, time_limit = MPI.Status(), np.empty(1, bool)
        self.comm.Recv(time_limit, source, TAG, status)
        self.received[status.source] = bool(time_limit[0])

    def close(self) -> None:
        """Stop polling and receive all messages that were sent, also on ranks that knew the reason already."""
        signals.watchers.remove(self.poll)
        signals.received[:] = [reason for reason in signals.received if reason != self.reason]
        sent = self.comm.allgather(bool(self.requests))
        for rank, has_sent in enumerate(sent):
            if has_sent and rank != self.comm.rank and rank not in self.received:
                self._receive(rank)
        self.reason = self.reason or ("" if signals.received else self._received_reason())
        MPI.Request.Waitall(self.requests)
        self.comm.Free()
