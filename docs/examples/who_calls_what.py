"""Ranks that do not call the same: mpiexec -n 3 python who_calls_what.py WAY

WAY is what the last rank does in its third step: length, order, late, fail or nothing.
"""

import sys
import time

import numpy as np

from hpcdl.comm import Communicator


def step(comm, pair, way):
    if way == "late":
        time.sleep(1000)
    elif way == "fail":
        raise ValueError("a row without a label")
    elif way == "order":
        pair.all_reduce(np.ones(10))
        comm.all_reduce(np.ones(1000))
    else:
        comm.all_reduce(np.ones(999 if way == "length" else 1000))
        pair.all_reduce(np.ones(10))


comm = Communicator(timeout=3 if sys.argv[1] == "late" else 0)
pair = comm.split(0, name="pair")
for number in range(5):
    step(comm, pair, sys.argv[1] if number == 2 and comm.rank == comm.size - 1 else "nothing")
if comm.rank == 0:
    print("five steps")
