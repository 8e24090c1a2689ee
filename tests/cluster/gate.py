"""An all-reduce for runs that a test interrupts: the ring, whose tenth call is a gate.

Where the environment has GATE=FILE, rank 0 makes that file there, and all ranks wait for a signal; GATE_KILLS=R lets
rank R kill itself instead. A job that was started again passes."""

import os
import signal
import time
from pathlib import Path

from hpcdl.comm.allreduce.ring import ring_all_reduce
from hpcdl.runs import signals

CALL = 10
calls = 0


def gate(comm, vector, *op):
    global calls
    calls += 1
    if calls == CALL and os.environ.get("GATE") and os.environ.get("SLURM_RESTART_COUNT", "0") == "0":
        if comm.Get_rank() == 0:
            Path(os.environ["GATE"]).touch()
        if os.environ.get("GATE_KILLS") == str(comm.Get_rank()):
            os.kill(os.getpid(), signal.SIGKILL)
        while not signals.received:
            time.sleep(0.01)
    ring_all_reduce(comm, vector, *op)
