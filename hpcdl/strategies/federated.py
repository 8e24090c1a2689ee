"""Federated averaging: clients keep their data, train on it for a while, and a server averages what they send back.

    server: w <- initial values                            client k, with n_k examples of its own
    for round t = 0, 1, 2, ...                                 w_k <- w
        S <- max(1, C K) of the K clients at random            for E epochs, in batches of B:
        each k in S, on some rank:  w_k from w    ----->           g <- mean of grad f(w_k) + mu (w_k - w)
        d <- - sum n_k (w_k - w) / sum n_k        <-----           w_k <- w_k - lr g  (or the rule of the optimizer)
        w <- w - server_lr d  (or the server's rule)

    server = sgd with rate 1    FedAvg      the examples' weighted mean of the clients' models
             momentum           FedAvgM     d is taken for a gradient (Hsu et al., "Measuring the effects of ...", 2019)
             adam               FedAdam     (Reddi et al., "Adaptive federated optimization", ICLR 2021)
    mu > 0                      FedProx     clients stay near w (Li et al., MLSys 2020)

The clients are simulated: those of a round are dealt to the ranks by their work, the longest first. A rank holds one
model for all its clients, one after the other, so memory does not grow with K. What a rank's clients send is added up
there and all-reduced: each round costs one all-reduce of a vector of int64, as long as the model and one more.

Sums are of fixed-point numbers, so that their order does not matter: the same seed gives the same bits on any number of
ranks. n_k (w_k - w) is rounded to multiples of 2^-F, and no parameter may move by more than 2^R in a round (a run that
has diverged does). A round's sum, with what comes late from the round before, is at most 2 n 2^R for n examples in all:

    2 n 2^R 2^F <= 2^63      F = 62 - R - bits of n      each w is off by at most |S| 2^-F / (2 sum n_k)

secure: the server learns the sum of a round and nothing else of what a client sends (hpcdl/federated/secure_aggregation.py).
clip, noise: the models tell little of any one client (hpcdl/federated/privacy.py): each is asked with probability C by a coin
of its own, w_k - w is clipped to 2-norm `clip` and counts once whatever n_k, and d = - (sum + noise) / (C K).

With E = 1, B = all, every client and sgd the mean is w - lr times the full gradient: full gradient descent.

(McMahan et al., "Communication-efficient learning of deep networks from decentralized data", AISTATS 2017, Algorithm 1)
"""

import math
from typing import NamedTuple

import numpy as np
from threadpoolctl import threadpool_limits

from hpcdl.comm import agreement
from hpcdl.errors import TrainingError, UsageError
from hpcdl.kernels import fixed_point, reduce, updates
from hpcdl.kernels.norm import sum_of_squares
from hpcdl.optim import make_optimizer
from hpcdl.federated import privacy
from hpcdl.federated.clients import fate, longest_first, sample, toss

RANGE_BITS = 10  # R


def train(
    comm,
    model,
    data,
    optimizer,
    run,
    *,
    clients: int = 100,
    fraction: float = 0.1,
    local_epochs: int = 5,
    local_batch: int = 10,
    proximal: float = 0.0,
    server: str = "sgd",
    server_lr: float = 1.0,
    drop_out: float = 0.0,
    late: float = 0.0,
    rounds_to: float = 0.0,
    secure: float = 0.0,
    clip: float = 0.0,
    noise: float = 0.0,
    delta: float = 1e-5,
):
    """Train the clients on all ranks of `comm`; returns the server's parameters, the same flat vector on each.

    clients: K, among whom the partition of `data` divides the examples (0: the owners of its column). optimizer: the
    clients'; each begins with a fresh state in each round, at the rate of that round. server: the rule of the server.
    drop_out, late: probabilities that an answer never comes, or with those of the next round. rounds_to: the accuracy
    on the test part that ends the run. secure: above 0, sums are secure, and come about when more than this part of a
    round's clients answers. clip, noise: the norm that updates are clipped to, and the deviation of the noise in such
    norms; the run's epsilon is that at `delta`.
    """
    size, dtype, device, random = model.layout.size, model.layout.dtype, comm.device, run.random
    with agreement(comm.mpi):
        rows = data.divide(clients)
        rule = make_optimizer(server, size, dtype, lambda step: server_lr, device=device)
        if rounds_to and not (data.classes and data.test):
            raise UsageError("--rounds-to is an accuracy on a test part with classes, which these data have not")
        having = [client for client, own in enumerate(rows) if len(own)]
        count = max(1, round(fraction * len(rows)))
        if secure:
            from hpcdl.federated.secure_aggregation import SecureAggregator  # which needs a package more

            if min(fraction * len(rows) if clip else count, len(having)) < 2:
                raise UsageError("--secure hides a client among the others of its round; have 2 at least (--fraction)")

    w = run.initial(model)
    local, gradient, update = device.empty(size, dtype), device.empty(size, dtype), device.empty(size + 1, np.int64)
    punctual = SecureAggregator(comm, size + 1, secure) if secure else Sum(comm, size + 1)
    tardy = Sum(comm, size + 1) if late else None
    pending = device.zeros(size + 1 if late else 0, np.int64)
    one = 2.0 ** fraction_bits(data.examples)
    if late:
        run.track("pending", pending)
    if secure:
        run.track("rounds_abandoned", punctual.abandoned)
    if noise:
        spent, each_round = np.zeros(len(privacy.ORDERS)), privacy.divergences(noise, fraction)
        run.track("privacy_spent", spent)
    run.goal = rounds_to
    run.extra |= {"clients": len(rows), "clients_per_round": min(count, len(having))}
    run.extra["partition"] = run.options.partition
    run.begin("federated", model, w, rule, data, fixed=("clients", "partition"))

    def draw(turn: int) -> list[int]:
        """The clients of a round: so many, or each by a coin of its own, where privacy is counted by that."""
        if not clip:
            return sample(random, turn, having, count)
        return [client for client in toss(random, turn, range(len(rows)), fraction) if len(rows[client])]

    def client_update(client: int, turn: int) -> float:
        """local <- the client's model, from w on, by its own examples; returns the sum of its losses."""
        own, loss, rate = rows[client], 0.0, optimizer.schedule(turn)
        local[:] = w
        optimizer.step = 0
        for vector in optimizer.state.values():
            vector[:] = 0
        for epoch in range(local_epochs):
            order = own[random("local order", client, turn, epoch).permutation(len(own))]
            for batch in data.visit(order, local_batch or len(own)):
                loss += run.backward(local, batch, gradient)
                if proximal:
                    updates.proximal(gradient, local, w, proximal * batch.total)
                optimizer.update(local, gradient, scale=1 / batch.total, rate=rate)
        return loss

    def send(client: int) -> bool:
        """update <- n_k (w_k - w) and n_k in fixed point; False where that is too far away."""
        reduce.add_scaled(local, w, -1.0)
        weight = len(rows[client])
        if clip:
            privacy.clip(local, clip)
            weight = 1
        fits = math.sqrt(sum_of_squares(local)) < 2.0**RANGE_BITS
        if fits:
            fixed_point.encode(local, weight * one, update[:size])
            update[size] = weight
        return fits

    def refuse(far: int) -> None:
        """End the run, on all ranks, where client far - 1 of any has gone too far for fixed point; 0: none of mine."""
        farthest = np.array([far])
        run.own.all_reduce(farthest, op="max")
        if farthest[0]:
            raise TrainingError(
                f"client {farthest[0] - 1} moved by {2**RANGE_BITS} or more, or to what is no number, in round "
                f"{run.step + 1}; a smaller --lr may help"
            )

    def receive(total) -> None:
        """w <- a step of the server by the sum over those who have answered; none at all where nobody has."""
        weight = fraction * len(rows) if clip else int(total[size])
        if weight:
            fixed_point.decode(gradient, -1 / one, total[:size])
            if noise:
                privacy.add_noise(gradient, noise * clip, random("noise", run.step))
                spent[:] += each_round
            rule.update(w, gradient, scale=1 / weight)

    # Compile, or load from the cache, before any clock runs.
    local[:] = w
    send(having[0])
    reduce.add_into(update, update)
    fixed_point.decode(gradient, 0.0, update[:size])
    updates.proximal(gradient, local, w, 0.0)
    reduce.scale(local, 1.0)
    run.start()
    with threadpool_limits(1):  # the ranks are the parallelism; and sums in one order, whatever the number of ranks
        while not run.over:
            with run.timed():
                turn, loss, far = run.step, 0.0, 0
                sampled = draw(turn)
                work = {client: local_epochs * len(rows[client]) for client in sampled}
                dealt = longest_first(work, comm.size)
                for each in filter(None, (punctual, tardy)):
                    each.begin(dealt)
                for client in dealt[comm.rank]:
                    loss += client_update(client, turn)
                    what = fate(random, turn, client, drop_out, late)
                    if what != "dropped":
                        far = far if send(client) else client + 1
                        (tardy if what == "late" else punctual).add(client, update)
                refuse(far)
                total = punctual.finish()
                if late:
                    reduce.add_into(total, pending)
                    pending[:] = tardy.finish()
                receive(total)
                run.record(loss, Round(sum(work.values())))
                run.boundary()
    run.end()
    run.extra["rounds"] = run.step
    if secure:
        run.extra["rounds_abandoned"] = int(punctual.abandoned[0])
    if clip:
        epsilon = privacy.epsilon(spent, delta) if noise else None
        run.extra |= {"clip": clip, "noise": noise, "epsilon": epsilon, "delta": delta}
    if rounds_to:
        run.extra["rounds_to_accuracy"] = run.step if run.stopped == "accuracy" else None
    return w


def fraction_bits(examples: int) -> int:
    """F: how many bits of a fixed-point number stand behind the point."""
    return 62 - RANGE_BITS - examples.bit_length()


class Round(NamedTuple):
    """A round, as `run.record` knows it: `total` examples were processed."""

    total: int


class Sum:
    """The plain aggregator: the sum, modulo 2^64, of what the clients of all ranks send in a round."""

    def __init__(self, comm, size: int):
        self.comm, self.total = comm, comm.empty(size, np.int64)

    def begin(self, dealt: list[list[int]]) -> None:
        """A round begins, with the clients dealt[r] on rank r."""
        self.total[:] = 0

    def add(self, client: int, update) -> None:
        """A client of this rank has answered; what it sends may be overwritten."""
        reduce.add_into(self.total, update)

    def finish(self):
        """The sum over all ranks, the same bits on each; collective."""
        self.comm.all_reduce(self.total)
        return self.total
