"""SGLD, stochastic gradient Langevin dynamics: SGD with added noise, so that its iterates are samples of a posterior.

    on each chain c, of C:
        w <- initial values of its own
        for t = 0, 1, 2, ...
            on each rank of the chain, its share B_r of the minibatch B of b of the n examples:
                g_r <- sum over i in B_r of grad -log p(y_i | x_i, w)
            g <- all-reduce sum of the g_r
            w <- w - rate_t / 2 * (n / b * g + precision * w) + N(0, rate_t)      the same on all ranks of the chain
            after every thin-th step beyond burn_in: w is a sample, of weight rate_t

The prior is normal, with mean 0 and this precision. -log p is the loss of a classifier; for a regression it is the
squared loss divided by the noise variance, but for a constant. As the rate falls, the gradient's own noise, of order
rate^2, vanishes beside the added noise, of order rate. A constant rate leaves a bias.

The noise is a function of (seed, chain, step, coordinate) (kernels/noise.py): the same on any number of ranks, without
a state to keep. Each step costs one all-reduce within a chain; chains exchange nothing.

(Welling and Teh, "Bayesian learning via stochastic gradient Langevin dynamics", ICML 2011)"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from hpcdl.chunks import chunks
from hpcdl.kernels.device import Array
from hpcdl.random import Random
from hpcdl.runs.options import Options, not_negative, of_training, option, positive, refuse
from hpcdl.strategies.description import Call, Communicator, Data, Memory, Optimizer, Run, StepCost, Strategy, Workload


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
    """Draw samples on all ranks of `comm`, divided among the chains; return the iterate of this rank's chain. The run
    scores and saves the samples' mean. burn_in, thin: steps; if 0, 5 epochs and 1 epoch. optimizer: gives the rate."""
    from hpcdl.comm import refuse_together
    from hpcdl.inference.chains import Chains
    from hpcdl.kernels.noise import langevin

    per_epoch, steps = run.plan(data)[1:]
    burn_in, thin = burn_in or 5 * per_epoch, thin or per_epoch
    number = next(c for c, part in enumerate(chunks(comm.size, chains)) if part.start <= comm.rank < part.stop)
    options: Any = run.options
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
    held.restore(run.step, options.resume)
    batches = run.batches(OwnOrder(data, number, chains), share=(group.rank, group.size))
    for step, batch in enumerate(batches, run.step):
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
    """Return the source of a chain's initial values; chain 0 has those of any other strategy with this seed."""
    return Random(seed if chain == 0 else int(Random(seed)("chain", chain).integers(2**62)))


def noise_key(seed: int, chain: int) -> tuple[int, int]:
    """Return the key of a chain's noise, two words of 32 bits."""
    first, second = Random(seed)("noise", chain).integers(2**32, size=2)
    return int(first), int(second)


class OwnOrder:
    """The data in a chain's own order: of C chains, chain c takes epochs c, C + c, 2 C + c, ..."""

    def __init__(self, data: Any, chain: int, chains: int):
        self.data, self.chain, self.chains = data, chain, chains

    def batches(self, epoch: int, batch_size: int, share: tuple[int, int], start: int) -> Iterator[Any]:
        return self.data.batches(epoch * self.chains + self.chain, batch_size, share, start)


@dataclass(frozen=True)
class SgldOptions(Options):
    prior_precision: float = option(1.0, "precision of the normal prior of each parameter, 1 / its variance; 0: flat")
    noise_variance: float = option(1.0, "for a regression: variance of the values around the model's predictions")
    burn_in: int = option(0, "steps before the first sample can be taken; 0: five epochs")
    thin: int = option(0, "steps from a sample to the next; 0: an epoch. A chain keeps 1000 samples at most")
    chains: int = option(1, "independent chains, each on its part of the ranks")
    lr: float = of_training(
        1e-4, "step size: half of it multiplies the gradient of the log posterior, and it is the variance of the noise"
    )
    optimizer: str = of_training("sgd", "only sgd: Langevin dynamics takes plain gradient steps")
    schedule: str = of_training(
        "constant", "of the step size: constant, or polynomial:b=1,gamma=0.55, which is lr (b + step)^-gamma, ..."
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        not_negative(self, "prior_precision", "burn_in", "thin")
        positive(self, "noise_variance")
        some = self.data_servers or self.placement == "partitioned" or self.partition != "iid"  # rows, for some chains
        plain = f"--optimizer {self.optimizer}: Langevin dynamics takes plain gradient steps; take sgd"
        apart = "--chains read all rows: --placement shared or streamed, --partition iid, no --data-servers"
        refuse(
            (self.chains < 1, f"--chains must be 1 or more, not {self.chains}"),
            (self.optimizer != "sgd", plain),
            (self.weight_decay, "--weight-decay D: give a prior instead, --prior-precision of D times the examples"),
            (self.average, "--average: SGLD scores and saves the mean of its samples anyway; leave it out"),
            (self.clip_norm, "--clip-norm: clipped gradients lead to another posterior; take a smaller --lr instead"),
            (self.augment, "--augment: the posterior is that of unchanged examples; leave it out"),
            (self.chains > 1 and some, apart),
        )

    def global_batch(self, ranks: int, examples: int) -> int:
        """Return the examples per update of a chain."""
        return super().global_batch(max(1, ranks // self.chains), examples)


def check(options: SgldOptions, ranks: int, model: Any) -> None:
    from hpcdl.models.losses import Hinge, Huber
    from hpcdl.models.model import layers_of

    loss = (layers_of(model) or [None])[-1]
    classes = loss is not None and loss.target.kind != "f"
    refuse(
        (options.chains > ranks, f"--chains {options.chains}: each chain needs a rank, and there are only {ranks}"),
        (isinstance(loss, Hinge), "the hinge loss is no log-likelihood: take --model logistic"),
        (isinstance(loss, Huber), "SGLD needs a normal likelihood, which the huber loss is not: take --loss squared"),
        (options.noise_variance != 1 and classes, "--noise-variance is for regression, not for classes: leave it out"),
    )


def chain_of(case: Workload, rank: int) -> tuple[int, int]:
    """Return the rank's number in its chain, and the number of the chain's ranks."""
    own = next(part for part in chunks(case.size, case.options.chains) if part.start <= rank < part.stop)
    return rank - own.start, own.stop - own.start


def held(case: Workload, rank: int, memory: Memory) -> None:
    """Add to `memory` what a step on the rank's share of its chain's batch holds, and the mean of the samples."""
    case.hold_step(memory, case.share(*chain_of(case, rank)), parameters=2)


def step(case: Workload) -> StepCost:
    """Return the cost of the gradient of a rank's share, and of an all-reduce of K values within a chain."""
    most = chain_of(case, case.size - 1)[1]  # the last chain has the fewest ranks, and the largest shares
    rows, first = case.share(0, most), chain_of(case, 0)[1]
    calls = [Call("all_reduce", case.bytes, ranks=first)]
    return StepCost(case.batch * case.options.chains, [(rows, 1)], calls, drawn=rows)


STRATEGY = Strategy("train-sgld", SgldOptions, train, held, step, check=check)
