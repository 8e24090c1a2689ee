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

aware: rate / (1 + staleness), so that what is late moves less (Zhang et al., "Staleness-aware async-SGD", IJCAI 2016).
delay: each update is applied so many versions late, w(t+1) = w(t) - lr g(w(t - delay)): to see where training diverges.

The run is run by rank 0, the first server: it counts steps, scores, saves, and gives out the steps. Before a checkpoint
no worker is let past its step, so that what is saved is the state of just those steps.

(Dean et al., "Large scale distributed deep networks", NeurIPS 2012; Ho et al., NeurIPS 2013; Li et al., OSDI 2014)
"""

import contextlib
import math
from functools import partial
from typing import Any

import numpy as np

from hpcdl.chunks import chunk
from hpcdl.comm import Communicator
from hpcdl.data import Data
from hpcdl.errors import TrainingError
from hpcdl.kernels.device import CPU, Array, device_of
from hpcdl.kernels.norm import sum_of_squares
from hpcdl.optim import Optimizer
from hpcdl.runs.on_one_rank import OnOneRank
from hpcdl.runs.run import Run
from hpcdl.runs.state import Elsewhere, Tracked
from hpcdl.services.consistency import BSP, Consistency
from hpcdl.services.lead import Lead, LedStore
from hpcdl.services.parameter_store import ParameterStore
from hpcdl.services.store_messages import Push


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
) -> np.ndarray:
    """Train on all ranks of `comm`: the first `servers` serve, or all do (on_workers); the others work.

    Returns the parameters: whole on rank 0 and the workers, on other servers their slice.
    """
    size, holders = model.layout.size, comm.size if on_workers else servers
    serves, works = comm.rank < holders, on_workers or comm.rank >= servers
    group = run.until_end(comm.split(0 if serves else None, name="servers", allreduce="tree"))
    cut = chunk(size, holders, comm.rank) if serves else slice(0, 0)
    optimizer = optimizer.of_size(cut.stop - cut.start)
    whole = CPU.array(model.initialize(run.random)) if comm.rank == 0 else None
    pulled: Any = getattr(model, "device", CPU).empty(size, model.layout.dtype) if works else None
    keeper = Keeper(run) if comm.rank == 0 else None
    held = OnServers(model, pulled if whole is None else whole, optimizer, works, keeper)
    run.report(allreduce=None, consistency=consistency.name, staleness=consistency.staleness)
    run.report(servers=holders, broadcast_every=broadcast_every, fixed_delay=delay)
    run.begin("parameter_server", held, data)
    store = ParameterStore(
        comm,
        size,
        model.layout.dtype,
        servers=servers,
        on_workers=on_workers,
        consistency=consistency,
        update=Updates(optimizer, group, consistency, aware),
        initial=whole,
        broadcast_every=broadcast_every,
        delay=delay,
        lead=keeper,
        start=run.step,
        memory=run.memory,
    )
    if run.options.resume:
        for which in range(1, 1 + len(optimizer.state)):
            store.scatter(held.loaded.get(which), which)
    run.start()
    if works:
        work(comm, store, model, data, pulled, run)
    else:
        with run.stopwatch.step("serve"):
            store.serve()
    if keeper is not None:
        counts = store.server.clocks.staleness
        run.report(staleness_histogram=[counts[each] for each in range(max(counts, default=-1) + 1)])
    run.end()
    store.free()
    held.raise_failure(run.bookkeeping)
    return store.server.values if held.parameters is None else held.parameters


def work(comm: Communicator, store: ParameterStore, model: Any, data: Data, parameters: Array, run: Run) -> None:
    """What a worker does: pull, compute, push, until no step is left; at the end `parameters` are the final ones."""
    clocked, clip = store.consistency.clocked, run.options.clip_norm > 0
    share = (store.clients.index(comm.rank), len(store.clients)) if clocked else (0, 1)
    gradient = device_of(parameters).empty(parameters.size, parameters.dtype)
    batches = data.cursor(run.batch, share, clocked)
    while True:
        with run.stopwatch.step():
            step = pull(comm, store, parameters, run)
            if step is None:
                break
            with run.stopwatch.fetching():
                batch = batches.take(*divmod(step, run.per_epoch))
            gradient[:] = 0
            loss = model.loss_and_gradient(parameters, batch, gradient, store.attend if store.serves else None)
            norm = math.sqrt(sum_of_squares(gradient)) if clip else 0.0
            store.push(gradient, count=len(batch.y), total=batch.total, loss=loss, norm=norm)
    batches.close()
    with run.stopwatch.step("serve") if comm.rank == 0 else contextlib.nullcontext():  # rank 0's clock is the run's
        store.close(parameters)


def pull(comm: Communicator, store: ParameterStore, parameters: Array, run: Run) -> int | None:
    """The step to compute, on these parameters; None: no step is left."""
    blocked, apart = comm.traffic.blocked_seconds, store.apart_seconds
    step = store.pull(parameters)
    if comm.rank > 0:  # what rank 0 has spent on scores and checkpoints meanwhile is no part of a step
        run.stopwatch.excuse(min(store.apart_seconds - apart, comm.traffic.blocked_seconds - blocked))
    return step


class Updates:
    """What a server does with a push: a step of the optimizer on its slice, by the mean over the examples pushed."""

    def __init__(self, optimizer: Optimizer, group: Any, consistency: Consistency, aware: bool):
        self.optimizer, self.group, self.in_rounds, self.aware = optimizer, group, consistency.in_rounds, aware
        self.state = optimizer.state

    def __call__(self, values: np.ndarray, gradient: np.ndarray, push: Push) -> None:
        if push.count == 0:  # a worker without examples in this batch
            return
        rate = self.optimizer.schedule(push.step) * push.count / push.total
        rate /= 1 + push.staleness if self.aware else 1
        norm = self.norm(gradient, push) if self.optimizer.clip_norm > 0 else None
        self.optimizer.update(values, gradient, 1 / push.count, norm, rate)

    def norm(self, gradient: np.ndarray, push: Push) -> float:
        """The norm of the whole vector: of one push its worker knows it, of a round's sum the servers find it."""
        if not self.in_rounds:
            return push.norm
        squares = CPU.zeros(1, "float64")
        squares[0] = sum_of_squares(gradient)
        self.group.all_reduce(squares)
        return math.sqrt(squares[0])


class OnServers(OnOneRank):
    """The parameters and the optimizer's state lie on the servers, of which rank 0 gathers what is scored and saved.

    loaded: of a run that is gone on with, vectors of the state by number, to be given to the servers.
    """

    keeper: Any  # Keeper, and None but on rank 0

    def __init__(
        self, model: Any, parameters: Array | None, optimizer: Optimizer, works: bool, keeper: "Keeper | None"
    ):
        super().__init__(model, parameters, optimizer, works)
        self.keeper = keeper
        self.loaded: dict[int, np.ndarray] = {}

    def tracked(self) -> dict[str, Tracked]:
        if not self.leads:
            return {}
        state: dict[str, Tracked] = {
            f"optimizer/{name}": Elsewhere(
                partial(self._read, which), partial(self.loaded.__setitem__, which), self.parameters
            )
            for which, name in enumerate(self.optimizer.state, 1)
        }
        return super().tracked() | state

    def _read(self, which: int) -> np.ndarray:
        """A vector of the optimizer's state, whole."""
        vector = CPU.empty(self.parameters.size, self.parameters.dtype)
        self.keeper.gather(vector, which)
        return vector

    def refresh(self) -> None:
        self.keeper.gather(self.parameters)
        run = self.keeper.run
        run.legs.sent = self.sent(run.comm.traffic)  # the servers have told, too

    def horizon(self, step: int) -> int:
        return self.keeper.store.granted


class Keeper(Lead):
    """On rank 0: runs the run, and decides which steps may be given out: none beyond the next checkpoint."""

    store: LedStore

    def __init__(self, run: Run):
        self.run = run

    @property
    def held(self) -> OnServers:
        """What the run holds."""
        return self.run.held  # type: ignore[return-value]

    def begin(self, store: LedStore, step: int) -> None:
        self.store = store
        self._decide()

    def _decide(self) -> None:
        run, every = self.run, self.run.options.checkpoint_every
        self.steps = run.steps if run.stopped is None else run.step
        self.limit = min(self.steps, (run.step // every + 1) * every) if every else self.steps
        self.apart_seconds = run.stopwatch.apart_seconds

    def admit(self, push: Push) -> None:
        if not math.isfinite(push.loss) and self.held.failure is None:
            self._fail(self.run.not_finite(push.step + 1, push.client))

    def done(self, loss: float, total: float) -> None:
        if self.held.failure is not None:
            return
        self.run.record(loss, int(total))
        try:
            self.run.boundary()
        except TrainingError as error:
            self._fail(error)
        else:
            self._decide()

    def _fail(self, error: TrainingError) -> None:
        """The run cannot go on: what has been given out is computed, as after a signal, and nothing comes of it."""
        self.held.failure = error
        self.steps = self.limit = self.store.granted

    def signalled(self) -> None:
        self.run.signalled = True

    def sent(self, rank: int, bytes: float, messages: float) -> None:
        self.held.note_sent(rank, bytes, messages)

    def gather(self, whole: np.ndarray, which: int = 0) -> None:
        """whole <- the servers' vectors after the run's step; when it is over, the values with all that is delayed."""
        self.store.gather(whole, which, self.run.step, finish=which == 0 and self.run.over)
