"""Stochastic dual coordinate ascent (SDCA) of a linear model: in threads PASSCoDe, on several ranks CoCoA and CoCoA+.

The problem, with x_i and a last feature that is always 1, whose weight is the bias:

    P(w) = 1/n sum of phi_i(w x_i) + lambda/2 |w|^2 + l1 |w|_1

has a dual one, with a number a_i for each example,

    D(a) = 1/n sum of -phi_i*(-a_i) - lambda/2 |w(a)|^2         v(a) = 1/(lambda n) sum of a_i x_i
                                                                 w(a)_j = sign(v_j) max(|v_j| - l1 / lambda, 0)

P(w) >= P(best) >= D(a) for every w and a, so that the duality gap P(w) - D(a) says how far w is from the best at most,
without anybody knowing the best. On rank k of K, which has n_k of the n examples:

    v, all a_i <- 0
    each round:
        u <- v
        for local_steps n_k of its examples i, pass after pass in random order:
            a_i <- the number that is best for i alone, by w(u) x_i and q = sigma' |x_i|^2 / (lambda n)
            u <- u + sigma' / (lambda n) * (the change of a_i) x_i              kernels/coordinate_descent.py
        v <- the mean of all ranks' u: one all-reduce of a value for each feature and one for the bias

    add        sigma' = K, and the changes of a_i count in full           CoCoA+
    average    sigma' = 1, and a_i moves by 1/K of its change             CoCoA

For u - v is sigma' times what the rank's a_i have added to v, and both times the mean of the u - v is what all that
count have added. With sigma' = K a rank works as if the others did as it does: by the convexity of |w(.)|^2, at
v + sum of d_k = mean of v + K d_k, what the ranks gain by themselves is no more than they gain together. On one rank
both are SDCA.

In threads each has a part of every pass, and all write to one u: `atomic` additions are never lost, so that v stays
v(a); with `none` some are, and the run goes to the solution of another, near problem (PASSCoDe-Wild). The gap holds in
any case: D is computed from v(a), which each evaluation adds up anew, and P at the parameters as they are saved.
`drift` is the 2-norm of w less w(a), relative to that of w(a).

(Shalev-Shwartz and Zhang, "Stochastic dual coordinate ascent methods for regularized loss minimization", JMLR 2013;
Hsieh, Yu, Dhillon, "PASSCoDe", ICML 2015; Jaggi et al., "Communication-efficient distributed dual coordinate ascent",
NeurIPS 2014; Ma et al., "Adding vs. averaging in distributed primal-dual optimization", ICML 2015)
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from hpcdl.errors import UsageError
from hpcdl.formatting import dashed
from hpcdl.runs.options import Options, option
from hpcdl.strategies.description import Call, StepCost, Strategy

if TYPE_CHECKING:
    from hpcdl.comm import Communicator
    from hpcdl.data import Data
    from hpcdl.memory import Memory
    from hpcdl.optim import Optimizer
    from hpcdl.runs.run import Run
    from hpcdl.strategies.workload import Workload

PROGRAM = "train-coordinate-descent"


def train(
    comm: Communicator,
    model: Any,
    data: Data,
    optimizer: Optimizer,
    run: Run,
    weight_decay: float,
    l1: float = 0.0,
    local_steps: float = 1.0,
    aggregate: str = "add",
    threads: int = 1,
    locking: str = "atomic",
    tolerance: float = 0.0,
) -> np.ndarray:
    """Train on all ranks of `comm`; returns the parameters, the same flat vector on each. A step of the run is a round.

    weight_decay: lambda, greater than 0. local_steps: passes of a rank over its examples in a round, or a part of one.
    aggregate: add or average. locking: atomic or none, of several threads. tolerance: the gap that ends the run; 0:
    none does. optimizer: has nothing to do; a run has one.
    """
    from hpcdl.comm import refuse_together
    from hpcdl.kernels.linear import HINGE, LOGISTIC, SQUARED
    from hpcdl.models.linear_form import linear_form
    from hpcdl.models.model import unwrapped
    from hpcdl.parallel.dual_ascent import Ascent, Dual

    with refuse_together(comm.mpi):
        form = linear_form(unwrapped(model), PROGRAM, (SQUARED, LOGISTIC, HINGE))
        mine = Ascent(data, form, (comm.rank, comm.size), weight_decay, l1, run.options.seed, threads, locking)
    sigma = comm.size if aggregate == "add" else 1
    averaged = comm.size if aggregate == "average" else 1
    visits = mine.visits(local_steps)
    total = comm.mpi.allreduce(visits)
    w = comm.empty(model.layout.size, model.layout.dtype)
    w[:] = 0
    run.report(weight_decay=weight_decay, l1=l1, local_steps=local_steps, aggregate=aggregate)
    run.report(threads=threads, locking=locking if threads > 1 else None)
    held, fixed = Dual(model, w, optimizer, mine, comm), ("weight_decay", "l1")
    run.begin("coordinate_descent", held, data, fixed, learning_rate=lambda step: np.nan, tolerance=tolerance)
    for step in run.rounds():
        before = mine.dual.copy() if averaged > 1 else mine.dual
        loss = mine.visit(step * visits, visits, sigma)
        comm.all_reduce(mine.v.reshape(-1), op="mean")
        if averaged > 1:
            mine.dual[:] = before + (mine.dual - before) / averaged
        mine.weights_into(w)
        optimizer.step += 1
        run.record(loss, total)
        run.boundary()
    mine.close()
    run.report(rounds=run.step)
    return w


MOST = {"local_steps": 1e6, "threads": 1024}


@dataclass(frozen=True)
class CoordinateOptions(Options):
    rounds: int = option(100, "how many rounds at most; the run counts them as its steps and its epochs")
    tolerance: float = option(0.0, "end when the duality gap, of an evaluation, is no larger; 0: after all rounds")
    local_steps: float = option(1.0, "passes of a rank over its own examples in a round, or a part of one, as 0.1")
    aggregate: Literal["add", "average"] = option(
        "add",
        "what becomes of the ranks' changes: added, of a problem that allows for it (CoCoA+), or averaged (CoCoA)",
    )
    l1: float = option(0.0, "L1 penalty per parameter, beside --weight-decay: the elastic net")
    threads: int = option(1, "threads of a rank that change the parameters together")
    locking: Literal["atomic", "none"] = option(
        "atomic", "of several threads: atomic loses no addition, none is faster and solves a slightly other problem"
    )
    weight_decay: float = option(0.001, "L2 penalty per parameter, lambda of the problem; greater than 0")
    model: str = option("svm", "linear, logistic or svm")
    optimizer: str = option("sgd", "has nothing to do here: each step is the best for its coordinate")

    unused = (
        *("epochs", "steps", "batch_size", "batch_per_rank", "lr", "optimizer", "schedule", "clip_norm"),
        *("accumulate", "augment", "average", "straggler", "pretend_compute", "initial"),
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in self.unused:
            if getattr(self, name) != getattr(type(self), name):
                raise UsageError(
                    f"--{dashed(name)} has no meaning where single coordinates are solved for: leave it out"
                )
        if self.device != "cpu":
            raise UsageError("--device cuda: coordinate descent is for CPUs; leave it out, or take train-allreduce")
        if self.placement == "streamed" or self.data_servers:
            raise UsageError(
                "each rank goes through rows in its memory: --placement shared or partitioned, no --data-servers"
            )
        for name in ("rounds", "local_steps", "threads"):
            value = getattr(self, name)
            if not 0 < value < math.inf:
                raise UsageError(f"--{dashed(name)} must be greater than 0, not {value}")
        for name, most in MOST.items():
            if getattr(self, name) > most:
                raise UsageError(f"--{dashed(name)} is {most:,.0f} at most, not {getattr(self, name)}")
        for name in ("tolerance", "l1"):
            self._refuse_negative(name)
        if not self.weight_decay > 0:
            pure = " (with --l1, too: the dual problem is that of a little L2 beside it)" if self.l1 else ""
            raise UsageError(f"--weight-decay must be greater than 0{pure}, and is {self.weight_decay}")

    def plan(self, ranks: int, data: Any) -> tuple[int, int, int]:
        """Rounds count as steps and as epochs."""
        batch = max(1, round(self.local_steps * data.examples))
        return batch, 1, self.allowance.steps(self.rounds, batch)


def held(case: Workload, rank: int, memory: Memory) -> None:
    """The dual vector in float64; of each own example the variable, the target, the norm and the place."""
    from hpcdl.models.linear_form import linear_form

    form, own = linear_form(case.model, PROGRAM), case.share(rank, case.size, case.data.examples)
    case.hold(memory, "parameters")
    case.hold(memory, "optimizer", 1, form.outputs * (form.features + 1), 8)
    case.hold(memory, "optimizer", 1, own * (2 * form.outputs + 2), 8)


def step(case: Workload) -> StepCost:
    """The visits of a rank's examples, divided among its threads, and an all-reduce of the dual vector."""
    from hpcdl.models.linear_form import linear_form

    form, own = linear_form(case.model, PROGRAM), case.share(0, case.size, case.data.examples)
    visits = max(1, round(case.options.local_steps * own))
    calls = [Call("all_reduce", form.outputs * (form.features + 1) * 8)]
    return StepCost(case.plan[0], [(visits / case.options.threads, 1)], calls, updates=0.0)


STRATEGY = Strategy(
    PROGRAM, CoordinateOptions, train, held, step, small="--data {data} --model {model} --local-steps 0.1"
)
