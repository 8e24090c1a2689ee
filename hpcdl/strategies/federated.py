"""Federated averaging: clients keep their data and train on it for a while; a server averages their changes.

    server: w <- initial values                            client k, with n_k examples of its own
    for round t = 0, 1, 2, ...                                 w_k <- w
        S <- max(1, C K) of the K clients at random            for E epochs, in batches of B:
        each k in S, on some rank:  w_k from w    ----->           g <- mean of grad f(w_k) + mu (w_k - w)
        d <- - sum n_k (w_k - w) / sum n_k        <-----           w_k <- w_k - lr g  (or the rule of the optimizer)
        w <- w - server_lr d  (or the server's rule)

    server = sgd with rate 1                FedAvg      the mean of the clients' models, weighted by their examples
             momentum                       FedAvgM     d is used as a gradient (Hsu et al., 2019)
             fedadam, fedyogi, fedadagrad   rules of these names (Reddi et al., ICLR 2021; hpcdl/federated/server.py)
    mu > 0                                  FedProx     clients stay near w (Li et al., MLSys 2020)

The simulated clients of a round are dealt to the ranks by their work, the longest first. A rank holds one model for all
its clients, so memory does not grow with K. A round costs an all-reduce of int64 values, one more than parameters.
Sums are of fixed-point numbers (codec.py): the same seed gives the same bits on any number of ranks.

secure: the server learns the sum of a round, and nothing else of what a client sends (secure_aggregation.py).
compress: clients send compressed changes, and keep nothing of what these leave out (compressed_answers.py).
clip, noise: the models reveal little of any one client (privacy.py). Each client takes part with probability C,
independently; w_k - w is clipped to 2-norm `clip`, with weight 1 whatever n_k, and d = - (sum + noise) / (C K).

(McMahan et al., "Communication-efficient learning of deep networks from decentralized data", AISTATS 2017)"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from threadpoolctl import threadpool_limits

from hpcdl.errors import UsageError
from hpcdl.federated.clients import deal, fate
from hpcdl.recovery.options import SurvivingOptions
from hpcdl.runs.options import not_negative, option, positive, refuse
from hpcdl.strategies.compressing import CompressOptions, check_codec, message_bytes
from hpcdl.strategies.description import Call, Communicator, Data, Memory, Optimizer, Run, StepCost, Strategy, Workload


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
    compress: str = "none",
) -> np.ndarray:
    """Train the clients on all ranks of `comm`; return the server's parameters, the same flat vector on each.
    server, secure: server_optimizer and secure_threshold of FederatedOptions, which describes the other arguments.
    optimizer: of the clients, with a fresh state in each round."""
    from hpcdl.comm import refuse_together
    from hpcdl.federated.aggregators import LateSum, SumAggregator
    from hpcdl.federated.averaging import PrivateAverage, WeightedAverage
    from hpcdl.federated.client import ClientUpdate
    from hpcdl.federated.codec import Codec
    from hpcdl.federated.compressed_answers import CompressedAnswers
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
            raise UsageError("--rounds-to is a test accuracy: the data need classes and a test part; leave it out")
        averaging = WeightedAverage(random, rows, fraction)
        if clip:
            averaging = PrivateAverage(random, rows, fraction, gradient, clip, noise, delta)
        if secure:
            from hpcdl.federated.secure_aggregation import SecureAggregator  # needs the package cryptography

            if min(averaging.expected, len(averaging.having_rows)) < 2:
                raise UsageError("--secure needs 2 clients in a round, or more; take a larger --fraction")

    w = run.initial(model)
    client_update = ClientUpdate(model, data, rows, optimizer, random, gradient, local_epochs, local_batch, proximal)
    for kind, vector in client_update.held:
        run.memory.hold(kind, vector)
    codec = Codec(gradient, data.examples)
    options: Any = run.options
    answers = None if compress == "none" else CompressedAnswers(comm, compress, gradient, codec, options.seed)
    aggregator: Any = answers
    if answers is None:
        aggregator = SecureAggregator(comm, codec.length, secure) if secure else SumAggregator(comm, codec.length)
    late_sum: Any = LateSum(comm, codec.length) if late else None
    parts: tuple[Any, ...] = late_sum, aggregator, averaging
    for part in filter(None, parts):
        for name, tracked in part.tracked().items():
            run.track(name, tracked)
    run.report(compress=compress)
    run.report(clients=len(rows), clients_per_round=averaging.clients, partition=options.partition)
    held = Whole(model, w, rule)
    run.begin("federated", held, data, ("clients", "partition"), optimizer.schedule, accuracy=rounds_to)
    with threadpool_limits(1):  # ranks run in parallel, not BLAS; sums have one order on any number of ranks
        for turn in run.rounds():
            loss, work = 0.0, {client: client_update.work(client) for client in averaging.ask(turn)}
            dealt = deal(work, comm.size)
            fates = {client: fate(random, turn, client, drop_out, late) for client in work}
            answering = [[client for client in each if fates[client] == "answers"] for each in dealt]
            aggregator.begin(dealt if answers is None else answering)
            if late_sum:
                late_sum.begin(dealt)
            for client in dealt[comm.rank]:
                change, client_loss = client_update(client, turn, w)
                loss += client_loss
                if fates[client] != "dropped":
                    share = averaging.weigh(client, change)
                    own = (change, share) if answers is None else (change, share, turn)
                    message = (answers or codec).encode(client, *own)
                    (late_sum if fates[client] == "late" else aggregator).add(client, message)
            total = aggregator.finish()
            codec.refuse_far_changes(held.peers, turn)  # compressed changes are decoded by now
            run.share(loss)
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
class FederatedOptions(CompressOptions, SurvivingOptions):
    clients: int = option(100, "number of clients, to whom --partition deals the rows; 0: one per owner of column:NAME")
    fraction: float = option(0.1, "fraction of the clients that work in a round, greater than 0")
    rounds: int = option(
        100, "number of rounds, in the place of --epochs and --steps; each is a step and an epoch of the run"
    )
    rounds_to: float = option(0.0, "end at this test accuracy, such as 0.85, and report the rounds taken; 0: no goal")
    local_epochs: int = option(5, "passes of a client over its own rows in a round")
    local_batch: int = option(10, "examples per update of a client, in the place of --batch-size; 0: all of its rows")
    proximal: float = option(0.0, "FedProx: weight of the penalty on a client's distance from the server's model")
    server_optimizer: str = option(
        "sgd",
        "rule of the server: sgd is FedAvg, momentum FedAvgM; fedadam, fedyogi, fedadagrad; or another --optimizer",
    )
    server_lr: float = option(
        0.0, "learning rate of the server; 0: 0.01 for fedadam and fedyogi, 0.1 for fedadagrad, 1 for any other rule"
    )
    drop_out: float = option(0.0, "probability that a client works, but never answers")
    late: float = option(0.0, "probability that an answer is one round late, and is added to the answers of that round")
    secure: bool = option(False, "secure aggregation: the server learns only the sum of the clients' answers")
    threshold: float = option(0.5, "with --secure: a round counts if more than this fraction of its clients answer")
    clip: float = option(
        0.0, "private averaging: limit on the 2-norm of a client's change; 0: no limit, weights by rows"
    )
    noise: float = option(0.0, "private averaging: deviation of the noise that a round's sum gets, in units of --clip")
    delta: float = option(1e-5, "private averaging: delta, for which the run's epsilon is computed")
    lr: float = option(0.1, "learning rate (step size) of the clients; its schedule counts rounds")
    optimizer: str = option("sgd", "rule of the clients, with a fresh state in each round: sgd, momentum, adam, ...")
    schedule: str = option("constant", "of the clients' rate over the rounds: constant, step, cosine, 1/t, ...")

    unused = ("epochs", "steps", "batch_size", "batch_per_rank")

    def __post_init__(self) -> None:
        from hpcdl.federated.codec import RANGE_BITS

        super().__post_init__()
        self._refuse_unused(": federated averaging has --rounds, --local-epochs and --local-batch instead")
        away, most = self.placement != "shared" or self.data_servers or self.augment, 2**RANGE_BITS
        owners = self.clients == 0 and not self.partition.startswith("column:")
        hidden = "--secure" if self.secure else "--clip" if self.clip else ""
        refuse(
            (self.mixed, "--data mix: federated averaging needs the rows of one data set in memory; give one"),
            (away, "federated averaging needs --placement shared, without --data-servers and --augment"),
            (not 0 < self.fraction <= 1, f"--fraction is greater than 0 and at most 1, not {self.fraction}"),
            (not 0 <= self.drop_out < 1, f"--drop-out is at least 0 and less than 1, not {self.drop_out}"),
            (not 0 <= self.late < 1, f"--late is at least 0 and less than 1, not {self.late}"),
        )
        positive(self, "rounds", "local_epochs")
        not_negative(self, "clients", "local_batch", "proximal", "server_lr", "noise")
        refuse(
            (owners, "--clients 0 is for --partition column:NAME, which names the clients; give a number of clients"),
            (not 0 <= self.rounds_to <= 1, f"--rounds-to is an accuracy from 0 to 1, not {self.rounds_to}"),
            (not 0.5 <= self.threshold <= 1, f"--threshold is at least 0.5 and at most 1, not {self.threshold}"),
            (not 0 <= self.clip < most, f"--clip is a norm from 0 to less than {most}, not {self.clip}"),
            (self.noise and not self.clip, "--noise is in units of --clip: give --clip NORM, too"),
            (
                self.noise and self.class_weight == "balanced",
                "--class-weight balanced counts the classes of all clients, which --noise does not hide: give NAME=5",
            ),
            (not 0 < self.delta < 1, f"--delta is greater than 0 and less than 1, not {self.delta}"),
            (
                self.compresses and self.secure,
                "--compress: masks of --secure cancel in sums of fixed-point numbers only; leave out one of them",
            ),
            (
                self.compresses and self.clip,
                "--compress: a compressed change may be longer than --clip allows; leave out one of them",
            ),
            (self.compresses and self.late, "--compress: late answers are not compressed; leave out one of them"),
            (self.late and hidden, f"--late: with {hidden} a late answer is lost; take --drop-out instead"),
        )

    def plan(self, ranks: int, data: Any) -> tuple[int, int, int]:
        """Return examples per client update, steps per epoch (1), and steps in all: a round is a step and an epoch."""
        batch = min(self.local_batch or data.examples, data.examples)
        self.refuse_more_parts("accumulate", batch)
        return batch, 1, self.rounds

    @property
    def secure_threshold(self) -> float:
        """A round counts if more than this fraction of its clients answer; 0: no secure aggregation."""
        return self.secure and self.threshold


def chosen(case: Workload) -> tuple[int, int]:
    """Return the number of clients that a round asks, and the rows of a client in an even partition."""
    options, examples = case.options, case.data.examples
    clients = options.clients or examples  # 0: the owners of a column, which forecasts do not read
    return max(1, round(options.fraction * clients)), -(-examples // min(clients, examples))


def held(case: Workload, rank: int, memory: Memory) -> None:
    """Add to `memory` parameters and rules of server and client, gradient, activations, late answers' sum (int64)."""
    from hpcdl.federated.server import vectors_of as server_vectors
    from hpcdl.optim import vectors_of

    options, (clients, rows) = case.options, chosen(case)
    server, theirs = len(server_vectors(options.server_optimizer)), len(vectors_of(options.optimizer))
    case.hold_state(memory, 2, server + theirs + bool(options.average))
    if rank < clients:  # the last ranks may have no client
        case.hold_activations(memory, min(options.local_batch or rows, rows))
    if options.late:
        case.hold(memory, "optimizer", 1, case.length + 1, 8)


def fits(options: FederatedOptions, ranks: int, model: Any) -> None:
    check_codec(options.compress, "clients answer one by one")


def step(case: Workload) -> StepCost:
    """Return the cost of a rank's clients and an all-reduce of K + 1 integers (two with --late), not of --secure."""
    options, (clients, rows) = case.options, chosen(case)
    batch = min(options.local_batch or rows, rows)
    times = -(-clients // case.size) * options.local_epochs * -(-rows // batch)
    calls = [Call("all_reduce", 8 * (case.length + 1), 1 + bool(options.late))]
    if options.compresses:  # an all-gather
        message = message_bytes(options.compress, case, case.length) + 8
        calls = [Call("message", -(-clients // case.size) * message, case.size - 1)]
    drawn = -(-clients // case.size) * options.local_epochs * rows
    return StepCost(clients * options.local_epochs * rows, [(batch, times)], calls, times + 1, drawn)


RENAMED = {"server": "server_optimizer", "secure": "secure_threshold"}
SMALL = "--model mlp:32 --clients 100 --fraction 0.04 --local-epochs 1"
STRATEGY = Strategy("train-federated", FederatedOptions, train, held, step, check=fits, renamed=RENAMED, small=SMALL)
