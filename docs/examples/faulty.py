"""A line by least squares, whose rank 1 does something else in its ninth epoch, as its setting `what` says; and data.

mpiexec -n 3 hpcdl train-allreduce --data faulty:curve --model faulty:Line,what=hang --out runs/h
"""

import os
import signal
import sys
import time

import numpy as np
from mpi4py import MPI

from hpcdl.models.layout import Layout, Tensor


def curve(rows=64):
    x = np.linspace(-1, 1, rows)[:, None]
    return x, 3 - x[:, 0], x[::7], 3 - x[::7, 0]


def exits():
    sys.exit(7)


WAYS = {
    "nothing": lambda: None,
    "raise": lambda: 1 / 0,
    "hang": lambda: time.sleep(1000),
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "exit": exits,
}


class Line:
    def __init__(self, dtype, what="raise"):
        self.layout, self.what = Layout([Tensor("w", (2,), offset=0, layer="all")], dtype), what

    def initialize(self, random):
        return np.zeros(2, self.layout.dtype)

    def predict(self, w, x):
        return np.vander(x[:, 0], 2, increasing=True).astype(x.dtype) @ w

    def loss_and_gradient(self, w, batch, gradient, on_ready=None):
        if batch.epoch == 8 and MPI.COMM_WORLD.rank == 1:
            WAYS[self.what]()
        error = self.predict(w, batch.x) - batch.y
        gradient += np.vander(batch.x[:, 0], 2, increasing=True).astype(w.dtype).T @ error
        return float(error @ error) / 2
