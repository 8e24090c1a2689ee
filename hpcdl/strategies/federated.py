"""Federated averaging: clients keep their data, train on it for a while, and a server averages what they send back.

    server: w <- initial values                            client k, with n_k examples of its own
    for round t = 0, 1, 2, ...                                 w_k <- w
        S <- max(1, C K) of the K clients at random            for E epochs, in batches of B:
        each k in S, on some rank:  w_k from w    ----->           g <- mean of grad f(w_k) + mu (w_k - w)
        d <- - sum n_k (w_k - w) / sum n_k        <-----           w_k <- w_k - lr g  (or the rule of the optimizer)
        w <- w - server_lr d  (or the server's rule)

    who is asked, who answers     hpcdl/federated/clients.py      secure sums                secure_aggregation.py
    a client's update             client.py                       weights and divisors       averaging.py
    what it sends, fixed point    codec.py                        noise, and what it buys    privacy.py
    sums over clients and ranks   aggregators.py                  the server's rule          server.py

    server = sgd with rate 1                FedAvg      the examples' weighted mean of the clients' models
             momentum                       FedAvgM     d is taken for a gradient (Hsu et al., 2019)
             fedadam, fedyogi, fedadagrad   by the same names (Reddi et al., ICLR 2021)
    mu > 0                                  FedProx     clients stay near w (Li et al., MLSys 2020)

The clients are simulated: those of a round are dealt to the ranks by their work, the longest first. A rank holds one
model for all its clients, one after the other, so memory does not grow with K. What a rank's clients send is added up
there and all-reduced: each round costs one all-reduce of a vector of int64, as long as the model and one more.

Sums are of fixed-point numbers, so that their order does not matter: the same seed gives the same bits on any number of
ranks. A parameter may move by less than 2^10 in a round.

secure: the server learns the sum of a round and nothing else of what a client sends. clip, noise: the models tell
little of any one client: each is asked with probability C by a coin of its own, w_k - w is clipped to 2-norm `clip` and
counts once whatever n_k, and d = - (sum + noise) / (C K).

With E = 1, B = all, every client and sgd the mean is w - lr times the full gradient: full gradient descent.

(McMahan et al., "Communication-efficient learning of deep networks from decentralized data", AISTATS 2017, Algorithm 1)
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from threadpoolctl import threadpool_limits

from hpcdl.errors import UsageError
from hpcdl.federated.clients import deal, fate
from hpcdl.recovery.options import SurvivingOptions
from hpcdl.runs.options import Options, option
from hpcdl.strategies.description import Call, StepCost, Strategy

if TYPE_CHECKING:
    from hpcdl.comm import Communicator
    from hpcdl.data import Data
    from hpcdl.federated.aggregators import Aggregator
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
    *,
    clients: int = 100,
    fraction: float = 0.1,
    local_epochs: int = 5,
    local_batch: int = 10,
    proximal: float = 0.0,
    server: str = "sgd",
    server_lr: float = 0.0,
    drop_out: float = 0.0,
    late: float = 0.0,
    rounds_to: float = 0.0,
    secure: float = 0.0,
    clip: float = 0.0,
    noise: float = 0.0,
    delta: float = 1e-5,
) -> np.ndarray:
    """Train the clients on all ranks of `comm`; returns the server's parameters, the same flat vector on each.

    clients: K, among whom the partition of `data` divides the examples (0: the owners of its column). optimizer: the
    clients'; each begins with a fresh state in each round, at the rate of that round. server, server_lr: the rule of
    the server (hpcdl/federated/server.py) and its rate, 0: the rule's own. drop_out, late: probabilities that an answer
    never comes, or with those of the next round. rounds_to: the accuracy on the test part that ends the run. secure:
    above 0, sums are secure, and come about when more than this part of a round's clients answers. clip, noise: the
    norm that updates are clipped to, and the deviation of the noise in such norms; delta: that of the run's epsilon.
    """
    from hpcdl.comm import refuse_together
    from hpcdl.federated.aggregators import LateSum, SumAggregator
    from hpcdl.federated.averaging import PrivateAverage, WeightedAverage
    from hpcdl.federated.client import ClientUpdate
    from hpcdl.federated.codec import Codec
    from hpcdl.federated.server import make_rule
    from hpcdl.optim.optimizer import AVERAGE
    from hpcdl.runs.ownership import Whole

    size, dtype, random = model.layout.size, model.layout.dtype, run.random
    gradient = comm.device.empty(size, dtype)
    with refuse_together(comm.mpi):
        rows = data.divide(clients)
        rule = make_rule(server, size, dtype, server_lr, comm.device, optimizer.average_from)
        optimizer.average_from = None  # the server averages, not its clients
        optimizer.state.pop(AVERAGE, None)
        if rounds_to and not (data.classes and data.test):
            raise UsageError("--rounds-to is an accuracy on a test part with classes, which these data have not")
        averaging = WeightedAverage(random, rows, fraction)
        if clip:
            averaging = PrivateAverage(random, rows, fraction, gradient, clip, noise, delta)
        if secure:
            from hpcdl.federated.secure_aggregation import SecureAggregator  # which needs a package more

            if min(averaging.expected, len(averaging.having_rows)) < 2:
                raise UsageError("--secure hides a client among the others of its round; have 2 at least (--fraction)")

    w = run.initial(model)
    client_update = ClientUpdate(model, data, rows, optimizer, random, gradient, local_epochs, local_batch, proximal)
    for kind, vector in client_update.held:
        run.memory.hold(kind, vector)
    codec = Codec(gradient, data.examples)
    aggregator: Aggregator = (
        SecureAggregator(comm, codec.length, secure) if secure else SumAggregator(comm, codec.length)
    )
    late_sum: Any = LateSum(comm, codec.length) if late else None
    parts: tuple[Any, ...] = late_sum, aggregator, averaging
    for part in filter(None, parts):
        for name, tracked in part.tracked().items():
            run.track(name, tracked)
    run.report(clients=len(rows), clients_per_round=averaging.clients, partition=run.options.partition)
    held, fixed = Whole(model, w, rule), ("clients", "partition")
    clients_rate = optimizer.schedule
    run.begin("federated", held, data, fixed, clients_rate, goal=rounds_to)
    with threadpool_limits(1):  # the ranks are the parallelism; and sums in one order, whatever the number of ranks
        for turn in run.rounds():
            loss, work = 0.0, {client: client_update.work(client) for client in averaging.ask(turn)}
            dealt = deal(work, comm.size)
            aggregator.begin(dealt)
            if late_sum:
                late_sum.begin(dealt)
            for client in dealt[comm.rank]:
                change, client_loss = client_update(client, turn, w)
                loss += client_loss
                answer = fate(random, turn, client, drop_out, late)
                if answer != "dropped":
                    message = codec.encode(client, change, averaging.weigh(client, change))
                    (late_sum if answer == "late" else aggregator).add(client, message)
            codec.refuse_far_changes(held.peers, turn)
            run.share(loss)
            total = aggregator.finish()
            if late_sum:
                late_sum.add_pending_to(total)
            weight = averaging.finish(gradient, codec.decode(total, gradient), turn)
            if weight:
                rule.update(w, gradient, scale=1 / weight)
            run.record(loss, sum(work.values()))
            run.boundary()
    done = run.progress
    run.report(rounds=done.step, **aggregator.report(), **averaging.report())
    if rounds_to:
        run.report(rounds_to_accuracy=done.step if done.stopped == "accuracy" else None)
    return w


@dataclass(frozen=True)
class FederatedOptions(SurvivingOptions):
    clients: int = option(100, "among how many clients --partition divides the rows; 0: as many as column:NAME names")
    fraction: float = option(0.1, "fraction of the clients that is asked in a round, greater than 0")
    rounds: int = option(100, "how many rounds; the run counts them as its steps and its epochs")
    rounds_to: float = option(0.0, "end when the test accuracy has reached this, as 0.85, and report the rounds; 0: no")
    local_epochs: int = option(5, "passes of a client over its own rows in a round")
    local_batch: int = option(10, "examples per update of a client; 0: all of its rows")
    proximal: float = option(0.0, "FedProx: weight of the penalty on a client's distance from the server's model")
    server_optimizer: str = option(
        "sgd",
        "rule of the server: sgd is FedAvg, momentum FedAvgM; fedadam, fedyogi, fedadagrad; or another --optimizer",
    )
    server_lr: float = option(
        0.0, "learning rate of the server; 0: 0.01 for fedadam and fedyogi, 0.1 for fedadagrad, 1 for any other rule"
    )
    drop_out: float = option(0.0, "probability that a client, having worked, never answers")
    late: float = option(0.0, "probability that an answer comes one round late, and is added to that round's")
    secure: bool = option(False, "secure aggregation: the server learns sums, and not what a client sends")
    threshold: float = option(0.5, "with --secure, a round counts when more than this part of its clients answers")
    clip: float = option(
        0.0, "private averaging: largest 2-norm of what a client changes in a round; 0: weight by rows"
    )
    noise: float = option(0.0, "private averaging: deviation of the noise on a round's sum, in units of --clip")
    delta: float = option(1e-5, "private averaging: delta, for which the run's epsilon is computed")
    lr: float = option(0.1, "learning rate (step size) of the clients; its schedule counts rounds")
    optimizer: str = option("sgd", "rule of the clients, with a fresh state in each round: sgd, momentum, adam, ...")
    schedule: str = option("constant", "of the clients' rate over the rounds: constant, step, cosine, 1/t, ...")

    unused = ("epochs", "steps", "batch_size", "batch_per_rank")

    def __post_init__(self) -> None:
        super().__post_init__()
        plain = Options()
        for name in self.unused:
            if getattr(self, name) != getattr(plain, name):
                raise UsageError(
                    f"--{name.replace('_', '-')}: clients count --rounds, --local-epochs and --local-batch instead"
                )
        if self.placement != "shared" or self.data_servers or self.augment:
            raise UsageError("clients read the rows of --placement shared, without --data-servers and --augment")
        if not 0 < self.fraction <= 1:
            raise UsageError(f"--fraction is greater than 0 and at most 1, not {self.fraction}")
        for name in ("drop_out", "late"):
            if not 0 <= getattr(self, name) < 1:
                raise UsageError(f"--{name.replace('_', '-')} is at least 0 and less than 1, not {getattr(self, name)}")
        for name in ("rounds", "local_epochs"):
            if not 0 < getattr(self, name) < math.inf:
                raise UsageError(f"--{name.replace('_', '-')} must be greater than 0, not {getattr(self, name)}")
        for name in ("clients", "local_batch", "proximal", "server_lr"):
            self._refuse_negative(name)
        if self.clients == 0 and not self.partition.startswith("column:"):
            raise UsageError("--clients 0 takes the owners of --partition column:NAME; give a number of clients")
        if not 0 <= self.rounds_to <= 1:
            raise UsageError(f"--rounds-to is an accuracy from 0 to 1, not {self.rounds_to}")
        self._check_privacy()

    def plan(self, ranks: int, data: Any) -> tuple[int, int, int]:
        """Rounds count as steps and as epochs; the updates are the clients'."""
        batch = min(self.local_batch or data.examples, data.examples)
        self.refuse_more_parts("accumulate", batch)
        return batch, 1, self.rounds

    def _check_privacy(self) -> None:
        from hpcdl.federated.codec import RANGE_BITS

        if not 0.5 <= self.threshold <= 1:
            raise UsageError(f"--threshold is at least 0.5 and at most 1, not {self.threshold}")
        if not 0 <= self.clip < 2**RANGE_BITS:
            raise UsageError(f"--clip is a norm from 0 to less than {2**RANGE_BITS}, not {self.clip}")
        self._refuse_negative("noise")
        if self.noise and not self.clip:
            raise UsageError("--noise is in units of --clip: give --clip NORM, too")
        if not 0 < self.delta < 1:
            raise UsageError(f"--delta is greater than 0 and less than 1, not {self.delta}")
        if self.late and (self.secure or self.clip):
            option = "--secure" if self.secure else "--clip"
            raise UsageError(f"--late: with {option} an answer that comes late is lost; use --drop-out")

    @property
    def secure_threshold(self) -> float:
        """Above 0: sums are secure, and come about when more than this part of a round's clients answers."""
        return self.secure and self.threshold


RENAMED = {"server": "server_optimizer", "secure": "secure_threshold"}


def chosen(case: Workload) -> tuple[int, int]:
    """How many clients a round asks, and the rows of each, of an even partition."""
    options, examples = case.options, case.data.examples
    clients = options.clients or examples  # 0: the owners of a column, which is not read
    return max(1, round(options.fraction * clients)), -(-examples // min(clients, examples))


def held(case: Workload, rank: int, memory: Memory) -> None:
    """The server's parameters and rule, a client's parameters and rule; what comes late, as 64-bit integers."""
    from hpcdl.federated.server import vectors_of as server_vectors
    from hpcdl.optim import vectors_of

    options, (clients, rows) = case.options, chosen(case)
    server, theirs = len(server_vectors(options.server_optimizer)), len(vectors_of(options.optimizer))
    case.hold_state(memory, 2, server + theirs + bool(options.average))
    if rank < clients:  # divided among the ranks: the last may have none
        case.hold_activations(memory, min(options.local_batch or rows, rows))
    if options.late:
        case.hold(memory, "optimizer", 1, case.length + 1, 8)


def step(case: Workload) -> StepCost:
    """The epochs of the rank's clients, one after the other, and an all-reduce of K + 1 integers; late ones by another.

    What --secure sends beside its sums is not counted.
    """
    options, (clients, rows) = case.options, chosen(case)
    batch = min(options.local_batch or rows, rows)
    times = -(-clients // case.size) * options.local_epochs * -(-rows // batch)
    calls = [Call("all_reduce", 8 * (case.length + 1), 1 + bool(options.late))]
    drawn = -(-clients // case.size) * options.local_epochs * rows
    return StepCost(clients * options.local_epochs * rows, [(batch, times)], calls, times + 1, drawn)


STRATEGY = Strategy(
    "train-federated",
    FederatedOptions,
    train,
    held,
    step,
    renamed=RENAMED,
    small="--model mlp:32 --clients 100 --fraction 0.04 --local-epochs 1",
)
