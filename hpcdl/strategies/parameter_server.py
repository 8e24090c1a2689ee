"""Parameter servers: the parameters live on servers; workers pull them, compute a gradient, and push it.

    worker                                             server, for its slice
        for ever                                           w <- initial values
            w <- pull                                      for ever
            g <- sum over its examples of grad f(w; x, y)      g <- push of a worker
            push g                                             w <- w - lr * g, or the rule of the optimizer

    consistency    who computes on what                        update of a server                       stale by
    bsp            each worker its share of batch t,           once all have pushed t, by the mean      0
                   when all have pushed t - 1
    ssp, K         ... when all have pushed t - K - 1          by each push, 1/workers of a step        0 ... K clocks
    async          a whole batch, the next that nobody has     by each push                             any versions

bsp takes the very steps of all-reduce SGD, whatever the number of servers; ssp with K = 0 is bsp; async with one worker
is sequential SGD. Under ssp a push counts as much of a step as its share of the batch: the rate is lr * examples / b.

aware: rate / (1 + staleness), so that what is late moves less; after Zhang et al., "Staleness-aware async-SGD", IJCAI
2016, who divide by the staleness where it is 1 or more.
delay: each update is applied so many versions late, w(t+1) = w(t) - lr g(w(t - delay)): to see where training diverges.

sparse_push: of sparse data, the rows of the first layer's weight travel that a batch touches
(hpcdl/parameter_server/sparse_keys.py).

replicas: each slice is on so many servers, and a push counts when all have it (hpcdl/parameter_server/replication.py);
ranks that are gone are outlived then, where the library can (hpcdl/recovery/server_failover.py).

The run is run by rank 0, the first server: it counts steps, scores, saves, and gives out the steps. Before a checkpoint
no worker is let past its step, so that what is saved is the state of just those steps.

(Dean et al., "Large scale distributed deep networks", NeurIPS 2012; Ho et al., NeurIPS 2013; Li et al., OSDI 2014)
"""

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
from hpcdl.runs.options import Options, option
from hpcdl.strategies.description import Service, StepCost, Strategy

if TYPE_CHECKING:
    from hpcdl.comm import Communicator
    from hpcdl.data import Batch, Data
    from hpcdl.memory import Memory
    from hpcdl.optim import Optimizer
    from hpcdl.parameter_server.parameter_store import ParameterStore
    from hpcdl.parameter_server.store_messages import Push
    from hpcdl.recovery.server_failover import WorkDivision, WorkShare
    from hpcdl.runs.run import Run
    from hpcdl.runs.stopwatch import Stopwatch
    from hpcdl.strategies.workload import Workload

log = logging.getLogger("hpcdl")
LATE_OWN = (
    "--broadcast-every: a worker may not see the effect of its own last pushes, which ssp promises: what they change "
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
) -> np.ndarray:
    """Train on all ranks of `comm`: the first `servers` serve, or all do (on_workers); the others work.

    replicas: on how many servers each slice is (hpcdl/parameter_server/replication.py).

    Returns the parameters: whole on rank 0 and the workers, on other servers their slice.
    """
    from hpcdl.comm.failure import refuse_together
    from hpcdl.models.model import abilities_of
    from hpcdl.parameter_server.parameter_store import ParameterStore
    from hpcdl.parameter_server.run_on_servers import OnServers
    from hpcdl.parameter_server.store_client import shows_own_pushes
    from hpcdl.parameter_server.store_settings import Replication, Serving, StoreLayout

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
        optimizer.average_from *= len(layout.clients)  # which counts updates
    whole = CPU.array(model.initialize(run.random)) if leads else None
    pulled: Any = abilities_of(model).device.empty(size, model.layout.dtype) if works else None
    held = OnServers(run, model, pulled if whole is None else whole, optimizer, works)
    run.report(allreduce=None, consistency=consistency.name, staleness=consistency.staleness)
    run.report(servers=len(layout.holders), broadcast_every=broadcast_every, fixed_delay=delay, replicas=replicas)
    run.begin("parameter_server", held, data)
    if leads and broadcast_every and shows_own_pushes(consistency) and not optimizer.additive:
        log.warning("%s", LATE_OWN)
    store = ParameterStore(
        comm,
        layout,
        Serving(consistency, broadcast_every, delay),
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
        held.everyone.barrier()  # whoever is gone from here on is outlived
    with run.going_on():
        if works:
            plan = *run.plan(data)[:2], run.steps
            batches = Batches(comm, store, data, plan, stopwatch, survivor and survivor.division)
            work(comm, store, model, batches, pulled, optimizer.clip_norm > 0, stopwatch)
        elif leads:
            with stopwatch.step("serve"):
                for loss, total in store.completed_steps():
                    run.record(loss, int(total))
                    run.boundary(store.signalled)
                    if replication.careful:
                        held.note()
        else:
            with stopwatch.step("serve"):
                store.serve()
        if leads:
            run.report(staleness_histogram=store.staleness_histogram)
        if replication.careful:
            report_pushes(store, held.everyone, run)
    if held.average:
        held.hand_out([rank for rank in store.clients if rank > 0])
    store.free()
    held.raise_failure()
    return store.server.values if held.parameters is None else held.parameters


def work(
    comm: Communicator,
    store: ParameterStore,
    model: Any,
    batches: Batches,
    parameters: Array,
    clip: bool,
    stopwatch: Stopwatch,
) -> None:
    """What a worker does: pull, compute, push, until no step is left; at the end `parameters` are the final ones."""
    from hpcdl.kernels.norm import sum_of_squares

    keyed = store.rows is not None
    gradient = device_of(parameters).zeros(parameters.size, parameters.dtype)
    with contextlib.closing(batches):
        while True:
            with stopwatch.step():
                batch = (pull_touched if keyed else pull_all)(comm, store, parameters, batches, stopwatch)
                if batch is None:
                    break
                if not keyed:  # else the push has left zeros
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


class Batches:
    """This worker's part of the batch of any step; under async the whole batch.

    plan: examples of a batch, steps of an epoch, steps in all. division: of the batches where workers may be gone:
    another part is theirs from some step on, and what others have left is added to the next push
    (hpcdl/recovery/server_failover.py).
    """

    def __init__(
        self,
        comm: Communicator,
        store: ParameterStore,
        data: Data,
        plan: tuple[int, int, int],
        stopwatch: Stopwatch,
        division: WorkDivision | None,
    ):
        from hpcdl.recovery.server_failover import WorkShare

        self.data, self.stopwatch, self.ahead = data, stopwatch, store.consistency.clocked
        self.batch, self.per_epoch, self.steps = plan
        if division is None:
            parts = (store.clients.index(comm.rank), len(store.clients)) if self.ahead else (0, 1)
            self.shares, self.left = [WorkShare(0, *parts)], []  # type: list[WorkShare], list[WorkShare]
        else:
            self.shares, self.left = division.shares[comm.rank], division.orphans.get(comm.rank, [])
        self.share: WorkShare | None = None
        self.cursor: Any = None  # Cursor, from the first batch on

    def take(self, step: int) -> Batch:
        """The batch of a step."""
        from hpcdl.recovery.server_failover import share_at

        share = share_at(self.shares, step)
        if share != self.share:
            self.close()
            self.share, self.cursor = share, self.data.cursor(self.batch, share[1:], self.ahead)
        with self.stopwatch.fetching():
            return self.cursor.take(*divmod(step, self.per_epoch))  # type: ignore[no-any-return]

    def orphans(self) -> Iterator[Batch]:
        """What has been left of steps by workers that are gone, once."""
        while self.left:
            step, *own = self.left[0]
            with contextlib.closing(self.data.cursor(self.batch, (own[0], own[1]), False)) as cursor:
                yield cursor.take(*divmod(step, self.per_epoch))
            self.left = self.left[1:]

    def close(self) -> None:
        """End the thread that makes batches ahead, where there is one."""
        if self.cursor is not None:
            self.cursor.close()


def pull_all(
    comm: Communicator, store: ParameterStore, parameters: Array, batches: Batches, stopwatch: Stopwatch
) -> Batch | None:
    """The batch to compute on these parameters, which are pulled; None: no step is left."""
    from hpcdl.parameter_server.run_on_servers import request_step

    step = request_step(comm, store, stopwatch, store.pull, parameters)
    return None if step is None else batches.take(step)


def pull_touched(
    comm: Communicator, store: ParameterStore, parameters: Array, batches: Batches, stopwatch: Stopwatch
) -> Batch | None:
    """Likewise, but the batch comes first, and what it touches of the parameters is pulled."""
    from hpcdl.parameter_server.run_on_servers import request_step

    step = store.clock if store.consistency.clocked else request_step(comm, store, stopwatch, store.draw)
    if step is None or step >= batches.steps:
        return None
    batch = batches.take(step)
    keys = np.unique(batch.x.indices[batch.x.part]).astype(KEY)
    return None if request_step(comm, store, stopwatch, store.pull_at, parameters, keys) is None else batch


def touched_rows(model: Any) -> VectorRows:
    """The rows of the weight of a model's first layer, of which a batch touches some. UsageError where it has none."""
    from hpcdl.models.layered import Layered
    from hpcdl.models.layers import Dense
    from hpcdl.models.model import unwrapped

    model = unwrapped(model)
    if not (isinstance(model, Layered) and isinstance(model.layers[0], Dense)):
        raise UsageError("--sparse-push sends rows of the first layer's weight: take a linear model or an mlp")
    features, width = model.layers[0].full_shapes["weight"]
    return VectorRows(width, features * width)


def check_sparse_push(optimizer: Optimizer, sparse: bool) -> None:
    """Raise UsageError where a step moves more than what a batch touches."""
    if not sparse:
        raise UsageError("--sparse-push is for sparse data: of dense rows a batch touches all; leave it out")
    if not optimizer.sparse:
        raise UsageError(
            "--sparse-push leaves alone what a batch does not touch, which momentum, moments, weight decay and means "
            "would move: take --optimizer sgd or adagrad, without --weight-decay and --average"
        )


def check_replicas(model: Any, optimizer: Optimizer, consistency: Consistency) -> None:
    """Raise UsageError where replicas of slices would not do the updates that their servers do."""
    from hpcdl.checkpoint.buffers import buffer_packer

    if optimizer.clip_norm > 0 and consistency.in_rounds:
        raise UsageError(
            "--replicas: the norm of a round's sum is known to all servers together, not to replicas; leave out "
            "--clip-norm, or take --consistency async or ssp with a staleness, which clip each push"
        )
    if optimizer.average_from is not None:
        raise UsageError("--replicas: the mean of the iterates has no replicas; leave out --average")
    if buffer_packer(model) is not None:
        raise UsageError("--replicas: what a model holds beside its parameters has no replicas; leave out one of them")


def report_pushes(store: ParameterStore, everyone: Communicator, run: Run) -> None:
    """Let rank 0 tell how many pushes each slice has applied, in all legs in this job; collective."""
    mine = sum(store.server.clocks.staleness.values()) if store.serves else None
    told = everyone.mpi.gather(mine)
    if told is not None:
        run.report(pushes_applied=[each for each in told if each is not None])


class Updates:
    """What a server does with a push: a step of the optimizer on its slice, by the mean over the examples pushed."""

    def __init__(self, optimizer: Optimizer, group: Any, consistency: Consistency, aware: bool):
        self.optimizer, self.group, self.consistency, self.aware = optimizer, group, consistency, aware
        self.in_rounds, self.state, self.additive = consistency.in_rounds, optimizer.state, optimizer.additive

    def of_size(self, size: int) -> Updates:
        """The same of another slice, as far as this one is."""
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
        """The norm of the whole vector: of one push its worker knows it, of a round's sum the servers find it."""
        from hpcdl.kernels.norm import sum_of_squares

        if not self.in_rounds:
            return push.norm
        squares = CPU.zeros(1, "float64")
        squares[0] = sum_of_squares(gradient)
        self.group.all_reduce(squares)
        return math.sqrt(squares[0])


@dataclass(frozen=True)
class ServerOptions(Options):
    servers: int = option(1, "how many ranks hold the parameters, a slice each; the other ranks are workers")
    servers_on_workers: bool = option(False, "every rank is a worker and holds a slice, instead of --servers")
    consistency: Literal["bsp", "ssp", "async"] = option(
        "bsp", "bsp: in rounds; ssp: workers may be --staleness clocks ahead; async: no worker waits for another"
    )
    staleness: int = option(0, "ssp: by how many clocks a worker may be ahead of the slowest; 0: as bsp")
    broadcast_every: int = option(0, "servers send after so many clocks (async: versions), unasked; 0: when asked")
    staleness_aware: bool = option(False, "divide the learning rate of a gradient by 1 + its staleness")
    sparse_push: bool = option(False, "sparse data: send only what a batch touches of the first layer's weight")
    replicas: int = option(1, "on how many servers each slice is, so that one that is gone is outlived")
    survive: int = option(0, "--replicas: ranks that may be lost, under mpiexec --with-ft ulfm of Open MPI; 0: any")
    fixed_delay: int = option(0, "apply each gradient so many versions late, to see where training diverges")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.servers_on_workers and self.servers > 1:
            raise UsageError("give --servers or --servers-on-workers, not both: there, every rank is a server")
        if self.servers_on_workers:
            object.__setattr__(self, "servers", 0)
        for name in ("broadcast_every", "fixed_delay"):
            self._refuse_negative(name)
        self.chosen.checked()
        if self.consistency == "async" and (self.partition != "iid" or self.placement == "partitioned"):
            raise UsageError(
                "async draws batches of all rows: --partition and --placement partitioned are for bsp and ssp"
            )
        if self.consistency == "async" and self.batch_per_rank:
            object.__setattr__(self, "batch_size", self.batch_per_rank)  # an update is one rank's
            object.__setattr__(self, "batch_per_rank", 0)
        if self.fixed_delay and self.checkpoint_every:
            raise UsageError("--fixed-delay: what is delayed is in no checkpoint; leave out --checkpoint-every")
        if self.sparse_push and self.broadcast_every:
            raise UsageError("--broadcast-every sends all parameters, unasked: leave it out with --sparse-push")
        if self.sparse_push and self.device != "cpu":
            raise UsageError("--sparse-push finds what travels in the memory of the host: leave out --device")
        if self.replicas < 1:
            raise UsageError(f"--replicas {self.replicas}: each slice is on 1 server or more")
        if self.survive and self.replicas == 1:
            raise UsageError("--survive: what a server holds would be gone with it; give --replicas 2 as well")
        if self.replicas > 1:
            from hpcdl.parameter_server.store_settings import Serving, check_replicas

            serving = Serving(self.chosen, self.broadcast_every, self.fixed_delay)
            check_replicas(self.replicas, self.servers, self.servers_on_workers, self.sparse_push, serving)
        if self.servers_on_workers and self.device != "cpu":
            raise UsageError("--servers-on-workers keeps slices in the memory of the host; use --servers with a GPU")

    @property
    def chosen(self) -> Consistency:
        return Consistency(self.consistency, self.staleness)


def check_servers(options: ServerOptions, ranks: int, model: Any) -> None:
    """Raise UsageError where so many ranks cannot serve this model so."""
    from hpcdl.parameter_server.store_settings import Serving, StoreLayout, check_store

    rows = touched_rows(model) if options.sparse_push else None
    layout = StoreLayout(model.layout.size, ranks, "f4", options.servers, options.servers_on_workers, rows=rows)
    check_store(layout, Serving(options.chosen, options.broadcast_every, options.fixed_delay))


def served_survivor() -> Any:
    """What ranks that outlive others go on from, where there are servers."""
    from hpcdl.recovery.server_failover import ServedSurvivor

    return ServedSurvivor()


def service_of(case: Workload) -> Service:
    """Who serves whom; of --sparse-push the rows that a batch touches travel, with their keys, and what is no row."""
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
    bound = options.staleness if options.consistency == "ssp" else math.inf
    rounds, apart = options.chosen.in_rounds, not options.chosen.clocked
    return Service(holders, workers, pulled, pushed, rounds, apart, bound)


def held(case: Workload, rank: int, memory: Memory) -> None:
    """Of a server its slices (Workload.hold_slice); of a worker pulled parameters, and the gradient that it pushes."""
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
        case.hold_activations(memory, case.batch if service.apart else case.share(rank - first, service.workers))


def step(case: Workload) -> StepCost:
    """A worker pulls, computes and pushes; of async servers a step is any one worker's."""
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
    modes={
        "bsp": "--consistency bsp",
        "ssp": "--consistency ssp --staleness 2",
        "async": "--consistency async",
    },
    survivor=served_survivor,
    renamed={
        "on_workers": "servers_on_workers",
        "consistency": "chosen",
        "aware": "staleness_aware",
        "delay": "fixed_delay",
    },
)
