"""Parameter servers: the parameters live on servers; workers pull them, compute a gradient, and push it.

    worker                                             server, for its slice
        for ever                                           w <- initial values
            w <- pull                                      for ever
            g <- sum over its examples of grad f(w; x, y)      g <- push of a worker
            push g                                             w <- w - lr * g / b, or the rule of the optimizer

    consistency    who computes on what                        update of a server                       stale by
    bsp            each worker its share of batch t,           once all have pushed t, by the mean      0
                   when all have pushed t - 1
    ssp, K         ... when all have pushed t - K - 1          by each push, 1/workers of a step        0 ... K clocks
    async          a whole batch, the next that nobody has     by each push                             any versions

bsp takes the steps of all-reduce SGD for any number of servers; ssp with K = 0 is bsp; async with one worker is
sequential SGD. b: the examples of a whole batch. Under ssp the rate of a push is lr * its examples / b.

aware: the rate is divided by 1 + staleness (after Zhang et al., "Staleness-aware async-SGD", IJCAI 2016).
delay: each update is applied so many versions late, w(t+1) = w(t) - lr g(w(t - delay)): to see where training diverges.
sparse_push: of the first layer's weight only rows that a batch touches are sent (sparse_keys.py in parameter_server).
compress: pushes are compressed, each server's part by itself, with error feedback at the worker (comm/compression).
compress_pull: answers to pulls are compressed, without feedback: a worker computes at rounded parameters; the last
answers are exact.
replicas: each slice is on so many servers, and a push counts when all have it (hpcdl/parameter_server/replication.py).
If the MPI library supports recovery, a run with replicas survives lost ranks (hpcdl/recovery/server_failover.py).

Rank 0, the first server, leads the run: it counts and gives out steps, scores and saves. Until the checkpoint after
step t is saved, no worker begins a later step: the saved state is that of exactly the steps up to t.

(Dean et al., "Large scale distributed deep networks", NeurIPS 2012; Ho et al., NeurIPS 2013; Li et al., OSDI 2014)"""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from hpcdl.errors import UsageError
from hpcdl.kernels.device import CPU, Array, device_of
from hpcdl.parameter_server.consistency import BSP, Consistency
from hpcdl.parameter_server.sparse_keys import KEY, VectorRows
from hpcdl.runs.options import not_negative, option, refuse
from hpcdl.strategies.compressing import CompressOptions, check_codec, message_bytes
from hpcdl.strategies.description import Service, StepCost, Strategy

if TYPE_CHECKING:
    from hpcdl.parameter_server.parameter_store import ParameterStore
    from hpcdl.parameter_server.store_messages import Push
    from hpcdl.recovery.server_failover import WorkShare
    from hpcdl.strategies.description import Batch, Communicator, Data, Memory, Optimizer, Run, Stopwatch, Workload

log = logging.getLogger("hpcdl")
PULLED = "float16", "bfloat16", "int8", "qsgd"  # methods whose every value is near to what it was
LATE_OWN = (
    "--broadcast-every: a worker may miss the effect of its own last pushes, which ssp promises to show: the effect "
    "depends on the parameters or the optimizer's state; take --optimizer sgd without --weight-decay and --average, or "
    "leave out --broadcast-every"
)


def train(
    comm: Communicator,
    model: Any,
    data: Data,
    optimizer: Optimizer,
    run: Run,
    *,
    servers: int = 1,
    on_workers: bool = False,
    consistency: Consistency = BSP,
    broadcast_every: int = 0,
    aware: bool = False,
    delay: int = 0,
    sparse_push: bool = False,
    replicas: int = 1,
    compress: str = "none",
    compress_pull: str = "none",
) -> np.ndarray:
    """Train on all ranks of `comm`: the first `servers` ranks serve, the other ranks work; on_workers: each does both.
    Return all parameters on rank 0 and the workers, on other servers their slice."""
    from hpcdl.comm.compression import feedback_of
    from hpcdl.comm.failure import refuse_together
    from hpcdl.models.model import abilities_of
    from hpcdl.parameter_server.parameter_store import ParameterStore
    from hpcdl.parameter_server.run_on_servers import OnServers
    from hpcdl.parameter_server.store_client import shows_own_pushes
    from hpcdl.parameter_server.store_settings import Replication, Serving, StoreCompression, StoreLayout
    from hpcdl.recovery.server_failover import WorkDivision

    size, leads, works = model.layout.size, comm.rank == 0, on_workers or comm.rank >= servers
    with refuse_together(comm.mpi):
        rows = touched_rows(model) if sparse_push else None
        if rows is not None:
            check_sparse_push(optimizer, data.sparse or not works)  # a server sees them as it scores them
        if replicas > 1:
            check_replicas(model, optimizer, consistency)
    survivor, stopwatch = run.survivor, run.stopwatch
    layout = StoreLayout(size, comm.size, model.layout.dtype, servers, on_workers, rows=rows)
    replication = Replication(replicas, survivor is not None, survivor and survivor.progress)
    group = run.until_end(comm.split(0 if comm.rank in layout.holders else None, name="servers", allreduce="tree"))
    optimizer = optimizer.of_size(layout.length(comm.rank))
    if optimizer.average_from is not None and consistency.clocked and not consistency.in_rounds:
        optimizer.average_from *= len(layout.clients)  # counts updates
    whole = CPU.array(model.initialize(run.random)) if leads else None
    pulled: Any = abilities_of(model).device.empty(size, model.layout.dtype) if works else None
    residuals = len(layout.clients) if feedback_of(compress) else 0
    held = OnServers(run, model, pulled if whole is None else whole, optimizer, works, residuals)
    run.report(allreduce=None, consistency=consistency.name, staleness=consistency.staleness)
    run.report(compress=compress, compress_pull=compress_pull)
    run.report(servers=len(layout.holders), broadcast_every=broadcast_every, fixed_delay=delay, replicas=replicas)
    run.begin("parameter_server", held, data)
    if leads and broadcast_every and shows_own_pushes(consistency) and not optimizer.additive:
        log.warning("%s", LATE_OWN)
    store = ParameterStore(
        comm,
        layout,
        Serving(consistency, broadcast_every, delay, StoreCompression(compress, compress_pull, run.options.seed)),
        replication,
        update=Updates(optimizer, group, consistency, aware),
        initial=whole,
        start=run.step,
        horizon=held.horizon_of_store if leads else None,
        memory=run.memory,
        beside=held.beside,
    )
    held.follow(store)
    if replication.careful:
        store.replicate()
    if survivor is not None:
        survivor.begin(store)
        held.everyone.barrier()  # from here on the run survives lost ranks
    with run.going_on():
        if works:
            plan = *run.plan(data)[:2], run.steps
            division = survivor.division if survivor is not None else WorkDivision.begun_by(store, 0)
            shares, left = division.shares[comm.rank], division.orphans.get(comm.rank, [])
            batches = Batches(data, plan, consistency.clocked, stopwatch, shares, left)
            work(comm, store, model, batches, pulled, optimizer.clip_norm > 0)
        else:
            with stopwatch.step("serve"):
                store.serve()  # rank 0 counts the steps (OnServers.count)
        if leads:
            run.report(staleness_histogram=store.staleness_histogram)
        if replication.careful:
            mine = sum(store.server.clocks.staleness.values()) if store.serves else None  # pushes applied in all legs
            pushes = held.everyone.mpi.gather(mine)
            if pushes is not None:
                run.report(pushes_applied=[each for each in pushes if each is not None])
    if held.average:
        held.hand_out([rank for rank in store.clients if rank > 0])
    store.free()
    held.raise_failure()
    return store.server.values if held.parameters is None else held.parameters


def work(
    comm: Communicator, store: ParameterStore, model: Any, batches: Batches, parameters: Array, clip: bool
) -> None:
    """Pull, compute, push until no step is left; `parameters` then are final. clip: push a gradient's norm, too."""
    from hpcdl.kernels.norm import sum_of_squares

    keyed, stopwatch = store.rows is not None, batches.stopwatch
    gradient = device_of(parameters).zeros(parameters.size, parameters.dtype)
    with contextlib.closing(batches):
        while True:
            with stopwatch.step():
                batch = pull(comm, store, parameters, batches)
                if batch is None:
                    break
                if not keyed:  # with keys the push has left zeros
                    gradient[:] = 0
                loss = model.loss_and_gradient(parameters, batch, gradient, store.attend if store.serves else None)
                count = len(batch.y)
                for orphan in batches.orphans():
                    loss += model.loss_and_gradient(parameters, orphan, gradient)
                    count += len(orphan.y)
                norm = math.sqrt(sum_of_squares(gradient)) if clip else 0.0
                push = store.push_at if keyed else store.push
                push(gradient, count=count, total=batch.total, loss=loss, norm=norm)
    with stopwatch.step("serve") if comm.rank == 0 else contextlib.nullcontext():  # rank 0's clock is the run's
        store.close(parameters)


@dataclass
class Batches:
    """This worker's part of the batch of any step; under async the whole batch. shares: which part, from which step on.
    plan: (batch size, steps per epoch, steps). ahead: batches are made ahead. left: lost workers' parts to push."""

    data: Data
    plan: tuple[int, int, int]
    ahead: bool
    stopwatch: Stopwatch
    shares: list[WorkShare]
    left: list[WorkShare]
    share: WorkShare | None = None
    cursor: Any = None  # Cursor, from the first batch on

    def take(self, step: int) -> Batch:
        """Return this worker's part of the batch of a step."""
        from hpcdl.recovery.server_failover import share_at

        share = share_at(self.shares, step)
        if share != self.share:
            self.close()
            self.share, self.cursor = share, self.data.cursor(self.plan[0], share[1:], self.ahead)
        with self.stopwatch.fetching():
            return self.cursor.take(*divmod(step, self.plan[1]))  # type: ignore[no-any-return]

    def orphans(self) -> Iterator[Batch]:
        """Yield each batch that lost workers have left, and remove it."""
        while self.left:
            step, *own = self.left[0]
            with contextlib.closing(self.data.cursor(self.plan[0], (own[0], own[1]), False)) as cursor:
                yield cursor.take(*divmod(step, self.plan[1]))
            self.left = self.left[1:]

    def close(self) -> None:
        """End the thread that makes batches ahead, if there is one."""
        if self.cursor is not None:
            self.cursor.close()


def pull(comm: Communicator, store: ParameterStore, parameters: Array, batches: Batches) -> Batch | None:
    """Pull the parameters; return the batch to compute on them, or None if no step is left.
    With --sparse-push the batch is taken first, and only the rows that it touches are pulled."""
    from hpcdl.parameter_server.run_on_servers import request_step

    stopwatch = batches.stopwatch
    if store.rows is None:
        step = request_step(comm, store, stopwatch, store.pull, parameters)
        return None if step is None else batches.take(step)
    step = store.clock if store.consistency.clocked else request_step(comm, store, stopwatch, store.draw)
    if step is None or step >= batches.plan[2]:
        return None
    batch = batches.take(step)
    keys = np.unique(batch.x.indices[batch.x.part]).astype(KEY)
    return None if request_step(comm, store, stopwatch, store.pull_at, parameters, keys) is None else batch


def touched_rows(model: Any) -> VectorRows:
    """Return where the rows of the first layer's weight are; UsageError if the model begins with no dense layer."""
    from hpcdl.models.layered import Layered
    from hpcdl.models.layers import Dense
    from hpcdl.models.model import unwrapped

    model = unwrapped(model)
    if not (isinstance(model, Layered) and isinstance(model.layers[0], Dense)):
        raise UsageError("--sparse-push needs a dense first layer, whose rows it sends: take a linear model or an mlp")
    features, width = model.layers[0].full_shapes["weight"]
    return VectorRows(width, features * width)


def check_sparse_push(optimizer: Optimizer, sparse: bool) -> None:
    """Raise UsageError if the data are dense, or the optimizer changes rows that a batch does not touch."""
    if not sparse:
        raise UsageError("--sparse-push is for sparse data, and these are dense: leave it out")
    if not optimizer.sparse:
        raise UsageError(
            "--sparse-push changes only rows that a batch touches; momentum, moments, --weight-decay and --average "
            "change all rows: take --optimizer sgd or adagrad, without these two options"
        )


def check_replicas(model: Any, optimizer: Optimizer, consistency: Consistency) -> None:
    """Raise UsageError if replicas of slices could not do the same updates as the servers of the slices."""
    from hpcdl.checkpoint.buffers import buffer_packer

    if optimizer.clip_norm > 0 and consistency.in_rounds:
        raise UsageError(
            "--replicas: a replica does not know the norm of a round's sum, which the servers compute together; leave "
            "out --clip-norm, or take --consistency async or ssp with a staleness, which clip each push"
        )
    if optimizer.average_from is not None:
        raise UsageError("--replicas: the mean of the iterates has no replicas; leave out --average")
    if buffer_packer(model) is not None:
        raise UsageError("--replicas: this model has buffers, which have no replicas; leave out --replicas")


class Updates:
    """A server's update: a push makes a step of the optimizer on its slice, by the mean over the pushed examples."""

    def __init__(self, optimizer: Optimizer, group: Any, consistency: Consistency, aware: bool):
        self.optimizer, self.group, self.consistency, self.aware = optimizer, group, consistency, aware
        self.in_rounds, self.state, self.additive = consistency.in_rounds, optimizer.state, optimizer.additive

    def of_size(self, size: int) -> Updates:
        """Return the same updates for a slice of `size` elements, with a new state at the same step."""
        optimizer = self.optimizer.of_size(size)
        optimizer.step = self.optimizer.step
        return Updates(optimizer, self.group, self.consistency, self.aware)

    def __call__(self, values: np.ndarray, gradient: np.ndarray, push: Push) -> None:
        if push.count == 0:  # a worker without examples in this batch
            return
        rate = self.optimizer.schedule(push.step) * push.count / push.total
        rate /= 1 + push.staleness if self.aware else 1
        norm = self.norm(gradient, push) if self.optimizer.clip_norm > 0 else None
        if isinstance(push.part, slice):
            self.optimizer.update(values, gradient, 1 / push.count, norm, rate)
        else:
            self.optimizer.update_at(push.part.elements, values, gradient, 1 / push.count, norm, rate)

    def norm(self, gradient: np.ndarray, push: Push) -> float:
        """Return the whole gradient's norm: of a push, as its worker sent it; of a round's sum, by an all-reduce."""
        from hpcdl.kernels.norm import sum_of_squares

        if not self.in_rounds:
            return push.norm
        squares = CPU.zeros(1, "float64")
        squares[0] = sum_of_squares(gradient)
        self.group.all_reduce(squares)
        return math.sqrt(squares[0])


@dataclass(frozen=True)
class ServerOptions(CompressOptions):
    compress_pull: str = option("none", "compress what workers pull, too: float16, bfloat16, int8 or qsgd")
    servers: int = option(1, "how many ranks hold the parameters, a slice each; the other ranks are workers")
    servers_on_workers: bool = option(False, "every rank is a worker and holds a slice, instead of --servers")
    consistency: Literal["bsp", "ssp", "async"] = option(
        "bsp", "bsp: in rounds; ssp: workers may be --staleness clocks ahead; async: no worker waits for another"
    )
    staleness: int = option(0, "ssp: by how many clocks a worker may be ahead of the slowest; 0: as bsp")
    broadcast_every: int = option(0, "servers send slices unasked each so many clocks (async: versions); 0: never")
    staleness_aware: bool = option(False, "divide the learning rate of a gradient by 1 + its staleness")
    sparse_push: bool = option(False, "sparse data: of the first layer's weight, send only rows that a batch touches")
    replicas: int = option(1, "number of servers that hold each slice, so that the run survives the loss of one")
    survive: int = option(0, "with --replicas: ranks that may be lost, under Open MPI's mpiexec --with-ft ulfm; 0: any")
    fixed_delay: int = option(0, "apply each gradient so many versions late, to see where training diverges")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.servers_on_workers and self.servers > 1:
            raise UsageError("--servers-on-workers makes every rank a server: leave out --servers")
        if self.servers_on_workers:
            object.__setattr__(self, "servers", 0)
        not_negative(self, "broadcast_every", "fixed_delay")
        self.chosen.checked()
        if self.consistency == "async" and (self.partition != "iid" or self.placement == "partitioned"):
            raise UsageError(
                "--consistency async draws batches from all rows: leave out --partition and --placement partitioned"
            )
        if self.consistency == "async" and self.batch_per_rank:
            object.__setattr__(self, "batch_size", self.batch_per_rank)  # an update is one rank's
            object.__setattr__(self, "batch_per_rank", 0)
        keyed, away, lone = self.sparse_push, self.device != "cpu", self.survive and self.replicas == 1
        saved, unasked = self.fixed_delay and self.checkpoint_every, keyed and self.broadcast_every
        refuse(
            (saved, "--fixed-delay: a checkpoint holds no delayed updates; leave out --checkpoint-every"),
            (unasked, "--broadcast-every sends all parameters: leave it out with --sparse-push"),
            (keyed and away, "--sparse-push needs gradients in host memory: leave out --device"),
            (self.replicas < 1, f"--replicas counts the servers of each slice: 1 or more, not {self.replicas}"),
            (lone, "--survive: a lost server would take its slice with it; give --replicas 2 as well"),
        )
        pulls, plain = self.compress_pull != "none", self.broadcast_every > 0
        way = self.compress_pull.partition(":")[0]
        refuse(
            (keyed and (self.compresses or pulls), "--sparse-push sends other rows in each push: leave out --compress"),
            (
                self.replicas > 1 and self.compresses,
                "--replicas: what --compress leaves out has no replicas; leave it out",
            ),
            (pulls and plain, "--compress-pull: servers that broadcast send values as they are; leave it out"),
            (
                pulls and way not in PULLED,
                f"--compress-pull takes {', '.join(PULLED)}, which keep each value, not {way}",
            ),
        )
        if self.replicas > 1:
            from hpcdl.parameter_server.store_settings import Serving, check_replicas

            serving = Serving(self.chosen, self.broadcast_every, self.fixed_delay)
            check_replicas(self.replicas, self.servers, self.servers_on_workers, keyed, serving)
        if self.servers_on_workers and away:
            raise UsageError("--servers-on-workers keeps slices in host memory; with a GPU, take --servers")

    @property
    def chosen(self) -> Consistency:
        return Consistency(self.consistency, self.staleness)


def check_servers(options: ServerOptions, ranks: int, model: Any) -> None:
    """Raise UsageError if `ranks` ranks cannot serve this model with these options."""
    from hpcdl.optim import refuse_slices
    from hpcdl.parameter_server.store_settings import Serving, StoreLayout, check_store

    refuse_slices(options.optimizer, "a parameter server holds a slice of the vector")
    check_codec(options.compress, "workers push to servers")
    check_codec(options.compress_pull, "workers pull from servers")
    rows = touched_rows(model) if options.sparse_push else None
    layout = StoreLayout(model.layout.size, ranks, "f4", options.servers, options.servers_on_workers, rows=rows)
    check_store(layout, Serving(options.chosen, options.broadcast_every, options.fixed_delay))


def service_of(case: Workload) -> Service:
    """Return the servers' work; with --sparse-push for touched rows, their keys, and parameters of no row."""
    from hpcdl.parameter_server.sparse_keys import KEY

    options, item = case.options, case.dtype.itemsize
    holders = case.size if options.servers_on_workers else options.servers
    workers = case.size if options.servers_on_workers else case.size - options.servers
    pulled = pushed = case.bytes / holders
    if options.sparse_push:
        features, width = case.first_layer
        rows = case.touched(case.share(0, workers) if options.chosen.clocked else case.batch)
        pulled = (rows * width + case.length - features * width) * item / holders
        pushed = pulled + rows * KEY.itemsize / holders
    part = -(-case.length // holders)
    pushed = message_bytes(options.compress, case, part) if options.compresses else pushed
    pulled = message_bytes(options.compress_pull, case, part) if options.compress_pull != "none" else pulled
    bound = options.staleness if options.consistency == "ssp" else math.inf
    rounds, apart = options.chosen.in_rounds, not options.chosen.clocked
    return Service(holders, workers, pulled, pushed, rounds, apart, bound)


def held(case: Workload, rank: int, memory: Memory) -> None:
    """Add a server's slices (Workload.hold_slice), and a worker's pulled parameters, gradient and activations."""
    from hpcdl.parameter_server.store_client import shows_own_pushes

    options, service = case.options, service_of(case)
    first = 0 if options.servers_on_workers else options.servers
    if rank < service.servers:
        case.hold_slice(memory, rank, service, len(case.vectors))
    if rank >= first:
        unasked = bool(options.broadcast_every)
        adds_own = unasked and shows_own_pushes(options.chosen) and not (case.vectors or options.weight_decay)
        case.hold(memory, "parameters", 1 + unasked + adds_own * (options.staleness + 1))
        case.hold(memory, "gradients")
        if options.compresses:
            case.hold(memory, "optimizer")  # the residual
        case.hold_activations(memory, case.batch if service.apart else case.share(rank - first, service.workers))


def step(case: Workload) -> StepCost:
    """Return the cost of a worker's pull, gradient and push; under async any one worker does a step."""
    service = service_of(case)
    rows = case.batch if service.apart else case.share(0, service.workers)
    return StepCost(case.batch, [(rows, 1)], drawn=rows, service=service)


STRATEGY = Strategy(
    "train-parameter-server",
    ServerOptions,
    train,
    held,
    step,
    check=check_servers,
    mode=lambda options: options.consistency,
    modes={"bsp": "--consistency bsp", "ssp": "--consistency ssp --staleness 2", "async": "--consistency async"},
    survivor="hpcdl.recovery.server_failover:ServedSurvivor",
    renamed=dict(on_workers="servers_on_workers", consistency="chosen", aware="staleness_aware", delay="fixed_delay"),
)
