"""Train by federated averaging, on simulated clients:
mpiexec -n 4 python scripts/train_federated.py --clients 40 --fraction 0.25 --rounds 60
"""

from hpcdl.launch.training import Training  # first: it takes over the signals before MPI starts

# isort: split
import math
from dataclasses import dataclass

from hpcdl.errors import UsageError
from hpcdl.federated.codec import RANGE_BITS
from hpcdl.recovery.options import SurvivingOptions
from hpcdl.runs.options import Options, option
from hpcdl.strategies.federated import train


@dataclass
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

    def __post_init__(self):
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

    def plan(self, ranks, data):
        """Rounds count as steps and as epochs; the updates are the clients'."""
        batch = min(self.local_batch or data.examples, data.examples)
        self.refuse_more_parts("accumulate", batch)
        return batch, 1, self.rounds

    def _check_privacy(self):
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


def start(comm, model, data, optimizer, run):
    options = run.options
    train(
        comm,
        model,
        data,
        optimizer,
        run,
        clients=options.clients,
        fraction=options.fraction,
        local_epochs=options.local_epochs,
        local_batch=options.local_batch,
        proximal=options.proximal,
        server=options.server_optimizer,
        server_lr=options.server_lr,
        drop_out=options.drop_out,
        late=options.late,
        rounds_to=options.rounds_to,
        secure=options.secure and options.threshold,
        clip=options.clip,
        noise=options.noise,
        delta=options.delta,
    )


TRAINING = Training("train-federated", FederatedOptions, __doc__, start)
main = TRAINING.main


if __name__ == "__main__":
    main()
