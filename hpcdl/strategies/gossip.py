"""Gossip: every rank has a replica of the model, and averages it only with the replicas of its neighbours on a graph.

    method                 a step of rank i, with g_i the gradient of its share and W the mixing matrix     exchanged
    adapt-then-combine     x_i <- sum over j of W_ij (x_j - a g_j(x_j))                                     after
    dpsgd                  x_i <- sum over j of W_ij x_j - a g_i(x_i)                                       meanwhile
    gradient-tracking      y_i <- sum over j of W_ij y_j + g_i(x_i) - g_i(x_i of the step before)           meanwhile
                           x_i <- sum over j of W_ij x_j - a y_i
    detag                  in a phase of R batches, with their mean gradient as g_i and R rounds of         meanwhile
                           accelerated gossip as AG:   x_i <- AG(x)_i - a AG(y)_i,
                           then y_i <- AG(y)_i + g_i - g_i of the phase before
    defacto                in a phase of R batches, with their mean gradient as g_i: a step, then rounds    after
                           whose matrices multiply to 11^T/n, the exact average, as by an all-reduce

    cost                         messages of a rank each step      values in a message, K parameters     replicas
    adapt-then-combine, dpsgd    neighbours                        K                                     nearly agree
    gradient-tracking, detag     neighbours                        2 K                                   nearly agree
    defacto                      about 2, for R = factors          K                                     agree

"Meanwhile": the exchange is in flight while the gradient is computed. If the ranks have different data,
adapt-then-combine and D-PSGD with a constant rate stop at a distance from the optimum, because g_i is not 0 there.
Gradient tracking does not: y_i converges to the mean gradient. The run reports the average of the replicas.

g_i is N / b times the sum over the rank's examples, so that the mean of all g_i is the batch's mean gradient. On the
complete graph adapt-then-combine is all-reduce SGD for rules that are linear in the gradient (SGD, momentum, Nesterov).

(Adapt-then-combine: Chen and Sayed, "Diffusion adaptation strategies for distributed optimization", 2012. D-PSGD: Lian
et al., NeurIPS 2017. Gradient tracking: DIGing, here of minibatches: Nedic, Olshevsky and Shi, SIAM J. Optimization
2017. DeTAG and DeFacto: Lu and De Sa, "Optimal complexity in decentralized training", ICML 2021.)"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from hpcdl.comm.gossip.mixing import RULES, check_mixing, exact_factors, matrices, mixing, mixing_over_period
from hpcdl.comm.gossip.topology import Topology, topology, without
from hpcdl.errors import UsageError, unknown
from hpcdl.kernels.device import Array
from hpcdl.recovery.options import SurvivingOptions
from hpcdl.runs.options import not_negative, option, refuse
from hpcdl.strategies.compressing import CompressOptions, check_gossip, message_bytes
from hpcdl.strategies.description import Call, Communicator, Data, Memory, Optimizer, Run, StepCost, Strategy, Workload


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
    compress: str = "none",
    consensus_step: float = 0.0,
) -> np.ndarray:
    """Train on all ranks of `comm`; return this rank's replica. rule: for W, one of RULES. method: one of METHODS.
    phase: batches of a phase; 0: the default of `batches_of`. compress: CHOCO-SGD by this method, with the consensus
    step gamma (hpcdl/comm/gossip/choco.py). Raises UsageError as `batches_of` and `check_compressed` do."""
    from hpcdl.checkpoint.state import PerRank
    from hpcdl.comm import refuse_together
    from hpcdl.comm.gossip.mixing import spectral_gap
    from hpcdl.runs.replicas import Replicas

    w = run.initial(model)
    gradient = comm.empty(like=w)
    with refuse_together(comm.mpi):
        phase = batches_of(method, topology, rule, phase)
        if compress != "none":
            check_compressed(compress, method, topology)
    if optimizer.average_from is not None and method in ("detag", "defacto", "gradient-tracking"):
        optimizer.average_from //= phase  # counts updates, one per phase
    step = METHODS[method](comm, model, run.memory, w, gradient, optimizer, topology, rule, phase)
    if compress != "none":
        step.compress(compress, consensus_step, run.options.seed)
        run.report(consensus_step=step.choco.gamma)
    for name, vector in step.tracked.items():
        run.track(name, PerRank(vector))
    run.report(allreduce=None, compress=compress, method=method, topology=topology.spec, mixing=rule, phase=phase)
    run.report(spectral_gap=spectral_gap(mixing_over_period(topology, rule)))
    run.begin("gossip", Replicas(model, w, optimizer), data, ("method", "topology", "mixing", "phase"))
    if run.outlived and isinstance(step, GradientTracking):
        step.y[:] = step.last  # start anew: lost ranks took their parts of the sum of all y (`track`)
    for t, batch in enumerate(run.batches(data, share=(comm.rank, comm.size)), run.step):
        gradient[:] = 0
        loss = step(batch, t)
        run.record(loss, batch.total)
        run.boundary()
    run.report(updates=optimizer.step)
    return w


def batches_of(method: str, topology: Topology, rule: str, phase: int = 0) -> int:
    """Return R, the batches of a phase. UsageError if graph or phase do not fit the method, or W does not average.
    phase 0: R is the number of factors (defacto), or of rounds that divide the distance to the average by N (detag)."""
    from hpcdl.comm.gossip.mixing import rounds_until

    if method not in METHODS:
        raise unknown("method", method, METHODS)
    check_mixing(mixing_over_period(topology, rule))
    if phase > 1 and method not in ("detag", "defacto"):
        raise UsageError(f"{method} has no phases: leave out --phase, the number of batches of a phase")
    if method == "detag":
        if topology.period != 1:
            raise UsageError(f"detag needs a graph that stays the same, but {topology.spec} changes; take another")
        return phase or rounds_until(mixing(topology, 0, rule), 1 / topology.size)
    if method == "defacto":
        return phase or max(1, len(exact_factors(topology)))
    return 1


def check_compressed(spec: str, method: str, topology: Topology) -> None:
    """Raise UsageError if messages of gossip cannot be compressed by `spec`, under this method and graph."""
    check_gossip(spec, topology)
    if method != "adapt-then-combine":
        raise UsageError(f"--compress is CHOCO-SGD, which takes a step and then averages: leave out --method {method}")


@dataclass(eq=False)
class AdaptThenCombine:
    """Take a step, then average with the neighbours. tracked: this rank's vectors that a checkpoint holds, by name."""

    comm: Communicator
    model: Any
    memory: Memory
    w: Array
    gradient: Array
    optimizer: Optimizer
    topology: Topology
    rule: str
    phase: int

    def __post_init__(self) -> None:
        self.tracked: dict[str, Array] = {}
        self.gossip, self.matrix = self.rounds(self.w), matrices(self.topology, self.rule)
        self.choco: Any = None  # ChocoGossip

    def compress(self, spec: str, gamma: float, seed: int) -> None:
        """Gossip compressed messages from now on."""
        from hpcdl.comm.gossip.choco import ChocoGossip

        self.choco = ChocoGossip(self.comm, self.w, self.matrix(0), spec, gamma, seed, self.memory)
        self.tracked = {"estimate": self.choco.estimate, "mixed_estimates": self.choco.mixed}

    def rounds(self, vector: Array) -> Any:
        from hpcdl.comm.gossip.rounds import Gossip

        return Gossip(self.comm, vector, self.memory)

    def __call__(self, batch: Any, t: int) -> float:
        loss = self.model.loss_and_gradient(self.w, batch, self.gradient)
        self.optimizer.update(self.w, self.gradient, scale=self.comm.size / batch.total)
        if self.choco is None:
            self.gossip.round(self.matrix(t))
        else:
            self.choco.round(t)
        return loss


class DPSGD(AdaptThenCombine):
    """Average with the neighbours, meanwhile compute the gradient at the old replica; then take a step by it."""

    def __call__(self, batch: Any, t: int) -> float:
        self.gossip.start(self.matrix(t))
        loss = self.model.loss_and_gradient(self.w, batch, self.gradient, self.gossip.progress)
        self.gossip.finish()
        self.optimizer.update(self.w, self.gradient, scale=self.comm.size / batch.total)
        return loss


class GradientTracking(AdaptThenCombine):
    """Gossip x and y together; meanwhile compute gradients at the x of the phase's start; at the end step along y."""

    tracks_first = True  # y takes up the change of the gradient before the step along it

    def __post_init__(self) -> None:
        size = self.w.size
        self.tracked, self.matrix = {}, matrices(self.topology, self.rule)
        both = self.comm.empty(2 * size, self.w.dtype)  # x and y, which travel together
        self.x, self.y = both[:size], both[size:]
        self.x[:], self.y[:] = self.w, 0
        self.gossip = self.rounds(both)
        self.mean, self.last = (self.comm.empty(like=self.w) for _ in range(2))  # gradients: of this phase, the last
        self.mean[:], self.last[:] = 0, 0
        self.tracked |= {"gossip": both, "mean_gradient": self.mean, "last_gradient": self.last}

    def __call__(self, batch: Any, t: int) -> float:
        from hpcdl.kernels.reduce import add_scaled

        self.gossip.start(self.matrix(t))
        loss = self.model.loss_and_gradient(self.w, batch, self.gradient, self.gossip.progress)
        add_scaled(self.mean, self.gradient, self.comm.size / (batch.total * self.phase))
        self.gossip.finish()
        if (t + 1) % self.phase == 0:
            if self.tracks_first:
                self.track()
            self.optimizer.update(self.x, self.y, rate=self.optimizer.schedule(t))
            if not self.tracks_first:
                self.track()
            self.w[:] = self.x
        return loss

    def track(self) -> None:
        """Add the gradient's change to y, so that the sum of all y, which W keeps, becomes the sum of all gradients."""
        self.y += self.mean
        self.y -= self.last
        self.last[:], self.mean[:] = self.mean, 0


class DeTAG(GradientTracking):
    """Gradient tracking in phases of R batches and R rounds of accelerated gossip; y is updated after the step."""

    tracks_first = False

    def rounds(self, vector: Array) -> Any:
        from hpcdl.comm.gossip.mixing import acceleration
        from hpcdl.comm.gossip.rounds import AcceleratedGossip

        rate = acceleration(mixing(self.topology, 0, self.rule))
        gossip = AcceleratedGossip(self.comm, vector, rate, self.memory)
        self.tracked["gossip_before"] = gossip.before
        return gossip

    def __call__(self, batch: Any, t: int) -> float:
        if t % self.phase == 0:
            self.gossip.begin()
        return super().__call__(batch, t)


class DeFacto(AdaptThenCombine):
    """In each phase, step by the mean gradient of its batches, then gossip in rounds that give the exact average."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.factors, self.mean = exact_factors(self.topology), self.comm.empty(like=self.w)
        self.mean[:] = 0
        self.tracked = {"mean_gradient": self.mean}

    def __call__(self, batch: Any, t: int) -> float:
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
class GossipOptions(CompressOptions, SurvivingOptions):
    topology: str = option(
        "ring",
        "ring, torus, torus:RxC, hypercube, exponential, one-peer, star, complete, random-regular:degree=3, "
        "erdos-renyi:p=0.5, random-matching, or a file with a line 'a b' or 'a b weight' for each edge",
    )
    mixing: Literal["metropolis-hastings", "uniform"] = option("metropolis-hastings", "weights of the neighbours")
    method: Literal["adapt-then-combine", "dpsgd", "adpsgd", "gradient-tracking", "detag", "defacto"] = option(
        "adapt-then-combine", "how steps and averaging with the neighbours are combined"
    )
    phase: int = option(0, "detag, defacto: batches of a phase, and detag's rounds of gossip; 0: as the graph needs")
    consensus_step: float = option(
        0.0, "with --compress: gamma, the part of the way to the neighbours' average; 0: by the method's error"
    )
    draw: str = option("", "file into which the graph is drawn before the training: .png, .svg or .pdf")

    def __post_init__(self) -> None:
        super().__post_init__()
        not_negative(self, "phase", "consensus_step")
        lone = self.consensus_step and not self.compresses
        above = f"--consensus-step is at most 1, not {self.consensus_step}"
        refuse((lone, "--consensus-step is for --compress: leave it out"), (self.consensus_step > 1, above))


def check_method_and_graph(options: GossipOptions, ranks: int, model: Any) -> None:
    """Raise UsageError if no such graph has `ranks` ranks, or if the method or --survive cannot use the graph."""
    graph = graph_of(options, ranks)
    if options.survive and options.method not in OUTLIVE:
        raise UsageError(
            f"--survive: {options.method} needs all its ranks, which share a state or do not step together; "
            f"take --method {', '.join(OUTLIVE[:-1])} or {OUTLIVE[-1]}"
        )
    if options.survive and graph.weights is not None:
        raise UsageError(f"--survive: {options.topology} has weights, and has none for fewer ranks; leave them out")
    if options.compresses:
        check_compressed(options.compress, options.method, graph)
        if options.survive:
            raise UsageError("--survive: neighbours keep the estimates of a lost rank; leave out --compress")
    if options.method == "adpsgd":
        from hpcdl.strategies.asynchronous_gossip import check_undirected_and_unweighted

        check_undirected_and_unweighted(graph)
        if options.phase or options.mixing != RULES[0]:
            raise UsageError("adpsgd averages two models with equal weights: leave out --mixing and --phase")
    else:
        batches_of(options.method, graph, options.mixing, options.phase)


def graph_of(options: GossipOptions, ranks: int, survivor: Any = None) -> Topology:
    """Return the graph of --topology on `ranks` ranks; if there is none, the original graph without the lost ranks.
    survivor: the state of surviving ranks (hpcdl/recovery/survivor.py), or None. UsageError if there is no graph."""
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
        compression = options.compress, options.consensus_step
        train(comm, model, data, optimizer, run, graph, options.mixing, options.method, options.phase, *compression)


def held(case: Workload, rank: int, memory: Memory) -> None:
    """Add to `memory` the replica, the average, a vector received from each neighbour, and the method's vectors."""
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
        if options.compresses:  # messages in, and out; the difference; the estimate, and the neighbours' mixed ones
            length = message_bytes(options.compress, case, case.length)
            case.hold(memory, "parameters", 1 + received, length, 1)
            case.hold_step(memory, rows, 3, optimizer=vectors + 2)
            return
        case.hold_step(memory, rows, 2 + received, optimizer=vectors + (options.method == "defacto"))


def step(case: Workload) -> StepCost:
    """Return the cost of the gradient of a rank's share, and of exchanges after the update or during the gradient."""
    options, rows, method = case.options, case.largest, case.options.method
    gradients = [(rows, 1)]
    if method == "adpsgd":  # x to one neighbour, the mean back; no rank waits for another's gradient
        calls = [Call("message", case.bytes, 2)] if case.size > 1 else []
        return StepCost(case.batch, gradients, calls, drawn=rows, hidden_by="backward")
    graph = topology(options.topology, case.size, options.seed)
    if method == "defacto":
        nonzero = [[np.flatnonzero(row).tolist() for row in factor] for factor in exact_factors(graph)]
        rounds = [[[j for j in row if j != i] for i, row in enumerate(factor)] for factor in nonzero]
        phase = batches_of(method, graph, options.mixing, options.phase)
        calls = Call.exchanges(case.bytes, rounds, len(rounds) / phase)
        return StepCost(case.batch, gradients, calls, drawn=rows)
    vectors = 2 if method in ("gradient-tracking", "detag") else 1
    sent = vectors * case.bytes
    if options.compresses:
        sent = message_bytes(options.compress, case, case.length)
    calls = Call.exchanges(sent, graph.graphs())
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
