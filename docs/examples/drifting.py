"""The line of faulty.py, where rank 1 changes a parameter by itself in its 18th epoch."""

import faulty
from mpi4py import MPI


class Line(faulty.Line):
    def __init__(self, dtype):
        super().__init__(dtype, "nothing")

    def loss_and_gradient(self, w, batch, gradient, on_ready=None):
        loss = super().loss_and_gradient(w, batch, gradient)
        if batch.epoch == 17 and MPI.COMM_WORLD.rank == 1:
            w[0] += 1e-3
        return loss
