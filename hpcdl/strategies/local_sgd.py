"""Local SGD: each rank takes H steps of its own, then all replace their parameters by the average.

    w_1 = ... = w_N <- initial values
    for t = 0, 1, 2, ...
        on each rank r, its share B_r of the minibatch of b examples:
            g_r <- N / b * sum over i in B_r of grad f(w_r; x_i, y_i)
            w_r <- w_r - lr * g_r                        (or the rule of the optimizer)
        after every H-th step, a synchronization:
            w_r <- 1/N * (w_1 + ... + w_N), by an all-reduce

    rank 0   o--o--o--o         o--o--o--o
    rank 1   o--o--o--o > mean >o--o--o--o > mean > ...            H = 4
    rank 2   o--o--o--o         o--o--o--o

Bytes and messages are 1/H of those of all-reduce SGD. The mean of the g_r is the gradient of the batch, even if shares
are uneven, so H = 1 is all-reduce SGD for rules that are linear in the gradient (sgd, momentum, nesterov). With a
larger H the replicas drift apart; their average is the model of the run. (Stich, "Local SGD converges fast and
communicates little", ICLR 2019)

local_from: all-reduce SGD before this epoch, as post-local SGD (Lin et al., "Don't use large mini-batches", ICLR 2020).
local_momentum: with keep, each rank keeps its optimizer's vectors; with average, a synchronization averages them, too,
each for as many bytes as the parameters; with reset, it sets them to zero.
outer: a rule that uses the way to the average as a gradient. With w0 the parameters after the last synchronization,

    d <- w0 - 1/N * (w_1 + ... + w_N)                    the pseudo-gradient
    w_r <- w0 - outer_lr * rule(d)

momentum gives SlowMo (Wang et al., ICLR 2020); nesterov, outer_lr 0.7, over adamw DiLoCo (Douillard et al., 2023).
compress: a synchronization sends compressed w_r - w0, and w_r <- w0 + their mean, with error feedback as in
hpcdl/comm/compression. All-reduces of gradients and of the optimizer's vectors are not compressed. (Qsparse-local-SGD,
Basu et al., NeurIPS 2019)"""

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import DTypeLike

from hpcdl.errors import UsageError, parse_spec
from hpcdl.kernels.device import CPU, Device, device_of
from hpcdl.plugins import of_torch
from hpcdl.recovery.options import SurvivingOptions
from hpcdl.runs.options import not_negative, option, positive
from hpcdl.strategies.compressing import (
    CompressOptions,
    average_by_differences,
    check_averaging,
    hold_kept,
    reduction_calls,
    track_state,
)
from hpcdl.strategies.description import Call, Communicator, Data, Memory, Optimizer, Run, StepCost, Strategy, Workload


def train(
    comm: Communicator,
    model: Any,
    data: Data,
    optimizer: Optimizer,
    run: Run,
    sync_every: int = 1,
    local_from: int = 0,
    local_momentum: str = "keep",
    outer: str = "average",
    outer_lr: float = 1.0,
    compress: str = "none",
) -> np.ndarray:
    """Train on all ranks of `comm`; return this rank's parameters. The run reports the average of all ranks. Arguments
    as in LocalOptions; outer: average, or an optimizer as `make_optimizer` names it, with the rate outer_lr."""
    from hpcdl.checkpoint.state import Same
    from hpcdl.comm.compression import compressed
    from hpcdl.kernels.reduce import add_scaled
    from hpcdl.models.model import abilities_of
    from hpcdl.runs.replicas import Replicas

    w = run.initial(model)
    gradient = comm.empty(like=w)
    rule = outer_rule(outer, outer_lr, w.size, w.dtype, abilities_of(model).device)
    start: Any = None  # the parameters after the last synchronization, equal on all ranks, if anything needs them
    state: Any = None  # of compressed all-reduces

    def outer_step(mean: np.ndarray) -> None:
        """Set `mean` and `start` to start - outer_lr * rule(start - mean)."""
        add_scaled(mean, start, -1.0)  # -d
        rule.update(start, mean, scale=-1.0)
        mean[:] = start

    if compress != "none":
        state = compressed(compress, w.size, w.dtype, run.options.seed, model.layout)
        track_state(run, state)
    if rule is not None or state is not None:
        start = device_of(w).empty(w.size, w.dtype)
        start[:] = w
        run.track("outer/start", Same(start))
    if rule is not None:
        outer_step(w)  # changes nothing here; compiles the rule before any clock runs
        for name, vector in rule.state.items():
            run.track(f"outer/{name}", Same(vector))
    run.report(compress=compress, sync_every=sync_every, local_from=local_from, local_momentum=local_momentum)
    run.report(outer=outer, outer_lr=outer_lr)
    first = local_from * run.plan(data)[1]
    held = Replicas(model, w, optimizer, lambda step: step <= first or (step - first) % sync_every == 0)
    run.begin("local_sgd", held, data, ("sync_every", "local_from", "local_momentum"))
    rounds = max(0, run.step - first) // sync_every  # done before a resumption
    if rule is not None:
        rule.step = rounds
    if state is not None:
        state.begin(rounds)
    if local_momentum == "reset" and rounds:
        optimizer.since = first + rounds * sync_every

    def synchronize() -> None:
        if state is None:
            comm.all_reduce(w, op="mean")
        else:
            average_by_differences(comm, w, start, state)
        if rule is not None:
            outer_step(w)
        elif state is not None:
            start[:] = w
        if local_momentum == "average":
            for name in optimizer.vectors:
                comm.all_reduce(optimizer.state[name], op="mean")
        elif local_momentum == "reset":
            optimizer.reset()

    for t, batch in enumerate(run.batches(data, share=(comm.rank, comm.size)), run.step):
        gradient[:] = 0
        loss = model.loss_and_gradient(w, batch, gradient)
        if t < first:
            comm.all_reduce(gradient)
            optimizer.update(w, gradient, scale=1 / batch.total)
        else:
            if start is not None and t == first:
                start[:] = w
            optimizer.update(w, gradient, scale=comm.size / batch.total)
            if (t + 1 - first) % sync_every == 0:
                synchronize()
        run.record(loss, batch.total)
        run.boundary()
    run.report(synchronizations=max(0, run.step - first) // sync_every)
    return w


def outer_rule(spec: str, lr: float, size: int, dtype: DTypeLike, device: Device = CPU) -> Any:
    """Return the optimizer that `spec` names, with the constant rate `lr`; None for average. Raises UsageError."""
    from hpcdl.optim import SETTINGS, make_optimizer

    name = spec if of_torch(spec) else parse_spec("outer rule", spec, {"average": {}} | SETTINGS)[0]
    return None if name == "average" else make_optimizer(spec, size, dtype, lambda step: lr, device=device)


@dataclass(frozen=True)
class LocalOptions(CompressOptions, SurvivingOptions):
    sync_every: int = option(8, "local steps of a rank between two averagings of the parameters")
    local_from: int = option(0, "epoch from which steps are local, with all-reduce SGD before it; 0: from the start")
    local_momentum: Literal["keep", "average", "reset"] = option(
        "keep", "what becomes of each rank's momentum (adam: moments) when parameters are averaged"
    )
    outer: str = option(
        "average", "average, or an optimizer whose gradient is the way to the average, as in nesterov:beta=0.9"
    )
    outer_lr: float = option(1.0, "learning rate of the --outer optimizer")

    def __post_init__(self) -> None:
        super().__post_init__()
        positive(self, "sync_every", "outer_lr")
        not_negative(self, "local_from")
        if outer_rule(self.outer, self.outer_lr, 0, self.dtype) is None and self.outer_lr != 1:
            raise UsageError("--outer average has no learning rate: leave out --outer-lr, or add --outer sgd")
        if self.local_momentum != "keep" and self.optimizer == "sgd":
            raise UsageError(f"--local-momentum {self.local_momentum}: --optimizer sgd has no momentum; leave it out")


def held(case: Workload, rank: int, memory: Memory) -> None:
    """Add to `memory` the replica and the average; with an outer rule also its start parameters and its vectors."""
    from hpcdl.optim import SETTINGS, vectors_of

    outer = case.options.outer.partition(":")[0]
    more = len(vectors_of(case.options.outer)) if outer in SETTINGS else 0
    more += outer in SETTINGS or case.options.compresses  # the start
    case.hold_step(memory, case.share(rank, case.size), parameters=2, optimizer=len(case.vectors) + more)
    hold_kept(case, memory)


def step(case: Workload) -> StepCost:
    """Return the cost of a gradient, and of all-reduces: every H steps, but in each step before epoch local_from."""
    options, (_, per_epoch, steps) = case.options, case.plan
    together = min(1.0, options.local_from * per_epoch / steps)
    often = (1 - together) / options.sync_every
    vectors = 1 + (len(case.vectors) if options.local_momentum == "average" else 0)
    calls = [Call("all_reduce", case.bytes, together + (vectors - options.compresses) * often)]
    if options.compresses:
        calls += reduction_calls(options.compress, case, slice(0, case.length), often)
    updates = 1 + (often if options.outer != "average" else 0.0)
    return StepCost(case.batch, [(case.largest, 1)], calls, updates, drawn=case.largest)


def fits(options: LocalOptions, ranks: int, model: Any) -> None:
    check_averaging(options.compress, model.layout)


STRATEGY = Strategy("train-local-sgd", LocalOptions, train, held, step, check=fits)
