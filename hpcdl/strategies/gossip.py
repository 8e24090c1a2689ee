"""Gossip: every rank has a replica of its own, and averages it with its neighbours' on a sparse graph, never with all.

    method                 a step of rank i, with g_i the gradient of its share and W the mixing matrix     exchanged
    adapt-then-combine     x_i <- sum over j of W_ij (x_j - a g_j(x_j))                                     after
    dpsgd                  x_i <- sum over j of W_ij x_j - a g_i(x_i)                                       meanwhile
    gradient-tracking      y_i <- sum over j of W_ij y_j + g_i(x_i) - g_i(x_i of the step before)           meanwhile
                           x_i <- sum over j of W_ij x_j - a y_i
    detag                  the same once in a phase of R batches, with their mean gradient for g_i, and     meanwhile
                           R rounds of accelerated gossip for W
    defacto                g_i over R batches, then R rounds whose matrices multiply to 11^T/n: the         after
                           exact average, as by an all-reduce

    cost                   messages of a rank each step      values in a message, K parameters     replicas
    adapt-then-combine     neighbours                        K                                     nearly agree
    dpsgd                  neighbours                        K                                     nearly agree
    gradient-tracking      neighbours                        2 K                                   nearly agree
    detag                  neighbours                        2 K                                   nearly agree
    defacto                about 2, for R = factors          K                                     agree

Where every rank has other data, adapt-then-combine and D-PSGD with a constant rate stop at a distance of the optimum,
for g_i is not 0 there; gradient tracking does not, for y_i comes to be the mean gradient of all ranks. "Meanwhile": the
exchange is in flight while the gradient is computed, and taken forward between layers.

g_i is N / b times the sum over the rank's examples of the batch, so that the mean of g_1, ..., g_N is the batch's mean
gradient though shares may be uneven; on the complete graph adapt-then-combine is then all-reduce SGD, for any rule that
is linear in the gradient (SGD, momentum, Nesterov). What is reported is the average of the replicas.

(Adapt-then-combine: Chen and Sayed, "Diffusion adaptation strategies for distributed optimization", 2012. D-PSGD: Lian
et al., NeurIPS 2017. Gradient tracking: DIGing, here of minibatches: Nedic, Olshevsky and Shi, "Achieving geometric
convergence for distributed optimization over time-varying graphs", SIAM Journal on Optimization 2017. DeTAG and
DeFacto: Lu and De Sa, "Optimal complexity in decentralized training", ICML 2021.)
"""

from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np

from hpcdl.checkpoint.state import PerRank
from hpcdl.comm import Communicator, refuse_together
from hpcdl.comm.gossip.mixing import (
    RULES,
    acceleration,
    check_mixing,
    exact_factors,
    matrices,
    mixing,
    mixing_over_period,
    rounds_until,
    spectral_gap,
)
from hpcdl.comm.gossip.rounds import AcceleratedGossip, Gossip
from hpcdl.comm.gossip.topology import Topology
from hpcdl.data import Batch, Data
from hpcdl.errors import UsageError, unknown
from hpcdl.kernels.device import Array
from hpcdl.kernels.reduce import add_scaled
from hpcdl.memory import Memory
from hpcdl.optim import Optimizer
from hpcdl.runs.replicas import Replicas
from hpcdl.runs.run import Run


def train(
    comm: Communicator,
    model: Any,
    data: Data,
    optimizer: Optimizer,
    run: Run,
    topology: Topology,
    rule: str = RULES[0],
    method: str = "adapt-then-combine",
    phase: int = 0,
) -> np.ndarray:
    """Train on all ranks of `comm`; returns this rank's replica.

    rule: of the mixing matrix W (hpcdl/comm/gossip/mixing.py). method: one of METHODS. phase: batches of a phase; 0:
    see `batches_of`, which raises UsageError for what does not go together.
    """
    w = run.initial(model)
    gradient = comm.empty(like=w)
    with refuse_together(comm.mpi):
        phase = batches_of(method, topology, rule, phase)
    if optimizer.average_from is not None and method in ("detag", "defacto", "gradient-tracking"):
        optimizer.average_from //= phase  # which counts updates, one for each phase
    step = METHODS[method](comm, model, run.memory, w, gradient, optimizer, topology, rule, phase)
    for name, vector in step.tracked.items():
        run.track(name, PerRank(vector))
    run.report(allreduce=None, method=method, topology=topology.spec, mixing=rule, phase=phase)
    run.report(spectral_gap=spectral_gap(mixing_over_period(topology, rule)))
    fixed = "method", "topology", "mixing", "phase"
    run.begin("gossip", Replicas(model, w, optimizer), data, fixed)
    if run.outlived and isinstance(step, GradientTracking):
        step.begin_anew()
    for t, batch in enumerate(run.batches(data, share=(comm.rank, comm.size)), run.step):
        gradient[:] = 0
        loss = step(batch, t)
        run.record(loss, batch.total)
        run.boundary()
    run.report(updates=optimizer.step)
    return w


def batches_of(method: str, topology: Topology, rule: str, phase: int = 0) -> int:
    """The batches R of a phase; UsageError for a graph that the method cannot use, or a W that does not average.

    By itself, R is the number of factors (defacto), and for detag the rounds of accelerated gossip after which the
    distance to the average of N ranks is 1/N of what it was, or less: about log N / sqrt(spectral gap).
    """
    if method not in METHODS:
        raise unknown("method", method, METHODS)
    check_mixing(mixing_over_period(topology, rule))
    if phase > 1 and method not in ("detag", "defacto"):
        raise UsageError(f"{method} has no phases: leave out the number of its batches (--phase)")
    if method == "detag":
        if topology.period != 1:
            raise UsageError(f"detag's gossip is accelerated on one graph, and {topology.spec} changes; take another")
        return phase or rounds_until(mixing(topology, 0, rule), 1 / topology.size)
    if method == "defacto":
        return phase or max(1, len(exact_factors(topology)))
    return 1


class AdaptThenCombine:
    """Step, then average with the neighbours. tracked: the vectors of a rank that a checkpoint holds, too."""

    tracked: ClassVar[dict[str, Array]] = {}

    def __init__(
        self,
        comm: Communicator,
        model: Any,
        memory: Memory,
        w: Array,
        gradient: Array,
        optimizer: Optimizer,
        topology: Topology,
        rule: str,
        phase: int,
    ):
        self.comm, self.model, self.memory, self.w, self.gradient = comm, model, memory, w, gradient
        self.optimizer = optimizer
        self.gossip, self.matrix = Gossip(comm, w, memory), matrices(topology, rule)

    def __call__(self, batch: Batch, t: int) -> float:
        loss = self.model.loss_and_gradient(self.w, batch, self.gradient)
        self.optimizer.update(self.w, self.gradient, scale=self.comm.size / batch.total)
        self.gossip.round(self.matrix(t))
        return loss


class DPSGD(AdaptThenCombine):
    """Average with the neighbours, meanwhile compute the gradient where one was before, and step by it."""

    def __call__(self, batch: Batch, t: int) -> float:
        self.gossip.start(self.matrix(t))
        loss = self.model.loss_and_gradient(self.w, batch, self.gradient, self.gossip.progress)
        self.gossip.finish()
        self.optimizer.update(self.w, self.gradient, scale=self.comm.size / batch.total)
        return loss


class GradientTracking:
    """A phase: gossip x and y together, meanwhile the gradient at the x of its start; at its end a step along y."""

    def __init__(
        self,
        comm: Communicator,
        model: Any,
        memory: Memory,
        w: Array,
        gradient: Array,
        optimizer: Optimizer,
        topology: Topology,
        rule: str,
        phase: int,
    ):
        self.comm, self.model, self.memory, self.w, self.gradient = comm, model, memory, w, gradient
        self.optimizer = optimizer
        self.matrix, self.phase = matrices(topology, rule), phase
        self.both = comm.empty(2 * w.size, w.dtype)  # x and y, which travel together
        self.x, self.y = self.both[: w.size], self.both[w.size :]
        self.x[:], self.y[:] = w, 0
        self.before: dict[str, Array] = {}  # of accelerated gossip
        self.gossip = self.rounds(topology, rule)
        self.mean, self.last = comm.empty(like=w), comm.empty(like=w)  # gradients: of this phase, of the one before
        self.mean[:], self.last[:] = 0, 0
        self.tracked = self.before | {"gossip": self.both, "mean_gradient": self.mean, "last_gradient": self.last}

    def begin_anew(self) -> None:
        """Ranks are gone, with their parts of the sum of all y: y is the rank's own last gradient, as in the beginning.

        The y of all ranks sum up to their last gradients, which W keeps so: that is how y tracks their mean.
        """
        self.y[:] = self.last

    def rounds(self, topology: Topology, rule: str) -> Gossip:
        return Gossip(self.comm, self.both, self.memory)

    def __call__(self, batch: Batch, t: int) -> float:
        last = (t + 1) % self.phase == 0
        self.gossip.start(self.matrix(t))
        loss = self.model.loss_and_gradient(self.w, batch, self.gradient, self.gossip.progress)
        add_scaled(self.mean, self.gradient, self.comm.size / (batch.total * self.phase))
        self.gossip.finish()
        if last:
            self.y += self.mean
            self.y -= self.last
            self.last[:], self.mean[:] = self.mean, 0
            self.optimizer.update(self.x, self.y, rate=self.optimizer.schedule(t))
            self.w[:] = self.x
        return loss


class DeTAG(GradientTracking):
    """Gradient tracking with phases of several batches, and as many rounds of accelerated gossip."""

    gossip: AcceleratedGossip

    def rounds(self, topology: Topology, rule: str) -> AcceleratedGossip:
        gossip = AcceleratedGossip(self.comm, self.both, acceleration(mixing(topology, 0, rule)), self.memory)
        self.before["gossip_before"] = gossip.before
        return gossip

    def __call__(self, batch: Batch, t: int) -> float:
        if t % self.phase == 0:
            self.gossip.begin()
        return super().__call__(batch, t)


class DeFacto:
    """A phase: the mean gradient of its batches, a step, and rounds of gossip that end with the exact average."""

    def __init__(
        self,
        comm: Communicator,
        model: Any,
        memory: Memory,
        w: Array,
        gradient: Array,
        optimizer: Optimizer,
        topology: Topology,
        rule: str,
        phase: int,
    ):
        self.comm, self.model, self.memory, self.w, self.gradient = comm, model, memory, w, gradient
        self.optimizer = optimizer
        self.gossip, self.factors, self.phase = Gossip(comm, w, memory), exact_factors(topology), phase
        self.mean = comm.empty(like=w)
        self.mean[:] = 0
        self.tracked = {"mean_gradient": self.mean}

    def __call__(self, batch: Batch, t: int) -> float:
        loss = self.model.loss_and_gradient(self.w, batch, self.gradient)
        add_scaled(self.mean, self.gradient, self.comm.size / (batch.total * self.phase))
        if (t + 1) % self.phase == 0:
            self.optimizer.update(self.w, self.mean, rate=self.optimizer.schedule(t))
            self.mean[:] = 0
            for factor in self.factors:
                self.gossip.round(factor)
        return loss


METHODS: dict[str, Callable[..., Any]] = {
    "adapt-then-combine": AdaptThenCombine,
    "dpsgd": DPSGD,
    "gradient-tracking": GradientTracking,
    "detag": DeTAG,
    "defacto": DeFacto,
}
