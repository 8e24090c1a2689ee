"""Train by HOGWILD!, threads on one vector without locks: python scripts/train_hogwild.py --threads 4 --model softmax

All ranks of a node on one vector: mpiexec -n 2 python scripts/train_hogwild.py --shared. Ranks that each have a vector,
averaged every 10 rounds: mpiexec -n 4 python scripts/train_hogwild.py --threads 2 --join all-reduce --join-every 10
Threads that are kept apart, and exchange what they have changed: --threads 4 --exchange-every 1024
"""

from hpcdl.launch.training import Training  # first: it takes over the signals before MPI starts

# isort: split
from dataclasses import dataclass
from functools import partial
from typing import Literal

from hpcdl.comm.gossip.mixing import check_mixing, mixing_over_period
from hpcdl.comm.gossip.topology import topology
from hpcdl.errors import UsageError
from hpcdl.models.linear_form import linear_form
from hpcdl.optim import make_schedule
from hpcdl.parallel.thread_team import check_exchange
from hpcdl.runs.options import Options, option
from hpcdl.strategies.hogwild import train, train_on_servers

PARTS = 10  # rounds of an epoch, by itself
MOST_THREADS = 1024


@dataclass
class HogwildOptions(Options):
    threads: int = option(1, "threads of each rank, which update one vector all at once")
    locking: Literal["none", "atomic", "striped", "global", "round-robin"] = option(
        "none", "what an update locks: nothing, nothing but lose no update, its coordinates, all, or wait for its turn"
    )
    exchange_every: int = option(
        0, "each thread works on a replica, exchanged with the others' after so many of its updates; 0: none has one"
    )
    round_size: int = option(
        0, "examples of a round, of all ranks together, which the run counts as a step; 0: a tenth of an epoch"
    )
    shared: bool = option(False, "all ranks of a node work on one vector, in memory that they share")
    join: Literal["all-reduce", "gossip", "servers"] = option(
        "all-reduce", "how several vectors come together: averaged, averaged with neighbours, or on servers"
    )
    join_every: int = option(1, "rounds between two times that vectors come together")
    servers: int = option(0, "with --join servers: ranks that hold the parameters; 0: one")
    topology: str = option("ring", "with --join gossip: the graph, as in train-gossip")
    mixing: Literal["metropolis-hastings", "uniform"] = option(
        "metropolis-hastings", "with --join gossip: weights of the neighbours"
    )
    model: str = option("softmax", "a linear model: linear, logistic, svm or softmax", group="model")
    batch_size: int = option(1, "examples per update of a thread", group="optimization")
    optimizer: str = option("sgd", "sgd or adagrad; settings as in adagrad:eps=1e-8", group="optimization")
    schedule: str = option(
        "step:every=1,factor=0.9",
        "constant, step, cosine or 1/t, of the rate over the updates of a vector; it changes from round to round",
        group="optimization",
    )

    unused = ("accumulate", "clip_norm", "batch_per_rank", "augment", "data_servers", "average", "straggler")

    def __post_init__(self):
        super().__post_init__()
        for name in ("threads", "join_every"):
            if getattr(self, name) < 1:
                raise UsageError(f"--{name.replace('_', '-')} must be greater than 0, not {getattr(self, name)}")
        for name in ("round_size", "servers"):
            self._refuse_negative(name)
        check_exchange(self.exchange_every, self.locking)
        if self.threads > MOST_THREADS:
            raise UsageError(f"--threads is {MOST_THREADS} at most, not {self.threads}")
        plain = Options()
        for name in (*self.unused, "pretend_compute"):
            if getattr(self, name) != getattr(plain, name):
                raise UsageError(
                    f"--{name.replace('_', '-')}: threads take whole examples one by one from memory; leave it out"
                )
        if isinstance(self.batch_size, str):
            raise UsageError("--batch-size full: an update of a thread has a number of examples, 1 by itself")
        if self.optimizer.partition(":")[0] not in ("sgd", "adagrad"):
            raise UsageError(
                f"--optimizer {self.optimizer}: it moves coordinates that no example touches; take sgd or adagrad"
            )
        if self.device != "cpu":
            raise UsageError(f"--device {self.device}: threads work on the cores of the processor; leave it out")
        if self.placement == "streamed":
            raise UsageError("--placement streamed: threads need the rows in memory; take shared or partitioned")
        self._check_join()

    def _check_join(self):
        if self.join != "servers":
            if self.servers:
                raise UsageError("--servers goes with --join servers")
            return
        self.servers = self.servers or 1
        if self.shared:
            raise UsageError("--join servers: each worker has a vector of its own; leave out --shared")
        if self.join_every != 1:
            raise UsageError("--join servers: a worker pushes after each round; for fewer take a larger --round-size")
        if self.placement != "shared" or self.partition != "iid":
            raise UsageError("--join servers: any worker may have to do any round; take --placement shared")
        if self.optimizer.partition(":")[0] != "sgd":
            raise UsageError("--join servers adds up what workers change, who have no state in common; take sgd")

    def plan(self, ranks, data):
        """A step is a round."""
        share = self.batch_size * self.threads * (1 if self.join == "servers" else ranks)
        parts = PARTS * (ranks if self.join == "servers" else 1)
        size = self.round_size or -(-data.examples // (parts * share)) * share
        per_epoch = data.steps_per_epoch(size)
        self.examples, self.vectors = data.examples, ranks
        return size, per_epoch, self.allowance.steps(self.steps or self.epochs * per_epoch, size)

    def make_optimizer(self, model, plan, size=None):
        """The rate of a round is that of its first update, as the schedule has it over the updates of one vector."""
        made = super().make_optimizer(model, plan, size)
        examples, per_epoch, rounds = plan
        each = self.batch_size * (1 if self.shared or self.join == "servers" else self.vectors)
        updates = -(-self.examples // each)  # of an epoch

        def first(step):
            epoch, step = divmod(step, per_epoch)
            return epoch * updates + step * examples // each

        schedule = make_schedule(self.schedule, self.lr, first(rounds), updates, each)
        made.schedule = lambda step: schedule(first(step))
        return made


def check(options, ranks, model):
    linear_form(model, "train-hogwild")
    if options.join == "gossip" and not options.shared:
        check_mixing(mixing_over_period(topology(options.topology, ranks, options.seed), options.mixing))


def start(comm, model, data, optimizer, run):
    options = run.options
    settings = {name: getattr(options, name) for name in ("threads", "locking", "exchange_every")}
    settings["batch"] = options.batch_size
    if options.join == "servers":
        train_on_servers(comm, model, data, optimizer, run, servers=options.servers, **settings)
        return
    settings |= {name: getattr(options, name) for name in ("shared", "join", "join_every")}
    graph = partial(topology, options.topology, seed=options.seed)
    train(comm, model, data, optimizer, run, topology=graph, rule=options.mixing, **settings)


TRAINING = Training("train-hogwild", HogwildOptions, __doc__, start, check=check)
main = TRAINING.main


if __name__ == "__main__":
    main()
