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

One all-reduce of the parameters in H steps instead of one of the gradient in each: bytes and messages fall by H. The
mean of the g_r is the gradient of the batch, also where shares are uneven, so that H = 1 is all-reduce SGD for every
rule that is linear in the gradient (sgd, momentum, nesterov). With a larger H the replicas drift apart in between, and
the model of the run is their average. (Stich, "Local SGD converges fast and communicates little", ICLR 2019)

local_from: all-reduce SGD up to that epoch, local steps from there on: post-local SGD (Lin et al., "Don't use large
mini-batches, use local SGD", ICLR 2020).

local_momentum: what becomes of the optimizer's own vectors at a synchronization. keep: each rank keeps its own;
average: they are averaged, too, each for as many bytes again; reset: they begin anew at zero.

outer: a rule that takes the average for a step. With w0 the parameters after the last synchronization,

    d <- w0 - 1/N * (w_1 + ... + w_N)                    the pseudo-gradient
    w_r <- w0 - outer_lr * rule(d)

momentum is SlowMo (Wang et al., ICLR 2020), nesterov with outer_lr 0.7 over adamw is DiLoCo (Douillard et al., 2023).
sgd with outer_lr 1 is the average again.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import DTypeLike

from hpcdl.errors import UsageError, parse_spec
from hpcdl.kernels.device import CPU, Device
from hpcdl.plugins import of_torch
from hpcdl.recovery.options import SurvivingOptions
from hpcdl.runs.options import option
from hpcdl.strategies.description import Call, StepCost, Strategy

if TYPE_CHECKING:
    from hpcdl.comm import Communicator
    from hpcdl.data import Data
    from hpcdl.memory import Memory
    from hpcdl.optim import Optimizer
    from hpcdl.runs.run import Run
    from hpcdl.strategies.workload import Workload


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
) -> np.ndarray:
    """Train on all ranks of `comm`; returns this rank's parameters. The run reports the average of all.

    sync_every: H. local_from: the epoch, counted from 0, with which local steps begin. local_momentum: keep, average or
    reset. outer: average, or an optimizer as `make_optimizer` names it, with its own rate outer_lr.
    """
    from hpcdl.models.model import abilities_of
    from hpcdl.runs.replicas import Replicas

    w = run.initial(model)
    gradient = comm.empty(like=w)
    rule = outer_rule(outer, outer_lr, w.size, w.dtype, abilities_of(model).device)
    outer_optimizer = rule and Outer(rule, w, run)
    run.report(sync_every=sync_every, local_from=local_from, local_momentum=local_momentum)
    run.report(outer=outer, outer_lr=outer_lr)
    fixed = "sync_every", "local_from", "local_momentum"
    first = local_from * run.plan(data)[1]
    held = Replicas(model, w, optimizer, lambda step: step <= first or (step - first) % sync_every == 0)
    run.begin("local_sgd", held, data, fixed)
    rounds = max(0, run.step - first) // sync_every  # done already, where a run is gone on with
    if outer_optimizer:
        outer_optimizer.rule.step = rounds
    if local_momentum == "reset" and rounds:
        optimizer.since = first + rounds * sync_every

    def synchronize() -> None:
        comm.all_reduce(w, op="mean")
        if outer_optimizer:
            outer_optimizer.step(w)
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
            if outer_optimizer and t == first:
                outer_optimizer.start[:] = w
            optimizer.update(w, gradient, scale=comm.size / batch.total)
            if (t + 1 - first) % sync_every == 0:
                synchronize()
        run.record(loss, batch.total)
        run.boundary()
    run.report(synchronizations=max(0, run.step - first) // sync_every)
    return w


def outer_rule(spec: str, lr: float, size: int, dtype: DTypeLike, device: Device = CPU) -> Optimizer | None:
    """The optimizer that `spec` names, with the constant rate `lr`; None for average. Raises UsageError."""
    from hpcdl.optim import SETTINGS, make_optimizer

    name = spec if of_torch(spec) else parse_spec("outer rule", spec, {"average": {}} | SETTINGS)[0]
    return None if name == "average" else make_optimizer(spec, size, dtype, lambda step: lr, device=device)


class Outer:
    """The outer optimizer: it steps from where the last synchronization had left all ranks, along what they agree on.

    Its vectors are the same on all ranks, and part of the run's checkpoints.
    """

    def __init__(self, rule: Optimizer, w: np.ndarray, run: Run):
        from hpcdl.checkpoint.state import Same

        self.rule, self.start = rule, rule.device.empty(w.size, w.dtype)
        self.start[:] = w
        self.step(w)  # from where it is: changes nothing, but is compiled before any clock runs
        run.track("outer/start", Same(self.start))
        for name, vector in rule.state.items():
            run.track(f"outer/{name}", Same(vector))

    def step(self, mean: np.ndarray) -> None:
        """mean <- start - outer_lr * rule(start - mean), which is the next start."""
        from hpcdl.kernels.reduce import add_scaled

        add_scaled(mean, self.start, -1.0)  # -d
        self.rule.update(self.start, mean, scale=-1.0)
        mean[:] = self.start


@dataclass(frozen=True)
class LocalOptions(SurvivingOptions):
    sync_every: int = option(8, "steps that a rank takes by itself between two averages of the parameters")
    local_from: int = option(0, "epoch from which steps are local, with all-reduce SGD before it; 0: from the start")
    local_momentum: Literal["keep", "average", "reset"] = option(
        "keep", "what becomes of each rank's momentum (adam: moments) when parameters are averaged"
    )
    outer: str = option(
        "average", "average, or an optimizer that takes the way to the average for a gradient, as in nesterov:beta=0.9"
    )
    outer_lr: float = option(1.0, "learning rate of that optimizer")

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("sync_every", "outer_lr"):
            value = getattr(self, name)
            if not (value > 0 and math.isfinite(value)):
                raise UsageError(f"--{name.replace('_', '-')} must be greater than 0, not {value}")
        self._refuse_negative("local_from")
        if outer_rule(self.outer, self.outer_lr, 0, self.dtype) is None and self.outer_lr != 1:
            raise UsageError("--outer average has no learning rate: leave out --outer-lr, or add --outer sgd")
        if self.local_momentum != "keep" and self.optimizer == "sgd":
            raise UsageError(f"--local-momentum {self.local_momentum}: --optimizer sgd has none; leave it out")


def held(case: Workload, rank: int, memory: Memory) -> None:
    """The replica and the average; with an outer rule where it started, and its vectors."""
    from hpcdl.optim import SETTINGS, vectors_of

    outer = case.options.outer.partition(":")[0]
    more = 1 + len(vectors_of(case.options.outer)) if outer in SETTINGS else 0
    case.hold_step(memory, case.share(rank, case.size), parameters=2, optimizer=len(case.vectors) + more)


def step(case: Workload) -> StepCost:
    """A gradient of the share; K values, and the vectors that are averaged, in H steps; before local steps all K."""
    options, (_, per_epoch, steps) = case.options, case.plan
    together = min(1.0, options.local_from * per_epoch / steps)
    often = (1 - together) / options.sync_every
    vectors = 1 + (len(case.vectors) if options.local_momentum == "average" else 0)
    calls = [Call("all_reduce", case.bytes, together + vectors * often)]
    updates = 1 + (often if options.outer != "average" else 0.0)
    return StepCost(case.batch, [(case.largest, 1)], calls, updates, drawn=case.largest)


STRATEGY = Strategy("train-local-sgd", LocalOptions, train, held, step)
