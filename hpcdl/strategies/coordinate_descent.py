"""Stochastic dual coordinate ascent (SDCA) of a linear model: with threads PASSCoDe, on several ranks CoCoA and CoCoA+.

The last feature of each x_i is 1; its weight is the bias. The problem and its dual, with a variable a_i per example:

    P(w) = 1/n sum of phi_i(w x_i) + lambda/2 |w|^2 + l1 |w|_1
    D(a) = 1/n sum of -phi_i*(-a_i) - lambda/2 |w(a)|^2         v(a) = 1/(lambda n) sum of a_i x_i
                                                                 w(a)_j = sign(v_j) max(|v_j| - l1 / lambda, 0)

The duality gap P(w) - D(a) is an upper bound of P(w) - P(best). On rank k of K, which has n_k of the n examples:

    v, all a_i <- 0
    each round:
        u <- v
        for local_steps n_k of its examples i, pass after pass in random order:
            a_i <- the best value for i alone, from w(u) x_i and q = sigma' |x_i|^2 / (lambda n)
            u <- u + sigma' / (lambda n) * (the change of a_i) x_i              kernels/coordinate_descent.py
        v <- the mean of all ranks' u: one all-reduce of a value for each feature and one for the bias

    add        sigma' = K, and the changes of a_i count in full           CoCoA+
    average    sigma' = 1, and a_i moves by 1/K of its change             CoCoA

u - v is sigma' times the rank's change of v(a), so the mean of all u - v is the sum of the changes that count. With
sigma' = K, D rises by at least the sum of the gains that the ranks compute, because |w(.)|^2 is convex.

All threads write to one u. With locking atomic no addition is lost, so v stays v(a). With none some are lost, and the
run converges to the solution of a perturbed problem (PASSCoDe-Wild). The gap is valid in both cases, because each
evaluation computes v(a) anew. `drift` is the 2-norm of w - w(a), relative to that of w(a).

(SDCA: Shalev-Shwartz and Zhang, JMLR 2013; PASSCoDe: Hsieh, Yu, Dhillon, ICML 2015; CoCoA: Jaggi et al., NeurIPS 2014;
CoCoA+: Ma et al., "Adding vs. averaging in distributed primal-dual optimization", ICML 2015)"""

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from hpcdl.errors import UsageError
from hpcdl.formatting import dashed
from hpcdl.runs.options import Options, not_negative, option, positive, refuse
from hpcdl.strategies.description import Call, Communicator, Data, Memory, Optimizer, Run, StepCost, Strategy, Workload

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
    """Train on all ranks of `comm`; return the parameters, the same on each. A step of the run is a round.
    weight_decay: lambda > 0. optimizer: only counts the rounds. Other arguments as in CoordinateOptions."""
    from hpcdl.comm import refuse_together
    from hpcdl.kernels.linear import HINGE, LOGISTIC, SQUARED
    from hpcdl.models.linear_form import linear_form
    from hpcdl.parallel.dual_ascent import Ascent, Dual

    with refuse_together(comm.mpi):
        form = linear_form(model, PROGRAM, (SQUARED, LOGISTIC, HINGE))
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
        w.reshape(-1, mine.outputs)[:] = mine.weights(mine.v).T
        optimizer.step += 1
        run.record(loss, total)
        run.boundary()
    mine.close()
    run.report(rounds=run.step)
    return w


MOST = {"local_steps": 1e6, "threads": 1024}


@dataclass(frozen=True)
class CoordinateOptions(Options):
    rounds: int = option(100, "largest number of rounds; each is a step and an epoch of the run")
    tolerance: float = option(0.0, "end when an evaluation finds a duality gap of at most this; 0: after all rounds")
    local_steps: float = option(1.0, "passes of a rank over its own examples in a round; 0.1: a tenth of a pass")
    aggregate: Literal["add", "average"] = option(
        "add", "how the ranks' changes are combined: added, after smaller steps (CoCoA+), or averaged (CoCoA)"
    )
    l1: float = option(0.0, "L1 penalty per parameter, beside --weight-decay: the elastic net")
    threads: int = option(1, "threads of each rank, which update the same parameters")
    locking: Literal["atomic", "none"] = option(
        "atomic", "with several threads: atomic loses no addition; none is faster, but solves a slightly other problem"
    )
    weight_decay: float = option(0.001, "L2 penalty per parameter, lambda of the problem; greater than 0")
    model: str = option("svm", "linear, logistic or svm")
    optimizer: str = option("sgd", "has no effect: each step is the best one for its coordinate")

    unused = (
        *("epochs", "steps", "batch_size", "batch_per_rank", "lr", "optimizer", "schedule", "clip_norm"),
        *("accumulate", "augment", "average", "straggler", "pretend_compute", "initial", "class_weight"),
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self._refuse_unused(" has no effect on coordinate descent: leave it out")
        away = self.placement == "streamed" or self.data_servers
        cuda = "--device cuda: coordinate descent runs on CPUs; leave out --device, or take train-allreduce"
        refuse(
            (self.mixed, "--data mix: coordinate descent needs the rows of one data set in memory; give one"),
            (self.device != "cpu", cuda),
            (away, "a rank needs its rows in memory: take --placement shared or partitioned, without --data-servers"),
        )
        positive(self, "rounds", "local_steps", "threads")
        for name, most in MOST.items():
            if getattr(self, name) > most:
                raise UsageError(f"--{dashed(name)} is {most:,.0f} at most, not {getattr(self, name)}")
        not_negative(self, "tolerance", "l1")
        if not self.weight_decay > 0:
            pure = " (also with --l1: the dual problem needs an L2 penalty)" if self.l1 else ""
            raise UsageError(f"--weight-decay must be greater than 0{pure}, and is {self.weight_decay}")

    def plan(self, ranks: int, data: Any) -> tuple[int, int, int]:
        """Return visited examples per step, steps per epoch (1), and steps in all: a round is a step and an epoch."""
        batch = max(1, round(self.local_steps * data.examples))
        return batch, 1, self.allowance.steps(self.rounds, batch)


def held(case: Workload, rank: int, memory: Memory) -> None:
    """Add to `memory` parameters, v (float64), and dual variables, targets, norm, row number of each own example."""
    from hpcdl.models.linear_form import linear_form

    form, own = linear_form(case.model, PROGRAM), case.share(rank, case.size, case.data.examples)
    case.hold(memory, "parameters")
    case.hold(memory, "optimizer", 1, form.outputs * (form.features + 1), 8)
    case.hold(memory, "optimizer", 1, own * (2 * form.outputs + 2), 8)


def step(case: Workload) -> StepCost:
    """Return the cost of a rank's visits to its examples, divided among its threads, and of an all-reduce of v."""
    from hpcdl.models.linear_form import linear_form

    form, own = linear_form(case.model, PROGRAM), case.share(0, case.size, case.data.examples)
    visits = max(1, round(case.options.local_steps * own))
    calls = [Call("all_reduce", form.outputs * (form.features + 1) * 8)]
    return StepCost(case.plan[0], [(visits / case.options.threads, 1)], calls, updates=0.0)


STRATEGY = Strategy(
    PROGRAM, CoordinateOptions, train, held, step, small="--data {data} --model {model} --local-steps 0.1"
)
