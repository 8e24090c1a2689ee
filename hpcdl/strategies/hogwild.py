"""HOGWILD!: threads that share one vector take steps of SGD on it, all at once, and no thread waits for another.

    w <- initial values, in memory that all threads see
    each thread, over its part of the examples of a round:
        read w where its example is not zero; g <- the gradient of the example's loss there
        w_u <- w_u - lr (g_u + lambda n / d_u w_u)       for these coordinates u, with plain loads and stores

    thread 0   read ... write read ... write read ...
    thread 1       read ... write    read ... write          a write between another thread's read and write
    thread 2   read ... write read ... write read ...        is a collision: rare if examples are sparse

lambda is the weight decay, n the number of examples, d_u the number of examples that touch coordinate u: over an epoch
its decays add up to lambda n w_u. A step of the run is a round of run.batch examples, at the learning rate of its
first update; within it threads only check a flag to stop. A run with one thread in all is repeatable sequential SGD.

locking (kernels/hogwild.py): none; atomic, no update of a coordinate is lost; striped, an update locks what it touches
(the paper's AIG locks only the writing); global, one lock; round-robin, updates are written in turn (the paper's RR).
exchange_every: each thread works on a replica for so many updates, at most a round, then adds its changes to the vector
and takes over other threads' changes; so it seldom reads what another core wrote last. 0: the vector itself is updated.
shared: all ranks of a node work on one vector in shared memory. Several vectors are joined every join_every rounds:

    join           what happens                                                        sent by a vector's first rank
    all-reduce     w <- mean of all vectors, as local SGD does                         an all-reduce of K values
    gossip         w_i <- sum over j of W_ij w_j, W of a graph                         K to each neighbour
    servers        w <- pull; a round; push the change of w, which servers add         K to the servers, and K back

With one thread and one batch per round, all-reduce is local SGD. Adagrad's sums of squares stay with their vector.
compress: all-reduce sends compressed changes of w since the last joining, as local SGD does; gossip is CHOCO-SGD's
(hpcdl/comm/gossip/choco.py); to servers the pushes are compressed (hpcdl/comm/compression).

(Recht, Re, Wright and Niu, "HOGWILD!: a lock-free approach to parallelizing stochastic gradient descent", NeurIPS 2011;
exchanges: Zhang, Hsieh and Akella, "HogWild++", ICDM 2016)"""

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
from hpcdl.kernels.device import CPU, Array
from hpcdl.parameter_server.consistency import Consistency
from hpcdl.runs.options import not_negative, of_model, of_training, option, positive, refuse
from hpcdl.strategies.compressing import (
    CompressOptions,
    average_by_differences,
    check_averaging,
    check_codec,
    check_gossip,
    hold_kept,
    message_bytes,
    reduction_calls,
    track_state,
)
from hpcdl.strategies.description import Call, Service, StepCost, Strategy

if TYPE_CHECKING:
    from hpcdl.models.linear_form import LinearForm
    from hpcdl.parallel.shared_vector import VectorSharing
    from hpcdl.parallel.thread_team import ThreadTeam
    from hpcdl.parameter_server.parameter_store import ParameterStore
    from hpcdl.strategies.description import Communicator, Data, Memory, Optimizer, Run, Workload

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
    compress: str = "none",
    seed: int = 0,
) -> np.ndarray:
    """Train on all ranks of `comm`, each with `threads` threads; return the vector that this rank works on. batch:
    examples of an update. join: all-reduce or gossip. topology(n): gossip's graph of n vectors. rule: for W (RULES).
    compress, seed: method of compression of what is joined, and the key of its random numbers."""
    from mpi4py import MPI

    from hpcdl.comm import refuse_together
    from hpcdl.parallel.shared_vector import ThreadCounts, VectorPerNode, VectorSharing
    from hpcdl.parallel.thread_team import ThreadTeam, words_for
    from hpcdl.runs.ownership import Whole

    with refuse_together(comm.mpi):
        form = form_of(model, optimizer)
    sharing, share = VectorSharing(comm, run, shared), (comm.rank, comm.size)
    of_vector, of_words = (model.layout.size, model.layout.dtype), (words_for(threads * sharing.sharers).size, np.int64)
    w, words, *state = sharing.arrays(comm, [of_vector, of_words, *(of_vector for _ in optimizer.state)])
    optimizer.state = dict(zip(optimizer.state, state, strict=True))
    if sharing.place == 0:
        w[:] = model.initialize(run.random)
    sharing.meet()
    one, alone = sharing.vectors == 1, comm.size == 1
    bookkeeping, (size, per_epoch, _) = run.bookkeeping, run.plan(data)
    most = bookkeeping.mpi.allreduce(data.most_rows(size, share), op=MPI.MAX)
    turns = math.ceil(math.ceil(most / threads) / batch)  # no thread of any rank has more updates in a round
    crowded = outnumbered(bookkeeping, threads, comm.rank == 0)
    with refuse_together(comm.mpi):
        if one and not alone and compress != "none":
            raise UsageError("--compress: all ranks work on one vector, and send nothing; leave it out")
        meet = None if one else joining(run, sharing, model, w, join, topology, rule, (compress, seed))
        settings: dict[str, Any] = {"threads": threads, "locking": locking, "batch": batch, "turns": turns}
        settings |= {"exchange_every": exchange_every, "words": words}
        settings |= {"first": sharing.place * threads, "count": sharing.sharers * threads}
        decays = decays_of(bookkeeping, data, share, optimizer)
        team = ThreadTeam(form, data, w, optimizer, decays, crowded=crowded, **settings)
    run.report(allreduce=comm.allreduce if meet and join == "all-reduce" else None, locking=locking, shared=shared)
    run.report(threads=threads, vectors=sharing.vectors, update_batch=batch, repeatable=team.count == 1)
    run.report(join=join if meet else None, join_every=join_every if meet else None, exchange_every=exchange_every)
    run.report(compress=compress)
    weigh, tally = team.weigh, ThreadCounts(optimizer, team)
    run.track("hogwild/tally", tally, counted=False)
    whole = Whole(model, w, optimizer, weigh) if one else VectorPerNode(model, w, optimizer, weigh, sharing)
    run.begin("hogwild", whole, data)
    kept = [(vector, vector.copy()) for vector in (w, *state)] if alone else []  # copies as of the last whole round
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
        if meet and (step + 1) % join_every == 0:
            meet((step + 1) // join_every - 1)
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
    compress: str = "none",
    seed: int = 0,
) -> np.ndarray:
    """Train on all ranks of `comm`: the first `servers` ranks hold the vector, the other ranks do whole rounds.
    Return all parameters on rank 0 and the workers, on other servers their slice."""
    from hpcdl.comm import refuse_together
    from hpcdl.comm.compression import feedback_of
    from hpcdl.parallel.shared_vector import ThreadCounts
    from hpcdl.parallel.thread_team import ThreadTeam, words_for
    from hpcdl.parameter_server.parameter_store import ParameterStore
    from hpcdl.parameter_server.run_on_servers import OnServers
    from hpcdl.parameter_server.store_settings import Serving, StoreCompression, StoreLayout

    works, team = comm.rank >= servers, None
    with refuse_together(comm.mpi):
        form = form_of(model, optimizer)
        if optimizer.state:
            raise UsageError("--join servers adds up the workers' changes, which share no optimizer state: take sgd")
    whole = model.initialize(run.random) if comm.rank == 0 else None
    w = np.empty(model.layout.size, model.layout.dtype) if works else None
    residuals = comm.size - servers if feedback_of(compress) else 0
    held = OnServers(run, model, w if whole is None else whole, optimizer, works, residuals)
    bookkeeping, stopwatch, memory = run.bookkeeping, run.stopwatch, run.memory
    crowded = outnumbered(bookkeeping, threads, comm.rank == 0)
    with refuse_together(comm.mpi):
        if w is not None:
            decays = decays_of(bookkeeping, data, (0, 1), optimizer)
            settings: dict[str, Any] = {"threads": threads, "locking": locking, "batch": batch, "crowded": crowded}
            settings |= {"exchange_every": exchange_every, "words": words_for(threads)}
            team = ThreadTeam(form, data, w, optimizer, decays, **settings)
    run.report(allreduce=None, threads=threads, locking=locking, shared=False, vectors=comm.size - servers)
    run.report(update_batch=batch, join="servers", join_every=1, servers=servers, repeatable=False)
    run.report(exchange_every=exchange_every, compress=compress)

    def count(run: Run, loss: float, total: int) -> None:
        optimizer.step += sum(-(-(part.stop - part.start) // batch) for part in chunks(total, threads))

    run.observe(count)
    run.begin("hogwild", held, data)
    store = ParameterStore(
        comm,
        StoreLayout(model.layout.size, comm.size, model.layout.dtype, servers),
        Serving(Consistency("async"), compression=StoreCompression(compress, seed=seed)),
        initial=whole,
        start=run.step,
        horizon=held.horizon_of_store if comm.rank == 0 else None,
        memory=memory,
    )
    held.follow(store)
    with run.going_on():
        if w is None or team is None:
            with stopwatch.step("serve"):
                store.serve()  # rank 0 counts the rounds (OnServers.count)
        else:
            memory.hold("parameters", w)  # the pulled vector
            team.weigh(memory)
            work(store, data, run, w, team, optimizer)
            team.close()
    store.free()
    updates, seconds, tally = optimizer.step, run.seconds, ThreadCounts(optimizer, team)
    tally.gather(bookkeeping)
    run.report(**tally.entries(seconds))  # samples are of this leg, updates of all legs
    run.report(updates=updates, updates_per_second=updates / max(1e-9, seconds))
    held.raise_failure()
    return store.server.values if held.parameters is None else held.parameters


def work(store: ParameterStore, data: Data, run: Run, w: np.ndarray, team: ThreadTeam, optimizer: Optimizer) -> None:
    """Work until no round is left: pull the vector, let the threads update it, push their changes."""
    from hpcdl.parameter_server.run_on_servers import request_step

    before, (batch, per_epoch, _), stopwatch = np.empty_like(w), run.plan(data), run.stopwatch
    while True:
        with stopwatch.step():
            step = request_step(run.comm, store, stopwatch, store.pull, w)
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
    """Return the linear form of the model. UsageError for a model, device or optimizer that HOGWILD! cannot use."""
    from hpcdl.models.linear_form import linear_form
    from hpcdl.models.model import abilities_of
    from hpcdl.optim.adagrad import Adagrad
    from hpcdl.optim.sgd import SGD

    kind, mean = type(optimizer), optimizer.average_from is not None
    other = f"HOGWILD! updates only coordinates of its example: take sgd or adagrad, not {kind.__name__.lower()}"
    refuse(
        (abilities_of(model).device is not CPU, "HOGWILD! runs on CPU cores: leave out --device cuda"),
        (kind not in (SGD, Adagrad), other),
        (mean, "HOGWILD! has no mean of the parameters, which an update would change as a whole: leave out --average"),
        (optimizer.clip_norm, "HOGWILD! computes no norm of a gradient: leave out --clip-norm"),
    )
    return linear_form(model, "train-hogwild")


def outnumbered(bookkeeping: Communicator, threads: int, leads: bool) -> bool:
    """Return True if the threads of a node's ranks outnumber its cores, and warn of that if `leads`; collective."""
    from hpcdl.comm.node_memory import cores, ranks_of_node

    node = ranks_of_node(bookkeeping.mpi)
    here, there = node.size * threads, cores(node)
    node.Free()
    if leads and threads > 1 and here > there:
        log.warning("%s on %s take turns: more threads bring no speed", counted(here, "thread"), counted(there, "core"))
    return here > there


def decays_of(bookkeeping: Communicator, data: Data, share: tuple[int, int], optimizer: Optimizer) -> np.ndarray | None:
    """Return for each coordinate u the decay by an example that touches it, lambda n / d_u; for the bias lambda.
    None for dense rows, or without weight decay. Collective."""
    from hpcdl.parallel.thread_team import touched

    if not data.sparse or not optimizer.weight_decay:
        return None
    rows, source, _ = data.in_place(0, share)
    counts = touched(rows, source)
    if share[1] > 1:
        bookkeeping.all_reduce(counts)
    factors = data.examples / np.maximum(1, np.append(counts, data.examples))
    return (optimizer.weight_decay * factors).astype(optimizer.dtype)


def joining(
    run: Run,
    sharing: VectorSharing,
    model: Any,
    w: Array,
    join: str,
    graph: Any,
    rule: str,
    compression: tuple[str, int],
) -> Callable[[int], None]:
    """Return the function that joins the vectors; all ranks call it, with 0, 1, 2, ... compression: the method, and the
    seed of its random numbers. Raises UsageError."""
    if join not in JOINS[:2]:
        raise unknown("join", join, JOINS)
    if join == "gossip":
        join_owners = gossiping(run, sharing, w, graph(sharing.vectors), rule, *compression)
    else:
        join_owners = averaging(run, sharing, model, w, *compression)

    def meet(time: int) -> None:
        sharing.meet()
        if sharing.owners is not None:
            join_owners(time)
        sharing.meet()

    return meet


def averaging(
    run: Run, sharing: VectorSharing, model: Any, w: Array, compress: str, seed: int
) -> Callable[[int], None]:
    """Return the function by which the vectors' first ranks average them, in compressed messages or in plain ones."""
    from hpcdl.checkpoint.state import Same
    from hpcdl.comm.compression import compressed

    owners: Any = sharing.owners
    if compress == "none":
        return lambda time: owners.all_reduce(w, op="mean")
    start = w.copy()  # the vector after the last joining
    state = compressed(compress, w.size, w.dtype, seed, model.layout)
    track_state(run, state)
    run.track("joined", Same(start))

    def average(time: int) -> None:
        state.begin(time)
        average_by_differences(owners, w, start, state)
        start[:] = w

    return average


def gossiping(
    run: Run, sharing: VectorSharing, w: Array, graph: Topology, rule: str, compress: str, seed: int
) -> Callable[[int], None]:
    """Return the function of a round of gossip among the vectors' first ranks. Raises UsageError."""
    from hpcdl.checkpoint.state import PerRank
    from hpcdl.comm.gossip.choco import ChocoGossip
    from hpcdl.comm.gossip.rounds import Gossip

    check_gossip(compress, graph)
    check_mixing(mixing_over_period(graph, rule))
    matrix, owners, memory = matrices(graph, rule), sharing.owners, run.memory
    run.report(topology=graph.spec, mixing=rule)
    if compress == "none":
        gossip = None if owners is None else Gossip(owners, w, memory)
        return lambda time: gossip.round(matrix(time))  # type: ignore[union-attr]  # called where it is
    choco = None if owners is None else ChocoGossip(owners, w, matrix(0), compress, 0.0, seed, memory)
    kept = (w.copy(), w.copy()) if choco is None else (choco.estimate, choco.mixed)
    for name, vector in zip(("estimate", "mixed_estimates"), kept, strict=True):
        run.track(name, PerRank(vector))
    return choco.round if choco is not None else lambda time: None


PARTS = 10  # rounds of an epoch, by default
MOST_THREADS = 1024


@dataclass(frozen=True)
class HogwildOptions(CompressOptions):
    threads: int = option(1, "threads of each rank, which update one vector all at once")
    locking: Literal["none", "atomic", "striped", "global", "round-robin"] = option(
        "none", "none; atomic: lose no update; striped: lock coordinates; global: lock all; round-robin: in turn"
    )
    exchange_every: int = option(
        0, "each thread works on a replica, and joins it with the vector after so many updates; 0: no replicas"
    )
    round_size: int = option(
        0, "examples of a round on all ranks together; a round is a step of the run; 0: a tenth of an epoch"
    )
    shared: bool = option(False, "all ranks of a node work on one vector, in memory that they share")
    join: Literal["all-reduce", "gossip", "servers"] = option(
        "all-reduce", "how several vectors are joined: averaged, averaged with neighbours, or on servers"
    )
    join_every: int = option(1, "rounds from one joining of the vectors to the next")
    servers: int = option(0, "with --join servers: ranks that hold the parameters; 0: one")
    topology: str = option("ring", "with --join gossip: the graph, as in train-gossip")
    mixing: Literal["metropolis-hastings", "uniform"] = option(
        "metropolis-hastings", "with --join gossip: weights of the neighbours"
    )
    model: str = of_model("softmax", "a linear model: linear, logistic, svm or softmax")
    batch_size: int = of_training(1, "examples per update of a thread")
    optimizer: str = of_training("sgd", "sgd or adagrad; settings as in adagrad:eps=1e-8")
    schedule: str = of_training(
        "step:every=1,factor=0.9",
        "constant, step, cosine or 1/t, of the rate over the updates of a vector; it changes from round to round",
    )

    unused = (
        *("accumulate", "clip_norm", "batch_per_rank", "augment", "data_servers", "average", "straggler"),
        "class_weight",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        positive(self, "threads", "join_every")
        not_negative(self, "round_size", "servers")
        from hpcdl.parallel.thread_team import check_exchange

        check_exchange(self.exchange_every, self.locking)
        if self.threads > MOST_THREADS:
            raise UsageError(f"--threads is {MOST_THREADS} at most, not {self.threads}")
        self._refuse_unused(" has no effect on threads that take single examples: leave it out", "pretend_compute")
        rule, full = self.optimizer.partition(":")[0], isinstance(self.batch_size, str)
        streamed = self.placement == "streamed"
        others = f"--optimizer {self.optimizer} moves coordinates that are 0 in an example; take sgd or adagrad"
        refuse(
            (self.mixed, "--data mix: HOGWILD! needs the rows of one data set in memory; give one"),
            (full, "--batch-size full: give the number of examples of a thread's update, 1 by default"),
            (rule not in ("sgd", "adagrad"), others),
            (self.device != "cpu", f"--device {self.device}: HOGWILD! runs on CPU cores; leave out --device"),
            (streamed, "--placement streamed: threads need the rows in memory; take shared or partitioned"),
        )
        if self.join != "servers":
            refuse((self.servers, "--servers needs --join servers"))
            return
        object.__setattr__(self, "servers", self.servers or 1)
        every = "with --join servers any worker may do any round"
        refuse(
            (self.shared, "--join servers: each worker has a vector of its own; leave out --shared"),
            (self.join_every != 1, "--join servers pushes after each round: take --round-size, not --join-every"),
            (self.placement != "shared", f"--placement {self.placement}: {every}; take shared"),
            (self.partition != "iid", f"--partition {self.partition}: {every}; take iid"),
            (rule != "sgd", "--join servers adds up the workers' changes, which share no optimizer state; take sgd"),
        )

    def plan(self, ranks: int, data: Any) -> tuple[int, int, int]:
        """Return examples per round, rounds per epoch, and rounds in all; a round is a step of the run."""
        share = self.batch_size * self.threads * (1 if self.join == "servers" else ranks)
        parts = PARTS * (ranks if self.join == "servers" else 1)
        size = self.round_size or -(-data.examples // (parts * share)) * share
        per_epoch = data.steps_per_epoch(size)
        return size, per_epoch, self.allowance.steps(self.steps or self.epochs * per_epoch, size)

    def make_optimizer(self, model: Any, ranks: int, data: Any, size: int | None = None) -> Optimizer:
        """Return the optimizer; its rate in a round is that of the schedule at the round's first update."""
        from hpcdl.optim import make_schedule

        made = super().make_optimizer(model, ranks, data, size)
        examples, per_epoch, rounds = self.plan(ranks, data)
        each = self.batch_size * (1 if self.shared or self.join == "servers" else ranks)
        updates = -(-data.examples // each)  # per epoch

        def first(step: int) -> int:
            epoch, step = divmod(step, per_epoch)
            return epoch * updates + step * examples // each

        schedule = make_schedule(self.schedule, self.lr, first(rounds), updates, each)
        made.schedule = lambda step: schedule(first(step))
        return made


def check(options: HogwildOptions, ranks: int, model: Any) -> None:
    from hpcdl.models.linear_form import linear_form

    linear_form(model, "train-hogwild")
    if options.join == "servers":
        check_codec(options.compress, "workers push to servers")
    elif options.join == "gossip":
        check_codec(options.compress, "neighbours exchange models")
        if not options.shared:
            graph = topology(options.topology, ranks, options.seed)
            check_mixing(mixing_over_period(graph, options.mixing))
            check_gossip(options.compress, graph)
    else:
        check_averaging(options.compress, model.layout)


def start(comm: Communicator, model: Any, data: Data, optimizer: Optimizer, run: Run) -> None:
    options: Any = run.options
    settings = {name: getattr(options, name) for name in ("threads", "locking", "exchange_every", "compress", "seed")}
    settings["batch"] = options.batch_size
    if options.join == "servers":
        train_on_servers(comm, model, data, optimizer, run, servers=options.servers, **settings)
        return
    settings |= {name: getattr(options, name) for name in ("shared", "join", "join_every")}
    graph = partial(topology, options.topology, seed=options.seed)
    train(comm, model, data, optimizer, run, topology=graph, rule=options.mixing, **settings)


def vectors_of(case: Workload) -> int:
    """Return the number of vectors that threads work on; with --shared 1, as on a single node."""
    return 1 if case.options.shared else case.size - (case.options.servers if case.options.join == "servers" else 0)


def held(case: Workload, rank: int, memory: Memory) -> None:
    """Add to `memory` the threads' vector, their replicas, and vectors that joining needs; on a server its slice."""
    options, rules, exchanging = case.options, len(case.vectors), 0
    if options.exchange_every and options.threads * (case.size if options.shared else 1) > 1:
        exchanging = 2 * options.threads
    if options.join == "servers":
        if rank < options.servers:
            case.hold_slice(memory, rank, service_of(case), 0)
            return
        case.hold(memory, "parameters", 2 + exchanging)  # w, and its values when pulled
        case.hold(memory, "gradients")  # OnServers counts the vector that it scores
        case.hold(memory, "optimizer", exchanging + options.compresses)  # the residual
        return
    several, received = vectors_of(case) > 1, 0
    compresses = several and options.compresses
    if several and options.join == "gossip":
        received = len(topology(options.topology, case.size, options.seed).senders(rank))
    if compresses and received:  # messages in and out; the difference
        length = message_bytes(options.compress, case, case.length)
        case.hold(memory, "parameters", 1 + received, length, 1)
        received = 1
    case.hold(memory, "parameters", 1 + several + received + exchanging)
    kept = compresses * (2 if received else 1)  # two estimates; or the vector after the last joining
    case.hold(memory, "optimizer", rules + exchanging * rules + kept)
    if compresses and not received:
        hold_kept(case, memory)


def service_of(case: Workload) -> Service:
    options = case.options
    pulled = pushed = case.bytes / options.servers
    if options.compresses:
        pushed = message_bytes(options.compress, case, -(-case.length // options.servers))
    return Service(options.servers, vectors_of(case), pulled, pushed, apart=True)


def step(case: Workload) -> StepCost:
    """Return the cost of a thread's part of a round, and of joining vectors (with servers, of a pull and a push)."""
    options, workers = case.options, vectors_of(case)
    if options.join == "servers":
        return StepCost(case.batch, [(case.batch / options.threads, 1)], updates=0.0, service=service_of(case))
    calls: list[Call] = []
    if workers > 1 and options.join == "gossip":
        graph = topology(options.topology, workers, options.seed)
        sent = message_bytes(options.compress, case, case.length) if options.compresses else case.bytes
        calls = Call.exchanges(sent, graph.graphs(), 1 / options.join_every)
    elif workers > 1:
        calls = reduction_calls(options.compress, case, slice(0, case.length), 1 / options.join_every)
    return StepCost(case.batch, [(case.batch / case.size / options.threads, 1)], calls, updates=0.0)


STRATEGY = Strategy(
    "train-hogwild", HogwildOptions, start, held, step, check=check, small="--model softmax --round-size 100"
)
