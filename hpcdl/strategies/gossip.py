"""Gossip: every rank has a replica of its own, and averages it with its neighbours' on a sparse graph, never with all.

    method                 a step of rank i, with g_i the gradient of its share and W the mixing matrix     exchanged
    adapt-then-combine     x_i <- sum over j of W_ij (x_j - a g_j(x_j))                                     after
    dpsgd                  x_i <- sum over j of W_ij x_j - a g_i(x_i)                                       meanwhile
    gradient-tracking      y_i <- sum over j of W_ij y_j + g_i(x_i) - g_i(x_i of the step before)           meanwhile
                           x_i <- sum over j of W_ij x_j - a y_i
    detag                  once in a phase of R batches, with their mean gradient for g_i, R rounds of      meanwhile
                           accelerated gossip for W, and the step before y_i takes up the gradient:
                           x_i <- AG(x)_i - a AG(y)_i,  y_i <- AG(y)_i + g_i - g_i of the phase before
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
DeFacto: Lu and De Sa, "Optimal complexity in decentralized training", ICML 2021; longer in JMLR 2023.)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np

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
from hpcdl.comm.gossip.topology import Topology, topology, without
from hpcdl.errors import UsageError, unknown
from hpcdl.kernels.device import Array
from hpcdl.memory import Memory
from hpcdl.recovery.options import SurvivingOptions
from hpcdl.runs.options import option
from hpcdl.strategies.description import Call, StepCost, Strategy, exchanges

if TYPE_CHECKING:
    from hpcdl.comm import Communicator
    from hpcdl.comm.gossip.rounds import AcceleratedGossip, Gossip
    from hpcdl.data import Batch, Data
    from hpcdl.optim import Optimizer
    from hpcdl.runs.run import Run
    from hpcdl.strategies.workload import Workload


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
    from hpcdl.checkpoint.state import PerRank
    from hpcdl.comm import refuse_together
    from hpcdl.runs.replicas import Replicas

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
        from hpcdl.comm.gossip.rounds import Gossip

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
        from hpcdl.comm.gossip.rounds import Gossip

        return Gossip(self.comm, self.both, self.memory)

    def __call__(self, batch: Batch, t: int) -> float:
        from hpcdl.kernels.reduce import add_scaled

        last = (t + 1) % self.phase == 0
        self.gossip.start(self.matrix(t))
        loss = self.model.loss_and_gradient(self.w, batch, self.gradient, self.gossip.progress)
        add_scaled(self.mean, self.gradient, self.comm.size / (batch.total * self.phase))
        self.gossip.finish()
        if last:
            self.end_phase(self.optimizer.schedule(t))
            self.w[:] = self.x
        return loss

    def end_phase(self, rate: float) -> None:
        """Add the change of the gradient to y, then step along y."""
        self.track()
        self.optimizer.update(self.x, self.y, rate=rate)

    def track(self) -> None:
        """y <- y + this phase's gradient - that of the phase before."""
        self.y += self.mean
        self.y -= self.last
        self.last[:], self.mean[:] = self.mean, 0


class DeTAG(GradientTracking):
    """Gradient tracking with phases of several batches, and as many rounds of accelerated gossip."""

    gossip: AcceleratedGossip

    def rounds(self, topology: Topology, rule: str) -> AcceleratedGossip:
        from hpcdl.comm.gossip.rounds import AcceleratedGossip

        gossip = AcceleratedGossip(self.comm, self.both, acceleration(mixing(topology, 0, rule)), self.memory)
        self.before["gossip_before"] = gossip.before
        return gossip

    def end_phase(self, rate: float) -> None:
        """Step along y, which tracks the gradient of the phase before, then add the change of the gradient to y."""
        self.optimizer.update(self.x, self.y, rate=rate)
        self.track()

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
        from hpcdl.comm.gossip.rounds import Gossip

        self.comm, self.model, self.memory, self.w, self.gradient = comm, model, memory, w, gradient
        self.optimizer = optimizer
        self.gossip, self.factors, self.phase = Gossip(comm, w, memory), exact_factors(topology), phase
        self.mean = comm.empty(like=w)
        self.mean[:] = 0
        self.tracked = {"mean_gradient": self.mean}

    def __call__(self, batch: Batch, t: int) -> float:
        from hpcdl.kernels.reduce import add_scaled

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


OUTLIVE = ("adapt-then-combine", "dpsgd", "gradient-tracking")  # methods whose ranks may be lost


@dataclass(frozen=True)
class GossipOptions(SurvivingOptions):
    topology: str = option(
        "ring",
        "ring, torus, torus:RxC, hypercube, exponential, one-peer, star, complete, random-regular:degree=3, "
        "erdos-renyi:p=0.5, random-matching, or a file with a line 'a b' or 'a b weight' for each edge",
    )
    mixing: Literal["metropolis-hastings", "uniform"] = option("metropolis-hastings", "weights of the neighbours")
    method: Literal["adapt-then-combine", "dpsgd", "adpsgd", "gradient-tracking", "detag", "defacto"] = option(
        "adapt-then-combine", "how steps and averaging with the neighbours go together"
    )
    phase: int = option(0, "detag, defacto: batches of a phase, and detag's rounds of gossip; 0: as the graph needs")

    draw: str = option("", "file into which the graph is drawn before the training: .png, .svg or .pdf")

    def __post_init__(self) -> None:
        super().__post_init__()
        self._refuse_negative("phase")


def check_method_and_graph(options: GossipOptions, ranks: int, model: Any) -> None:
    """Raise UsageError where these ranks have no such graph, or the method cannot use it."""
    graph = graph_of(options, ranks)
    if options.survive:
        refuse_no_survivors(options, graph)
    if options.method == "adpsgd":
        from hpcdl.strategies.asynchronous_gossip import check_undirected_and_unweighted

        check_undirected_and_unweighted(graph)
        if options.phase or options.mixing != RULES[0]:
            raise UsageError("adpsgd averages two at a time, half and half: leave out --mixing and --phase")
    else:
        batches_of(options.method, graph, options.mixing, options.phase)


def graph_of(options: GossipOptions, ranks: int, survivor: Any = None) -> Topology:
    """The graph of so many ranks; of those that are left, where the name has none, what is left of the one before.

    survivor: what these go on from (hpcdl/recovery/survivor.py), or None.
    """
    shrunk = [] if survivor is None else survivor.shrunk
    try:
        return topology(options.topology, ranks, options.seed)
    except UsageError:
        if not shrunk:
            raise
    graph = topology(options.topology, shrunk[0][0], options.seed)
    for _, gone in shrunk:
        graph = without(graph, gone)
    return graph


def refuse_no_survivors(options: GossipOptions, graph: Topology) -> None:
    """Raise UsageError where the ranks that are left could not go on."""
    if options.method not in OUTLIVE:
        raise UsageError(
            f"--survive: {options.method}'s state depends on how many ranks there are, or they do not step together; "
            f"take --method {', '.join(OUTLIVE[:-1])} or {OUTLIVE[-1]}"
        )
    if graph.weights is not None:
        raise UsageError(f"--survive: {options.topology} has weights, of which nobody knows those of a smaller graph")


def start(comm: Communicator, model: Any, data: Data, optimizer: Optimizer, run: Run) -> None:
    from hpcdl.comm import refuse_together
    from hpcdl.comm.gossip.draw import draw
    from hpcdl.strategies.asynchronous_gossip import train as train_without_steps

    options: Any = run.options
    graph = graph_of(options, comm.size, run.survivor)
    with refuse_together(comm.mpi):
        if options.draw and comm.rank == 0:
            draw(graph, options.mixing, options.draw)
    if options.method == "adpsgd":
        train_without_steps(comm, model, data, optimizer, run, graph)
    else:
        train(comm, model, data, optimizer, run, graph, options.mixing, options.method, options.phase)


def held(case: Workload, rank: int, memory: Memory) -> None:
    """The replica, the average, a vector from each neighbour, and the vectors of the method."""
    options, vectors = case.options, len(case.vectors)
    graph, rows = topology(options.topology, case.size, options.seed), case.share(rank, case.size)
    neighbours = graph.senders(rank)
    received = len(neighbours)
    if options.method == "adpsgd":
        # x, the average, the copy for the gradient; a receive buffer per lower neighbour; for one higher neighbour at a
        # time the sent vector and the mean that comes back.
        lower = sum(each < rank for each in neighbours)
        case.hold_step(memory, rows, 3 + lower + 2 * (received > lower), optimizer=2 * vectors)
    elif options.method in ("gradient-tracking", "detag"):
        before = 2 * (options.method == "detag")  # x and y of the round before, and those that are sent
        case.hold_step(memory, rows, 2 + 2 * received + before, optimizer=vectors + 4 + before)
    else:
        batches_of(options.method, graph, options.mixing, options.phase)
        case.hold_step(memory, rows, 2 + received, optimizer=vectors + (options.method == "defacto"))


def step(case: Workload) -> StepCost:
    """A gradient of the share; exchanges with the neighbours after the update, or while the gradient is computed."""
    options, rows, method = case.options, case.largest, case.options.method
    gradients = [(rows, 1)]
    if method == "adpsgd":  # x to one, the mean back; no rank waits for another's gradient
        calls = [Call("message", case.bytes, 2)] if case.size > 1 else []
        return StepCost(case.batch, gradients, calls, drawn=rows, hidden_by="backward")
    graph = topology(options.topology, case.size, options.seed)
    if method == "defacto":
        nonzero = [[np.flatnonzero(row).tolist() for row in factor] for factor in exact_factors(graph)]
        rounds = [[[j for j in row if j != i] for i, row in enumerate(factor)] for factor in nonzero]
        phase = batches_of(method, graph, options.mixing, options.phase)
        return StepCost(case.batch, gradients, exchanges(case.bytes, rounds, len(rounds) / phase), drawn=rows)
    vectors = 2 if method in ("gradient-tracking", "detag") else 1
    calls = exchanges(vectors * case.bytes, graph.graphs())
    hidden_by = "" if method == "adapt-then-combine" else "gradient"
    return StepCost(case.batch, gradients, calls, drawn=rows, hidden_by=hidden_by)


STRATEGY = Strategy(
    "train-gossip",
    GossipOptions,
    start,
    held,
    step,
    check=check_method_and_graph,
    mode=lambda options: "adpsgd" if options.method == "adpsgd" else "",
    modes={"adpsgd": "--method adpsgd --topology complete"},
)
