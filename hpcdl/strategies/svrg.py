"""SVRG: stochastic gradients whose variance falls to zero, by a full gradient now and then; a constant rate suffices.

    w <- initial values
    for s = 0, 1, 2, ...
        v <- w                                           the snapshot
        mu <- 1/n * sum over all i of grad f_i(v)        each rank over its share; one all-reduce
        for t = 1, ..., m
            on each rank, its share B_r of the minibatch B of b examples:
                d_r <- sum over i in B_r of (grad f_i(w) - grad f_i(v))
            d <- all-reduce sum of d_1, ..., d_N
            w <- w - lr * (d / b + mu + decay * w)
        if the snapshot is to be random: w <- the w before a step t that was drawn for s

The mean of d / b + mu is the full gradient, and its variance goes to zero as w and v approach the optimum: SGD at a
constant rate stalls at a distance from the optimum, SVRG does not. Each step costs one all-reduce, as with SGD, and two
gradients of the batch; each round one all-reduce more, and a gradient of all examples.

(Johnson and Zhang, "Accelerating stochastic gradient descent using predictive variance reduction", NeurIPS 2013)"""

from dataclasses import dataclass
from typing import Any, Literal

from hpcdl.errors import UsageError
from hpcdl.kernels.device import Array
from hpcdl.runs.options import Options, not_negative, of_training, option, positive, refuse
from hpcdl.strategies.description import Call, Communicator, Data, Memory, Optimizer, Run, StepCost, Strategy, Workload


def train(
    comm: Communicator,
    model: Any,
    data: Data,
    optimizer: Optimizer,
    run: Run,
    inner_epochs: float = 2.0,
    snapshot: str = "last",
) -> Array:
    """Train with sgd on all ranks of `comm`; return the parameters, the same flat vector on each.
    inner_epochs: the steps m of a round, in epochs. snapshot: last (the paper's option I) or random (option II)."""
    from hpcdl.checkpoint.state import Same
    from hpcdl.data.full_pass import full_gradient
    from hpcdl.kernels.reduce import add_scaled, scale
    from hpcdl.runs.ownership import Whole

    w = run.initial(model)
    d, v, mu = (comm.empty(like=w) for _ in range(3))
    d[:] = v[:] = mu[:] = 0
    scale(d, -1.0)  # compiled before any clock runs
    add_scaled(d, mu, 1.0)
    size, per_epoch, _ = run.plan(data)
    m = max(1, round(inner_epochs * per_epoch))
    run.track("snapshot", Same(v))
    run.track("full_gradient", Same(mu))
    drawn = comm.empty(like=w) if snapshot == "random" else None
    if drawn is not None:
        drawn[:] = w
        run.track("drawn", Same(drawn))
    run.report(method="svrg", inner_steps=m, snapshot=snapshot)
    run.begin("svrg", Whole(model, w, optimizer), data, ("method", "inner_steps", "snapshot"))
    for step, batch in enumerate(run.batches(data, share=(comm.rank, comm.size)), run.step):
        s, t = divmod(step, m)
        if t == 0:
            v[:] = w
            full_gradient(comm, model, data, size, batch.epoch, v, mu)
        if drawn is not None and t == run.random("snapshot", s).integers(m):
            drawn[:] = w
        d[:] = 0
        model.loss_and_gradient(v, batch, d)
        scale(d, -1.0)
        loss = model.loss_and_gradient(w, batch, d)
        comm.all_reduce(d)
        scale(d, 1 / batch.total)
        add_scaled(d, mu, 1.0)
        optimizer.update(w, d)
        if drawn is not None and t == m - 1:
            w[:] = drawn
        run.record(loss, batch.total)
        run.boundary()
    end = run.progress
    rounds = -(-end.step // m)
    run.report(snapshots=rounds, gradients_per_example=2 * end.examples / data.examples + rounds)
    return w


@dataclass(frozen=True)
class SvrgOptions(Options):
    method: Literal["svrg", "saga"] = option(
        "svrg", "svrg takes a full gradient now and then, saga keeps the last slope of each example (linear models)"
    )
    inner_epochs: float = option(2.0, "svrg: epochs between two full gradients")
    snapshot: Literal["last", "random"] = option(
        "last", "svrg: where the next full gradient is taken: at the last iterate (option I), or a random one (II)"
    )
    threads: int = option(
        0, "svrg on one rank: threads that take steps of single examples without locks; 0: batches, on any ranks"
    )
    optimizer: str = of_training("sgd", "only sgd: variance reduction takes plain gradient steps")
    schedule: str = of_training("constant", "of the rate; a constant one suffices: constant, step, cosine, 1/t, ...")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.optimizer != "sgd":
            raise UsageError(f"--optimizer {self.optimizer}: variance reduction takes plain gradient steps; take sgd")
        positive(self, "inner_epochs")
        not_negative(self, "threads")
        saga, slowed = self.method == "saga", self.straggler or self.pretend_compute
        drawn, parts = self.snapshot != "last", self.inner_epochs != int(self.inner_epochs)
        refuse(
            (
                (saga or self.threads) and self.mixed,
                "--data mix: --method saga and --threads need the rows of one data set in memory; give one",
            ),
            (self.clip_norm, "--clip-norm: clipped steps undo the variance reduction; take a smaller --lr instead"),
            (self.augment, "--augment: an example that changes has no gradient to keep; leave it out"),
        )
        if saga or self.threads:  # works on single examples of a linear model, without a model's own gradient
            what, cpu = "--threads" if self.threads else "--method saga", self.device == "cpu"
            refuse(
                (not cpu, f"{what} works on single examples, on the CPU: leave out --device {self.device}"),
                (self.accumulate > 1, f"{what} does not cut batches into parts: leave out --accumulate"),
                (slowed, f"{what} calls no model that could be slowed: leave out --straggler, --pretend-compute"),
            )
        if saga and (self.inner_epochs != 2 or drawn or self.threads):
            raise UsageError("--method saga takes no snapshots: leave out --inner-epochs, --snapshot and --threads")
        if self.threads:
            batch = self.batch_size not in (Options.batch_size, "full") or self.batch_per_rank
            away = self.data_servers or self.placement == "streamed"
            refuse(
                (self.average, "--threads: without locks there is no single iterate to average; leave out --average"),
                (drawn, "--threads: without locks there is no single iterate to draw; leave out --snapshot"),
                (parts, f"--threads meet at ends of epochs: --inner-epochs is whole, not {self.inner_epochs}"),
                (self.threads > 1024, f"--threads is 1024 at most, not {self.threads}"),
                (batch, "--threads take steps of one example: leave out --batch-size and --batch-per-rank"),
                (away, "--threads need the rows in memory: take --placement shared, without --data-servers"),
            )

    def plan(self, ranks: int, data: Any) -> tuple[int, int, int]:
        """Return examples per step, steps per epoch, and steps in all; with --threads a step of the run is an epoch."""
        if not self.threads:
            return super().plan(ranks, data)
        return data.examples, 1, self.allowance.steps(self.steps or self.epochs, data.examples)


def check(options: SvrgOptions, ranks: int, model: Any) -> None:
    if options.threads and ranks > 1:
        raise UsageError(f"--threads share the parameters of one rank, and there are {ranks}: start it without mpiexec")
    if options.threads or options.method == "saga":
        from hpcdl.models.linear_form import linear_form

        linear_form(model, "--threads" if options.threads else "--method saga")


def start(comm: Communicator, model: Any, data: Data, optimizer: Optimizer, run: Run) -> None:
    from hpcdl.strategies.asynchronous_svrg import train as train_in_threads
    from hpcdl.strategies.saga import train as train_saga

    options: Any = run.options
    if options.threads:
        train_in_threads(comm, model, data, optimizer, run, options.threads, int(options.inner_epochs))
    elif options.method == "saga":
        train_saga(comm, model, data, optimizer, run)
    else:
        train(comm, model, data, optimizer, run, options.inner_epochs, options.snapshot)


def held(case: Workload, rank: int, memory: Memory) -> None:
    """Add to `memory` a step's vectors; for SVRG snapshot, full gradient, drawn iterate; for SAGA table, mean."""
    from hpcdl.models.linear_form import linear_form

    options, vectors, rows = case.options, len(case.vectors), case.share(rank, case.size)
    if options.method == "saga":
        outputs = linear_form(case.model, "--method saga").outputs
        case.hold_step(memory, rows, optimizer=vectors + 1)
        case.hold(memory, "optimizer", 1, case.data.examples * outputs)
    else:
        case.hold_step(memory, rows, optimizer=vectors + 2 + (options.snapshot == "random"))
    case.hold_activations(memory, case.share(rank, case.size, full_batch(case)))


def full_batch(case: Workload) -> int:
    """Return the number of examples per batch in a pass over all examples (hpcdl/data/full_pass.py)."""
    from hpcdl.data.full_pass import batch_of_pass

    return min(batch_of_pass(case.size, case.data.examples, case.plan[0]), case.data.examples)


def step(case: Workload) -> StepCost:
    """Return the cost of two gradients of a share and an all-reduce; per round also a full gradient and all-reduce.
    SAGA: of one gradient, a full one at the start, and all-reduces of the table. --threads: of an epoch."""
    from hpcdl.models.linear_form import linear_form

    options, (_, per_epoch, steps), examples = case.options, case.plan, case.data.examples
    batch = full_batch(case)
    whole, batches = case.share(0, case.size, batch), -(-examples // batch)
    if options.threads:
        rounds, rows = -(-steps // int(options.inner_epochs)) / steps, -(-examples // options.threads)
        return StepCost(examples, [(rows, 2), (whole, batches * rounds)], updates=0.0)
    if options.method == "saga":
        table = examples * linear_form(case.model, "--method saga").outputs * case.dtype.itemsize
        calls = [
            Call("all_reduce", case.bytes, 1 + 1 / steps),
            Call("all_reduce", table, (1 + steps // per_epoch) / steps),
        ]
        return StepCost(case.batch, [(case.largest, 1), (whole, batches / steps)], calls, drawn=case.largest)
    rounds = -(-steps // max(1, round(options.inner_epochs * per_epoch))) / steps
    calls = [Call("all_reduce", case.bytes, 1 + rounds)]
    return StepCost(case.batch, [(case.largest, 2), (whole, batches * rounds)], calls, drawn=case.largest)


STRATEGY = Strategy("train-svrg", SvrgOptions, start, held, step, check=check)
