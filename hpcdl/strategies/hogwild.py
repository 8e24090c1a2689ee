"""HOGWILD!: threads that share one vector take steps of SGD on it, all at once, and no thread waits for another.

    w <- initial values, in memory that all threads see
    each thread, over its part of the examples of a round:
        read w where its example is not zero; g <- the gradient of the example's loss there
        w_u <- w_u - lr (g_u + lambda n / d_u w_u)       for these coordinates u, with plain loads and stores

    thread 0   read ... write read ... write read ...
    thread 1       read ... write    read ... write          what one writes between another's reading and writing
    thread 2   read ... write read ... write read ...        is a collision: rare, where examples are sparse

lambda is the weight decay, n the number of examples and d_u that of the examples that touch coordinate u: over an epoch
it adds up to the penalty's own. On dense rows every example touches all coordinates. Of a linear model the gradient is
the example times one slope for each output, so an update costs a multiple of what is not zero in its example.

One thread is sequential SGD with as many examples to an update. Several are not repeatable: they meet by chance.

locking (kernels/hogwild.py): none; atomic, no update of a coordinate is lost; striped, an update locks what it touches
(the paper's AIG, which locks the writing alone); global, one lock; round-robin, updates are written in turn (RR).

exchange_every: that many updates long, and no longer than a round, each thread works on a replica of its own, then adds
what it has changed to the vector, and takes over what others have added: what a thread reads was seldom written last by
another core. 0: each update is written to the vector at once. One thread in all needs none.

A step of the run is a round, run.batch examples, within which nothing is looked at but a flag to stop. The learning
rate is that of the round's first update.

shared: all ranks of a node work on one vector, in memory that they share; no message is sent. Several vectors, of nodes
or of ranks, are joined every join_every rounds:

    join           what happens                                                        sent by a vector's first rank
    all-reduce     w <- mean of all vectors, as local SGD does                         an all-reduce of K values
    gossip         w_i <- sum over j of W_ij w_j, W of a graph                         K to each neighbour
    servers        w <- pull; a round; push w - what was pulled, added as it comes     K to the servers, and K back

With one thread and one batch to a round, all-reduce is local SGD. Adagrad's sums of squares stay with their vector.

(Recht, Re, Wright and Niu, "HOGWILD!: a lock-free approach to parallelizing stochastic gradient descent", NeurIPS 2011;
exchanges: Zhang, Hsieh and Akella, "HogWild++: a new mechanism for decentralized asynchronous stochastic gradient
descent", ICDM 2016)
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from hpcdl.chunks import chunks
from hpcdl.comm.gossip.mixing import RULES, check_mixing, matrices, mixing_over_period
from hpcdl.comm.gossip.topology import Topology, topology
from hpcdl.errors import UsageError, unknown
from hpcdl.formatting import counted
from hpcdl.kernels.device import CPU
from hpcdl.parameter_server.consistency import Consistency
from hpcdl.random import Random
from hpcdl.runs.options import Options, option
from hpcdl.strategies.description import Call, Service, StepCost, Strategy, exchanges

if TYPE_CHECKING:
    from hpcdl.comm import Communicator
    from hpcdl.data import Data
    from hpcdl.memory import Memory
    from hpcdl.models.linear_form import LinearForm
    from hpcdl.optim import Optimizer
    from hpcdl.parallel.shared_vector import VectorSharing
    from hpcdl.parallel.thread_team import ThreadTeam
    from hpcdl.parameter_server.parameter_store import ParameterStore
    from hpcdl.runs.run import Run
    from hpcdl.runs.stopwatch import Stopwatch
    from hpcdl.strategies.workload import Workload

log = logging.getLogger("hpcdl")
JOINS = "all-reduce", "gossip", "servers"


def train(
    comm: Communicator,
    model: Any,
    data: Data,
    optimizer: Optimizer,
    run: Run,
    *,
    threads: int = 1,
    locking: str = "none",
    batch: int = 1,
    exchange_every: int = 0,
    shared: bool = False,
    join: str = "all-reduce",
    join_every: int = 1,
    topology: Callable[[int], Topology] | None = None,
    rule: str = RULES[0],
) -> np.ndarray:
    """Train on all ranks of `comm`, each with so many threads; returns the vector that this rank works on.

    batch: examples of an update. join: all-reduce or gossip; for servers there is `train_on_servers`. topology, rule:
    gossip's graph of so many vectors, and the rule of its mixing matrix.
    """
    from hpcdl.comm import refuse_together
    from hpcdl.parallel.shared_vector import SharedVector, ThreadCounts, VectorPerNode, VectorSharing
    from hpcdl.parallel.thread_team import ThreadTeam

    with refuse_together(comm.mpi):
        form = form_of(model, optimizer)
    sharing, share = VectorSharing(comm, run, shared), (comm.rank, comm.size)
    w, words, state = arrays_of(sharing, comm, model, optimizer, run.random, threads)
    one, alone, tally = sharing.vectors == 1, comm.size == 1, ThreadCounts(optimizer)
    held: Any = SharedVector(model, w, optimizer, tally) if one else VectorPerNode(model, w, optimizer, tally, sharing)
    bookkeeping, (size, per_epoch, _) = run.bookkeeping, run.plan(data)
    turns = most_turns(bookkeeping, data.most_rows(size, share), threads, batch)
    crowded = outnumbered(bookkeeping, threads, comm.rank == 0)
    with refuse_together(comm.mpi):
        joined = None if one else Join(run, sharing, w, join, topology, rule)
        settings: dict[str, Any] = {"threads": threads, "locking": locking, "batch": batch, "words": words}
        settings["exchange_every"] = exchange_every
        settings |= {"first": sharing.place * threads, "count": sharing.sharers * threads, "turns": turns}
        decays = decays_of(bookkeeping, data, share, optimizer)
        team = tally.team = ThreadTeam(form, data, w, optimizer, decays, crowded=crowded, **settings)
    run.report(allreduce=comm.allreduce if joined and join == "all-reduce" else None, locking=locking, shared=shared)
    run.report(threads=threads, vectors=sharing.vectors, update_batch=batch, repeatable=team.count == 1)
    run.report(join=join if joined else None, join_every=join_every if joined else None, exchange_every=exchange_every)
    run.begin("hogwild", held, data)
    kept = [(vector, vector.copy()) for vector in (w, *state)] if alone else []  # as of the last whole round
    for step in run.rounds():
        with run.stopwatch.fetching():
            _, source, _, total = data.part_in_place(*divmod(step, per_epoch), size, share)
        for vector, copy in kept:
            copy[:] = vector
        loss = team.round(source, optimizer.schedule(step), interruptible=alone)
        if loss is None:  # a signal came
            for vector, copy in kept:
                vector[:] = copy
            run.interrupted()
            continue
        if joined and (step + 1) % join_every == 0:
            joined.meet((step + 1) // join_every - 1)
        run.record(loss, total)
        run.boundary()
    team.close()
    tally.gather(bookkeeping)
    run.report(**tally.entries(run.seconds))
    return w


def train_on_servers(
    comm: Communicator,
    model: Any,
    data: Data,
    optimizer: Optimizer,
    run: Run,
    *,
    servers: int = 1,
    threads: int = 1,
    locking: str = "none",
    batch: int = 1,
    exchange_every: int = 0,
) -> np.ndarray:
    """Train on all ranks of `comm`, of which the first `servers` hold the vector; each round is a worker's.

    Workers share no memory: each pulls the vector, lets its threads work on its copy of it, and pushes what they have
    changed, which the servers add. Returns the parameters: whole on rank 0 and the workers, on other servers a slice.
    """
    from hpcdl.comm import refuse_together
    from hpcdl.parallel.shared_vector import ThreadCounts
    from hpcdl.parallel.thread_team import ThreadTeam, words_for
    from hpcdl.parameter_server.parameter_store import ParameterStore
    from hpcdl.parameter_server.run_on_servers import OnServers
    from hpcdl.parameter_server.store_settings import Serving, StoreLayout

    works, tally = comm.rank >= servers, ThreadCounts(optimizer)
    with refuse_together(comm.mpi):
        form = form_of(model, optimizer)
        if optimizer.state:
            raise UsageError("--join servers adds up what workers change, who have no state in common: take sgd")
    whole = model.initialize(run.random) if comm.rank == 0 else None
    w = np.empty(model.layout.size, model.layout.dtype) if works else None
    held = OnServers(run, model, w if whole is None else whole, optimizer, works)
    bookkeeping, stopwatch, memory = run.bookkeeping, run.stopwatch, run.memory
    crowded = outnumbered(bookkeeping, threads, comm.rank == 0)
    with refuse_together(comm.mpi):
        if w is not None:
            decays = decays_of(bookkeeping, data, (0, 1), optimizer)
            settings: dict[str, Any] = {"threads": threads, "locking": locking, "batch": batch}
            settings["exchange_every"] = exchange_every
            words = words_for(threads)
            tally.team = ThreadTeam(form, data, w, optimizer, decays, words=words, crowded=crowded, **settings)
    run.report(allreduce=None, threads=threads, locking=locking, shared=False, vectors=comm.size - servers)
    run.report(update_batch=batch, join="servers", join_every=1, servers=servers, repeatable=False)
    run.report(exchange_every=exchange_every)
    run.observe(lambda run, loss, total: count_updates(optimizer, total, threads, batch))
    run.begin("hogwild", held, data)
    store = ParameterStore(
        comm,
        StoreLayout(model.layout.size, comm.size, model.layout.dtype, servers),
        Serving(Consistency("async")),
        initial=whole,
        start=run.step,
        horizon=held.horizon_of_store if comm.rank == 0 else None,
        memory=memory,
    )
    held.follow(store)
    with run.going_on():
        if comm.rank == 0:
            with stopwatch.step("serve"):
                for loss, examples in store.completed_steps():
                    run.record(loss, int(examples))
                    run.boundary(store.signalled)
        elif w is None or tally.team is None:
            with stopwatch.step("serve"):
                store.serve()
        else:
            memory.hold("parameters", w)  # as it was pulled
            tally.team.weigh(memory)
            work(comm, store, data, run.plan(data), w, tally.team, optimizer, stopwatch)
            tally.team.close()
    store.free()
    updates, seconds = optimizer.step, run.seconds
    tally.gather(bookkeeping)
    run.report(**tally.entries(seconds))  # samples are of this leg; updates of all
    run.report(updates=updates, updates_per_second=updates / max(1e-9, seconds))
    held.raise_failure()
    return store.server.values if held.parameters is None else held.parameters


def work(
    comm: Communicator,
    store: ParameterStore,
    data: Data,
    plan: tuple[int, int, int],
    w: np.ndarray,
    team: ThreadTeam,
    optimizer: Optimizer,
    stopwatch: Stopwatch,
) -> None:
    """What a worker does: pull, let its threads work, push what they have changed, until no round is left.

    plan: as `Run.plan` gives it.
    """
    from hpcdl.parameter_server.run_on_servers import request_step

    before, (batch, per_epoch, _) = np.empty_like(w), plan
    while True:
        with stopwatch.step():
            step = request_step(comm, store, stopwatch, store.pull, w)
            if step is None:
                break
            with stopwatch.fetching():
                _, source, _, total = data.part_in_place(*divmod(step, per_epoch), batch)
            before[:] = w
            loss = team.round(source, optimizer.schedule(step))
            w -= before
            store.push(w, count=total, total=total, loss=loss)
    store.close(w)


def form_of(model: Any, optimizer: Optimizer) -> LinearForm:
    """What HOGWILD! has to know of a model; UsageError for one that is not linear, and for another rule."""
    from hpcdl.models.linear_form import linear_form
    from hpcdl.models.model import abilities_of, unwrapped
    from hpcdl.parallel.thread_team import check_rule

    if abilities_of(model).device is not CPU:
        raise UsageError("HOGWILD! works on the cores of the processor: leave out --device cuda")
    check_rule(optimizer)
    return linear_form(unwrapped(model), "train-hogwild")


def arrays_of(
    sharing: VectorSharing, comm: Communicator, model: Any, optimizer: Optimizer, random: Random, threads: int
) -> tuple[np.ndarray, np.ndarray, list[np.ndarray]]:
    """The vector with its initial values, the words of its threads, the optimizer's vectors; collective."""
    from hpcdl.parallel.thread_team import words_for

    vector = model.layout.size, model.layout.dtype
    count = words_for(threads * sharing.sharers).size, np.dtype(np.int64)
    w, words, *state = sharing.arrays(comm, [vector, count, *(vector for _ in optimizer.state)])
    optimizer.state = dict(zip(optimizer.state, state, strict=True))
    if sharing.place == 0:
        w[:] = model.initialize(random)
    sharing.meet()
    return w, words, state


def most_turns(bookkeeping: Communicator, rows: int, threads: int, batch: int) -> int:
    """No thread of any rank has more updates in a round; rows: the most that this rank has. Collective."""
    from mpi4py import MPI

    most = bookkeeping.mpi.allreduce(rows, op=MPI.MAX)
    return math.ceil(math.ceil(most / threads) / batch)


def outnumbered(bookkeeping: Communicator, threads: int, leads: bool) -> bool:
    """Whether the threads of a node's ranks outnumber its cores, of which the rank that leads warns; collective."""
    from hpcdl.comm.node_memory import cores, ranks_of_node

    node = ranks_of_node(bookkeeping.mpi)
    here, there = node.size * threads, cores(node)
    node.Free()
    if leads and threads > 1 and here > there:
        log.warning("%s on %s take turns: more threads bring no speed", counted(here, "thread"), counted(there, "core"))
    return here > there


def decays_of(bookkeeping: Communicator, data: Data, share: tuple[int, int], optimizer: Optimizer) -> np.ndarray | None:
    """By how much an example pulls each coordinate that it touches, lambda n / d_u; None of dense rows. Collective.

    The bias, which all examples touch, is pulled by lambda.
    """
    from hpcdl.parallel.thread_team import touched

    if not data.sparse or not optimizer.weight_decay:
        return None
    rows, source, _ = data.in_place(0, share)
    counts = touched(rows, source)
    if share[1] > 1:
        bookkeeping.all_reduce(counts)
    factors = data.examples / np.maximum(1, np.append(counts, data.examples))
    return (optimizer.weight_decay * factors).astype(optimizer.dtype)


def count_updates(optimizer: Optimizer, total: int, threads: int, batch: int) -> None:
    """A round of `total` examples is done."""
    optimizer.step += sum(-(-(part.stop - part.start) // batch) for part in chunks(total, threads))


class Join:
    """How the vectors of a run come together; `meet` is called by all ranks of each."""

    def __init__(
        self,
        run: Run,
        sharing: VectorSharing,
        w: np.ndarray,
        join: str,
        topology: Callable[[int], Topology] | None,
        rule: str,
    ):
        from hpcdl.comm.gossip.rounds import Gossip

        if join not in JOINS[:2]:
            raise unknown("join", join, JOINS)
        self.sharing, self.w, self.gossip = sharing, w, None
        if join == "gossip":
            assert topology is not None
            graph = topology(sharing.vectors)
            check_mixing(mixing_over_period(graph, rule))
            self.matrix = matrices(graph, rule)
            if sharing.owners is not None:
                self.gossip = Gossip(sharing.owners, w, run.memory)
            run.report(topology=graph.spec, mixing=rule)

    def meet(self, time: int) -> None:
        """The vectors meet for that time, from 0 on."""
        self.sharing.meet()
        if self.gossip is not None:
            self.gossip.round(self.matrix(time))
        elif self.sharing.owners is not None:
            self.sharing.owners.all_reduce(self.w, op="mean")
        self.sharing.meet()


PARTS = 10  # rounds of an epoch, by itself
MOST_THREADS = 1024


@dataclass(frozen=True)
class HogwildOptions(Options):
    threads: int = option(1, "threads of each rank, which update one vector all at once")
    locking: Literal["none", "atomic", "striped", "global", "round-robin"] = option(
        "none", "what an update locks: nothing, nothing but lose no update, its coordinates, all, or wait for its turn"
    )
    exchange_every: int = option(
        0, "each thread works on a replica, exchanged with the others' after so many of its updates; 0: none has one"
    )
    round_size: int = option(
        0, "examples of a round, of all ranks together, which the run counts as a step; 0: a tenth of an epoch"
    )
    shared: bool = option(False, "all ranks of a node work on one vector, in memory that they share")
    join: Literal["all-reduce", "gossip", "servers"] = option(
        "all-reduce", "how several vectors come together: averaged, averaged with neighbours, or on servers"
    )
    join_every: int = option(1, "rounds between two times that vectors come together")
    servers: int = option(0, "with --join servers: ranks that hold the parameters; 0: one")
    topology: str = option("ring", "with --join gossip: the graph, as in train-gossip")
    mixing: Literal["metropolis-hastings", "uniform"] = option(
        "metropolis-hastings", "with --join gossip: weights of the neighbours"
    )
    model: str = option("softmax", "a linear model: linear, logistic, svm or softmax", group="model")
    batch_size: int = option(1, "examples per update of a thread", group="optimization")
    optimizer: str = option("sgd", "sgd or adagrad; settings as in adagrad:eps=1e-8", group="optimization")
    schedule: str = option(
        "step:every=1,factor=0.9",
        "constant, step, cosine or 1/t, of the rate over the updates of a vector; it changes from round to round",
        group="optimization",
    )

    unused = ("accumulate", "clip_norm", "batch_per_rank", "augment", "data_servers", "average", "straggler")

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("threads", "join_every"):
            if getattr(self, name) < 1:
                raise UsageError(f"--{name.replace('_', '-')} must be greater than 0, not {getattr(self, name)}")
        for name in ("round_size", "servers"):
            self._refuse_negative(name)
        from hpcdl.parallel.thread_team import check_exchange

        check_exchange(self.exchange_every, self.locking)
        if self.threads > MOST_THREADS:
            raise UsageError(f"--threads is {MOST_THREADS} at most, not {self.threads}")
        plain = Options()
        for name in (*self.unused, "pretend_compute"):
            if getattr(self, name) != getattr(plain, name):
                raise UsageError(
                    f"--{name.replace('_', '-')}: threads take whole examples one by one from memory; leave it out"
                )
        if isinstance(self.batch_size, str):
            raise UsageError("--batch-size full: an update of a thread has a number of examples, 1 by itself")
        if self.optimizer.partition(":")[0] not in ("sgd", "adagrad"):
            raise UsageError(
                f"--optimizer {self.optimizer}: it moves coordinates that no example touches; take sgd or adagrad"
            )
        if self.device != "cpu":
            raise UsageError(f"--device {self.device}: threads work on the cores of the processor; leave it out")
        if self.placement == "streamed":
            raise UsageError("--placement streamed: threads need the rows in memory; take shared or partitioned")
        self._check_join()

    def _check_join(self) -> None:
        if self.join != "servers":
            if self.servers:
                raise UsageError("--servers goes with --join servers")
            return
        object.__setattr__(self, "servers", self.servers or 1)
        if self.shared:
            raise UsageError("--join servers: each worker has a vector of its own; leave out --shared")
        if self.join_every != 1:
            raise UsageError("--join servers: a worker pushes after each round; for fewer take a larger --round-size")
        if self.placement != "shared" or self.partition != "iid":
            raise UsageError("--join servers: any worker may have to do any round; take --placement shared")
        if self.optimizer.partition(":")[0] != "sgd":
            raise UsageError("--join servers adds up what workers change, who have no state in common; take sgd")

    def plan(self, ranks: int, data: Any) -> tuple[int, int, int]:
        """A step is a round."""
        share = self.batch_size * self.threads * (1 if self.join == "servers" else ranks)
        parts = PARTS * (ranks if self.join == "servers" else 1)
        size = self.round_size or -(-data.examples // (parts * share)) * share
        per_epoch = data.steps_per_epoch(size)
        return size, per_epoch, self.allowance.steps(self.steps or self.epochs * per_epoch, size)

    def make_optimizer(self, model: Any, ranks: int, data: Any, size: int | None = None) -> Optimizer:
        """The rate of a round is that of its first update, as the schedule has it over the updates of one vector."""
        from hpcdl.optim import make_schedule

        made = super().make_optimizer(model, ranks, data, size)
        examples, per_epoch, rounds = self.plan(ranks, data)
        each = self.batch_size * (1 if self.shared or self.join == "servers" else ranks)
        updates = -(-data.examples // each)  # of an epoch

        def first(step: int) -> int:
            epoch, step = divmod(step, per_epoch)
            return epoch * updates + step * examples // each

        schedule = make_schedule(self.schedule, self.lr, first(rounds), updates, each)
        made.schedule = lambda step: schedule(first(step))
        return made


def check(options: HogwildOptions, ranks: int, model: Any) -> None:
    from hpcdl.models.linear_form import linear_form

    linear_form(model, "train-hogwild")
    if options.join == "gossip" and not options.shared:
        check_mixing(mixing_over_period(topology(options.topology, ranks, options.seed), options.mixing))


def start(comm: Communicator, model: Any, data: Data, optimizer: Optimizer, run: Run) -> None:
    options: Any = run.options
    settings = {name: getattr(options, name) for name in ("threads", "locking", "exchange_every")}
    settings["batch"] = options.batch_size
    if options.join == "servers":
        train_on_servers(comm, model, data, optimizer, run, servers=options.servers, **settings)
        return
    settings |= {name: getattr(options, name) for name in ("shared", "join", "join_every")}
    graph = partial(topology, options.topology, seed=options.seed)
    train(comm, model, data, optimizer, run, topology=graph, rule=options.mixing, **settings)


def vectors_of(case: Workload) -> int:
    """How many vectors there are; with --shared one, as of a single node."""
    return 1 if case.options.shared else case.size - (case.options.servers if case.options.join == "servers" else 0)


def held(case: Workload, rank: int, memory: Memory) -> None:
    """The vector of all threads, replicas that they exchange, and what joining several receives; no gradients."""
    options, rules, exchanging = case.options, len(case.vectors), 0
    if options.exchange_every and options.threads * (case.size if options.shared else 1) > 1:
        exchanging = 2 * options.threads
    if options.join == "servers":
        if rank < options.servers:
            case.hold_slice(memory, rank, service_of(case), 0)
            return
        case.hold(memory, "parameters", 2 + exchanging)  # w, and as it was pulled
        case.hold(memory, "gradients")  # as OnServers counts what it scores
        case.hold(memory, "optimizer", exchanging)
        return
    several, received = vectors_of(case) > 1, 0
    if several and options.join == "gossip":
        received = len(topology(options.topology, case.size, options.seed).senders(rank))
    case.hold(memory, "parameters", 1 + several + received + exchanging)
    case.hold(memory, "optimizer", rules + exchanging * rules)


def service_of(case: Workload) -> Service:
    each = case.bytes / case.options.servers
    return Service(case.options.servers, vectors_of(case), each, each, apart=True)


def step(case: Workload) -> StepCost:
    """A thread's part of the examples of a round; then vectors come together, or a worker pulls and pushes."""
    options, workers = case.options, vectors_of(case)
    if options.join == "servers":
        return StepCost(case.batch, [(case.batch / options.threads, 1)], updates=0.0, service=service_of(case))
    calls: list[Call] = []
    if workers > 1 and options.join == "gossip":
        graph = topology(options.topology, workers, options.seed)
        calls = exchanges(case.bytes, graph.graphs(), 1 / options.join_every)
    elif workers > 1:
        calls = [Call("all_reduce", case.bytes, 1 / options.join_every)]
    return StepCost(case.batch, [(case.batch / case.size / options.threads, 1)], calls, updates=0.0)


STRATEGY = Strategy(
    "train-hogwild", HogwildOptions, start, held, step, check=check, small="--model softmax --round-size 100"
)
