"""Train by stochastic gradients of reduced variance: mpiexec -n 4 python scripts/train_svrg.py --model softmax

SAGA: --method saga. Asynchronous, on one rank: --threads 4.
"""

from hpcdl.launch.training import Training  # first: it takes over the signals before MPI starts

# isort: split
import math
from dataclasses import dataclass
from typing import Literal

from hpcdl.errors import UsageError
from hpcdl.models.linear_form import linear_form
from hpcdl.runs.options import Options, option
from hpcdl.strategies import asynchronous_svrg, saga, svrg


@dataclass
class SvrgOptions(Options):
    method: Literal["svrg", "saga"] = option(
        "svrg", "svrg takes a full gradient now and then, saga keeps the last slope of each example (linear models)"
    )
    inner_epochs: float = option(2.0, "svrg: epochs between two full gradients")
    snapshot: Literal["last", "random"] = option(
        "last", "svrg: where the next full gradient is taken: at the last iterate (option I), or at one drawn (II)"
    )
    threads: int = option(
        0, "svrg on one rank: threads that take steps of single examples without locks; 0: batches, on any ranks"
    )
    optimizer: str = option("sgd", "sgd: steps of reduced variance are plain ones", group="optimization")
    schedule: str = option(
        "constant", "of the rate, which may stay as it is: constant, step, cosine, 1/t, ...", group="optimization"
    )

    def __post_init__(self):
        super().__post_init__()
        if self.optimizer != "sgd":
            raise UsageError(f"--optimizer {self.optimizer}: steps of reduced variance are plain ones; take sgd")
        if not 0 < self.inner_epochs < math.inf:
            raise UsageError(f"--inner-epochs must be greater than 0, not {self.inner_epochs}")
        self._refuse_negative("threads")
        if self.clip_norm:
            raise UsageError("--clip-norm: a clipped step is none of reduced variance; take a smaller --lr")
        if self.augment:
            raise UsageError("--augment: an example that changes has no gradient that could be kept")
        if self.method == "saga" or self.threads:
            self._check_examples("--threads" if self.threads else "--method saga")
        if self.method == "saga" and (self.inner_epochs != 2 or self.snapshot != "last" or self.threads):
            raise UsageError("--method saga takes no snapshots: leave out --inner-epochs, --snapshot and --threads")
        if self.threads:
            self._check_threads()

    def _check_examples(self, what):
        """Of what works on single examples of a linear model, without a model's own gradient."""
        if self.device != "cpu":
            raise UsageError(f"{what} works on single examples, on the CPU: leave out --device {self.device}")
        if self.accumulate > 1:
            raise UsageError(f"{what} has no parts of a batch to add up: leave out --accumulate")
        if self.straggler or self.pretend_compute:
            raise UsageError(f"{what} calls no model that could be slowed: no --straggler, no --pretend-compute")

    def _check_threads(self):
        if self.average:
            raise UsageError("--threads: nobody sees each iterate, so none can be averaged; leave out --average")
        if self.snapshot != "last":
            raise UsageError("--threads: no iterate can be drawn where nobody sees each; leave out --snapshot")
        if self.inner_epochs != int(self.inner_epochs):
            raise UsageError(f"--threads meet at the ends of epochs: --inner-epochs is whole, not {self.inner_epochs}")
        if self.threads > 1024:
            raise UsageError(f"--threads is 1024 at most, not {self.threads}")
        if (self.batch_size not in (Options.batch_size, "full")) or self.batch_per_rank:
            raise UsageError("--threads take steps of one example: leave out --batch-size and --batch-per-rank")
        if self.data_servers or self.placement == "streamed":
            raise UsageError("--threads read rows in memory: --placement shared, no --data-servers")

    def plan(self, ranks, data):
        """With threads, a step of the run is an epoch."""
        if not self.threads:
            return super().plan(ranks, data)
        return data.examples, 1, self.allowance.steps(self.steps or self.epochs, data.examples)


def check(options, ranks, model):
    if options.threads and ranks > 1:
        raise UsageError(f"--threads share the parameters of one rank, not of {ranks}: start it without mpiexec")
    if options.threads or options.method == "saga":
        linear_form(model, "--threads" if options.threads else "--method saga")


def start(comm, model, data, optimizer, run):
    options = run.options
    if options.threads:
        asynchronous_svrg.train(comm, model, data, optimizer, run, options.threads, int(options.inner_epochs))
    elif options.method == "saga":
        saga.train(comm, model, data, optimizer, run)
    else:
        svrg.train(comm, model, data, optimizer, run, options.inner_epochs, options.snapshot)


TRAINING = Training("train-svrg", SvrgOptions, __doc__, start, check=check)
main = TRAINING.main


if __name__ == "__main__":
    main()
