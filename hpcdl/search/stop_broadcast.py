"""A signal to one rank, or the end of the time, is known to all trainings of a job, which then end in good order.

    rank 0   signal --- a message of one byte to every other rank --->   rank 1   its run is at a boundary: it looks
                                                                  --->   rank 2   it waits for a trial: it looks
    every rank   its own clock is beyond the limit: as if it had a signal, and the byte says so

A run looks whenever its ranks agree (hpcdl/runs/agreement.py), about ten times a second.
"""

import math
import threading
import time
from typing import Any

import numpy as np
from mpi4py import MPI

from hpcdl.runs import signals

TAG = 1
LATE, OTHERS = "the time limit", "a signal to another rank"


class Alarm:
    """Of all ranks of `world`, whose constructor and `close` are collective calls. seconds: from now; 0: any time.

    why: what it has let this rank know, and `close` takes back; "" where it has not. After `close`, where this rank has
    had no signal, also what it hears only then.
    """

    def __init__(self, world: MPI.Intracomm, seconds: float = 0.0):
        self.comm: Any = world.Dup()
        self.late = time.monotonic() + seconds if seconds else math.inf
        self.requests: list[MPI.Request] = []
        self.heard: dict[int, bool] = {}  # from whom, and whether it was the time
        self.why, self.lock = "", threading.Lock()
        signals.watchers.append(self.look)

    def look(self) -> bool:
        """Whether all is to end; the first rank to know lets the others know."""
        with self.lock:  # the thread that hands out asks beside the training
            if not signals.received:
                while self.comm.Iprobe(MPI.ANY_SOURCE, TAG):
                    self._hear(MPI.ANY_SOURCE)
                self.why = self._heard() or (LATE if time.monotonic() >= self.late else "")
                signals.received += [self.why] if self.why else []
            if signals.received and not self.heard and not self.requests:
                others = (rank for rank in range(self.comm.size) if rank != self.comm.rank)
                late = np.array([self.why == LATE])
                self.requests = [self.comm.Isend(late, rank, TAG) for rank in others]
        return bool(signals.received)

    def _heard(self) -> str:
        """What others have told: the time only where all of them say so."""
        return (LATE if all(self.heard.values()) else OTHERS) if self.heard else ""

    def _hear(self, source: int) -> None:
        status, late = MPI.Status(), np.empty(1, bool)
        self.comm.Recv(late, source, TAG, status)
        self.heard[status.source] = bool(late[0])

    def close(self) -> None:
        """Nobody looks any more; what was said is heard, also by those who knew."""
        signals.watchers.remove(self.look)
        signals.received[:] = [each for each in signals.received if each != self.why]
        told = self.comm.allgather(bool(self.requests))
        for rank, said in enumerate(told):
            if said and rank != self.comm.rank and rank not in self.heard:
                self._hear(rank)
        self.why = self.why or ("" if signals.received else self._heard())
        MPI.Request.Waitall(self.requests)
        self.comm.Free()
