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

import math
from collections.abc import Iterator
from typing import Any

from hpcdl.chunks import chunks
from hpcdl.comm import Communicator, refuse_together
from hpcdl.data import Batch, Data
from hpcdl.inference.chains import Chains
from hpcdl.kernels.device import Array
from hpcdl.kernels.noise import langevin
from hpcdl.optim import Optimizer
from hpcdl.random import Random
from hpcdl.runs.run import Run


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
