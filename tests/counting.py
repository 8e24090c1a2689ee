"""A model that counts: parameter r is minus the times that row r was learned from, where the rate is 1 (SGD).

`python counting.py KILLS ...` is `hpcdl train-parameter-server ...` of which ranks kill themselves: KILLS is
RANK:COUNT, several with commas between, and the rank is gone when it is about to send its COUNT-th message of the
store. So a rank dies between any two messages, of one push, too."""

import os
import signal
import sys

import numpy as np

from hpcdl.models.layout import Layout, Tensor


class Counting:
    """Each visit to row r adds 1 to what is taken from parameter r; each loss is 1."""

    def __init__(self, dtype, rows=240):
        self.layout = Layout([Tensor("w", (rows,), offset=0, layer="all")], dtype)

    def initialize(self, random):
        return np.zeros(self.layout.size, self.layout.dtype)

    def predict(self, w, x):
        return np.zeros(len(x), w.dtype)

    def loss_and_gradient(self, w, batch, gradient, on_ready=None):
        np.add.at(gradient, batch.x[:, 0].astype(int), batch.total)
        return float(len(batch.y))


def rows(count=240):
    """Rows that know their number."""
    x = np.arange(count, dtype="float64")[:, None]
    return x, np.zeros(count), x[:4], np.zeros(4)


def main(kills, *arguments):
    """Train, and be gone where that is asked for."""
    from hpcdl.comm.point_to_point import PointToPoint
    from hpcdl.launch import training
    from hpcdl.scripts import train_parameter_server as program

    mine = dict(tuple(map(int, each.split(":"))) for each in kills.split(",") if each)
    last, sent = mine.get(training.MPI.COMM_WORLD.rank, 0), [0]

    def ipush(self, *values, original=PointToPoint.ipush, **more):
        if self.name == "store":
            sent[0] += 1
            if sent[0] == last:
                os.kill(os.getpid(), signal.SIGKILL)
        return original(self, *values, **more)

    PointToPoint.ipush = ipush
    program.main(list(arguments))


if __name__ == "__main__":
    main(*sys.argv[1:])
