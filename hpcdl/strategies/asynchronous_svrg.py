"""Asynchronous SVRG: the threads of one rank take steps of single examples on the same parameters, without locks.

    for s = 0, 1, 2, ...
        v <- w;  mu <- 1/n * sum over all i of grad f_i(v)
        for each epoch of a round: T threads at the same time, of which thread r has the epoch's examples r, r + T, ...
            for each example i of the thread:
                w <- w - lr * (grad f_i(w) - grad f_i(v) + mu + decay * w)          coordinate by coordinate

A thread may miss or overwrite changes of other threads. With sparse examples this is rare; the convergence rate stays
linear while delays are small. One thread takes the steps of SVRG with batches of one example. The model is linear
(kernels/svrg.py). A step of the run is an epoch, at whose end the threads meet.

(Reddi et al., "On variance reduction in stochastic gradient descent and its asynchronous variants", NeurIPS 2015)"""

import math
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from hpcdl.checkpoint.state import Same
from hpcdl.comm import Communicator, refuse_together
from hpcdl.csr import CSR
from hpcdl.data import Data
from hpcdl.data.full_pass import full_gradient
from hpcdl.errors import UsageError
from hpcdl.kernels import svrg as kernels
from hpcdl.kernels.linear import SOFTMAX
from hpcdl.models.linear_form import LinearForm, linear_form
from hpcdl.optim import Optimizer
from hpcdl.runs.ownership import Whole
from hpcdl.runs.run import Run

ROWS = 256  # rows that a thread gathers at once


def train(
    comm: Communicator, model: Any, data: Data, optimizer: Optimizer, run: Run, threads: int, inner_epochs: int = 2
) -> np.ndarray:
    """Train on the one rank of `comm`; return the parameters. inner_epochs: number of epochs between two snapshots.
    UsageError if the model is not linear, rows are not in memory, or rate * decay >= 1."""
    with refuse_together(comm.mpi):
        form = linear_form(model, "--threads")
        data.in_place(0)
    w = run.initial(model)
    v, mu = np.zeros_like(w), np.zeros_like(w)
    kernels.compile_for(w.dtype)
    run.track("snapshot", Same(v))
    run.track("full_gradient", Same(mu))
    run.report(method="svrg", threads=threads, inner_epochs=inner_epochs)
    run.begin("svrg", Whole(model, w, optimizer), data, ("method", "inner_epochs"))
    workers = [Worker(r, form, (w, v, mu), data.sparse) for r in range(threads)]
    when, counts = np.zeros(form.features, np.int64), np.zeros((threads, 8), np.int64)
    with ThreadPoolExecutor(threads) as pool:
        for step in run.rounds():
            if step % inner_epochs == 0:
                v[:] = w
                full_gradient(comm, model, data, run.batch, step, v, mu)
            rate, decay = optimizer.schedule(optimizer.step), optimizer.weight_decay
            with refuse_together(comm.mpi):
                if not rate * decay < 1:
                    product = f"the learning rate {rate:g} times --weight-decay {decay:g}"
                    raise UsageError(f"{product} must be less than 1, or a step removes whole parameters")
            rows, source, _ = data.in_place(step)
            counts[:] = 0
            done = [pool.submit(worker.run, rows, source, when, counts, rate, decay) for worker in workers]
            loss = math.fsum(each.result() for each in done)
            if data.sparse:
                kernels.settle(w, mu, when, len(source), rate, decay, form.outputs)
            optimizer.step += 1
            run.record(loss, len(source))
            run.boundary()
    end = run.progress
    rounds = -(-end.step // inner_epochs)
    run.report(snapshots=rounds, gradients_per_example=2 * end.examples / data.examples + rounds)
    return w


class Worker:
    """A thread: its scratch arrays, and the steps that it takes in an epoch."""

    def __init__(self, number: int, form: LinearForm, state: tuple[np.ndarray, ...], sparse: bool):
        self.number, self.form, self.state, kind = number, form, state, state[0].dtype
        self.x: Any = CSR.empty(ROWS, form.features, kind) if sparse else np.empty((ROWS, form.features), kind)
        self.z, self.e = np.empty((2, form.outputs), kind)

    def run(
        self, rows: Any, source: np.ndarray, when: np.ndarray, counts: np.ndarray, rate: float, decay: float
    ) -> float:
        """Take this thread's steps of an epoch; return the sum of losses. source: row numbers, in the epoch's order."""
        mine, total, form = np.ascontiguousarray(source[self.number :: len(counts)]), 0.0, self.form
        columns = 1 if form.loss == SOFTMAX else form.outputs
        for start in range(0, len(mine), ROWS):
            index = mine[start : start + ROWS]
            x, y = self.x[: len(index)], np.empty((len(index), *rows.outputs), rows.y_kind)
            rows.gather(index, x, y)
            targets = np.ascontiguousarray(y.reshape(len(index), columns), self.z.dtype)
            more = rate, decay, form.loss, self.z, self.e
            if isinstance(x, CSR):
                arrays = x.data, x.indices, x.indptr, targets, *self.state, when
                total += kernels.sparse(*arrays, counts, self.number, *more)
            else:
                total += kernels.dense(x, targets, *self.state, *more)
        return total
