"""SGLD, stochastic gradient Langevin dynamics: SGD whose noise makes of its iterates samples of a posterior.

    on each chain c, of C:
        w <- initial values of its own
        for t = 0, 1, 2, ...
            on each rank of the chain, its share B_r of the minibatch B of b of the n examples:
                g_r <- sum over i in B_r of grad -log p(y_i | x_i, w)
            g <- all-reduce sum of the g_r
            w <- w - rate_t / 2 * (n / b * g + precision * w) + N(0, rate_t)      the same on all ranks of the chain
            after every thin-th step beyond burn_in: w is a sample, of weight rate_t

The prior is normal, of mean 0 and this precision. -log p is the loss of a classifier; of a regression with squared loss
it is the loss divided by the variance of the noise, but for a constant. As the rate falls the gradient's own noise,
of order rate^2, vanishes beside the added one, of order rate, and the samples come from the posterior; at a constant
rate it, and the length of steps, leave a bias. (Welling and Teh, "Bayesian learning via stochastic gradient Langevin
dynamics", ICML 2011)

The noise is that of (seed, chain, step, coordinate), from a counter (kernels/noise.py): whoever computes it, and on
however many ranks, it is the same, and no random state is kept. Each step costs one all-reduce within a chain; chains
exchange nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hpcdl.chunks import chunks
from hpcdl.errors import UsageError
from hpcdl.kernels.device import Array
from hpcdl.random import Random
from hpcdl.runs.options import Options, option
from hpcdl.strategies.description import Call, StepCost, Strategy

if TYPE_CHECKING:
    from hpcdl.comm import Communicator
    from hpcdl.data import Batch, Data
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
    prior_precision: float = 1.0,
    noise_variance: float = 1.0,
    burn_in: int = 0,
    thin: int = 0,
    chains: int = 1,
) -> Array:
    """Draw samples on all ranks of `comm`, divided among the chains; returns the iterate of this rank's chain.

    The run scores and saves the mean of all samples. burn_in, thin: in steps; 0: of five epochs, of one. The rate is
    that of the optimizer's schedule, and the rest of the optimizer is not used.
    """
    from hpcdl.comm import refuse_together
    from hpcdl.inference.chains import Chains
    from hpcdl.kernels.noise import langevin

    per_epoch, steps = run.plan(data)[1:]
    burn_in, thin = burn_in or 5 * per_epoch, thin or per_epoch
    number = next(c for c, part in enumerate(chunks(comm.size, chains)) if part.start <= comm.rank < part.stop)
    options = run.options
    seed = options.seed
    group = comm if chains == 1 else run.until_end(comm.split(number, name="chain"))
    w, key = group.empty(model.layout.size, model.layout.dtype), noise_key(seed, number)
    if group.rank == 0:
        w[:] = model.initialize(initial_random(seed, number))
    group.broadcast(w)
    gradient = group.empty(like=w)
    gradient[:] = 0
    langevin(gradient, gradient, 0.0, 0.0, 0.0, 0.0, 0, 0, *key)  # compiled before any clock runs
    held = Chains(model, w, optimizer, comm.size, number, chains, burn_in, thin)
    with refuse_together(comm.mpi):
        held.refuse_too_many(steps)
    run.report(chains=chains, burn_in=burn_in, thin=thin)
    run.report(prior_precision=prior_precision, noise_variance=noise_variance)
    fixed = "chains", "burn_in", "thin", "prior_precision", "noise_variance"
    run.begin("sgld", held, data, fixed)
    first = run.step
    held.restore(first, options.resume)
    batches = run.batches(OwnOrder(data, number, chains), share=(group.rank, group.size))
    for step, batch in enumerate(batches, first):
        gradient[:] = 0
        loss = model.loss_and_gradient(w, batch, gradient)
        group.all_reduce(gradient)
        rate = optimizer.schedule(optimizer.step)
        scale = data.examples / (batch.total * noise_variance)
        langevin(w, gradient, rate / 2, scale, prior_precision, math.sqrt(rate), 0, step, *key)
        optimizer.step += 1
        held.take(step + 1, rate)
        run.record(loss, batch.total * chains)
        run.boundary()
    run.report(samples=len(held.steps) * chains)
    return w


def initial_random(seed: int, chain: int) -> Random:
    """From which a chain has its initial values: the first those of the run's seed, as in any other strategy."""
    return Random(seed if chain == 0 else int(Random(seed)("chain", chain).integers(2**62)))


def noise_key(seed: int, chain: int) -> tuple[int, int]:
    """The two words that key a chain's noise."""
    first, second = Random(seed)("noise", chain).integers(2**32, size=2)
    return int(first), int(second)


class OwnOrder:
    """The data in an order that a chain has by itself: of C chains, chain c takes epochs c, C + c, 2 C + c, ..."""

    def __init__(self, data: Any, chain: int, chains: int):
        self.data, self.chain, self.chains = data, chain, chains

    def batches(self, epoch: int, batch_size: int, share: tuple[int, int], start: int) -> Iterator[Batch]:
        """As those of the data."""
        return self.data.batches(epoch * self.chains + self.chain, batch_size, share, start)


@dataclass(frozen=True)
class SgldOptions(Options):
    prior_precision: float = option(1.0, "precision of the normal prior of each parameter, 1 / its variance; 0: flat")
    noise_variance: float = option(1.0, "of a regression, variance of the values around what the model says")
    burn_in: int = option(0, "steps before the first sample can be taken; 0: five epochs")
    thin: int = option(0, "steps from a sample to the next; 0: an epoch. A chain keeps 1000 samples at most")
    chains: int = option(1, "chains that draw by themselves, each on its part of the ranks")
    lr: float = option(
        1e-4,
        "step size: a step goes half of it along the gradient of the log posterior, and the noise has it as variance",
        group="optimization",
    )
    optimizer: str = option("sgd", "sgd: a step of Langevin dynamics is a plain one", group="optimization")
    schedule: str = option(
        "constant",
        "of the step size: constant, or polynomial:b=1,gamma=0.55, which is lr (b + step)^-gamma, ...",
        group="optimization",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("prior_precision", "burn_in", "thin"):
            self._refuse_negative(name)
        if not 0 < self.noise_variance < math.inf:
            raise UsageError(f"--noise-variance must be greater than 0, not {self.noise_variance}")
        if self.chains < 1:
            raise UsageError(f"--chains must be 1 or more, not {self.chains}")
        if self.optimizer != "sgd":
            raise UsageError(f"--optimizer {self.optimizer}: a step of Langevin dynamics is a plain one; take sgd")
        if self.weight_decay:
            raise UsageError("--weight-decay: the prior is --prior-precision, of D times the examples for a decay D")
        if self.average:
            raise UsageError("--average: the mean of the samples is what is scored and saved anyway; leave it out")
        if self.clip_norm:
            raise UsageError("--clip-norm: clipped gradients are those of another posterior; take a smaller --lr")
        if self.augment:
            raise UsageError("--augment: examples that change are more than there are; the posterior is of those")
        if self.chains > 1 and (self.data_servers or self.placement == "partitioned" or self.partition != "iid"):
            raise UsageError("--chains read all rows, each in an order of its own: --placement shared or streamed, iid")

    def global_batch(self, ranks: int, examples: int) -> int:
        """Examples per update of a chain."""
        return super().global_batch(max(1, ranks // self.chains), examples)


def check(options: SgldOptions, ranks: int, model: Any) -> None:
    from hpcdl.models.losses import Hinge, Huber
    from hpcdl.models.model import layers_of

    if options.chains > ranks:
        raise UsageError(f"--chains {options.chains}: each has a rank at least, and there are {ranks}")
    loss = (layers_of(model) or [None])[-1]
    if isinstance(loss, Hinge):
        raise UsageError("the hinge loss is no log-likelihood: take --model logistic")
    if isinstance(loss, Huber):
        raise UsageError("the likelihood is a normal one: take --loss squared")
    if options.noise_variance != 1 and loss is not None and loss.target.kind != "f":
        raise UsageError("--noise-variance is of a regression; classes have none")


def chain_of(case: Workload, rank: int) -> tuple[int, int]:
    """The rank's number in its chain, and the chain's ranks."""
    own = next(part for part in chunks(case.size, case.options.chains) if part.start <= rank < part.stop)
    return rank - own.start, own.stop - own.start


def held(case: Workload, rank: int, memory: Memory) -> None:
    """The iterate of the rank's chain, and the mean of the samples."""
    case.hold_step(memory, case.share(*chain_of(case, rank)), parameters=2)


def step(case: Workload) -> StepCost:
    """A gradient of the share, and an all-reduce of K values within the chain; chains exchange nothing."""
    most = chain_of(case, case.size - 1)[1]  # the last chain has the fewest ranks, and the largest shares
    rows, first = case.share(0, most), chain_of(case, 0)[1]
    calls = [Call("all_reduce", case.bytes, ranks=first)]
    return StepCost(case.batch * case.options.chains, [(rows, 1)], calls, drawn=rows)


STRATEGY = Strategy("train-sgld", SgldOptions, train, held, step, check=check)
