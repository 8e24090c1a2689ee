"""Draw models from a posterior by Langevin dynamics: mpiexec -n 4 python scripts/train_sgld.py --chains 4

A rate that falls: --lr 0.001 --schedule polynomial:b=10,gamma=0.55. Then: hpcdl evaluate RUN --samples.
"""

from hpcdl.launch.training import Training  # first: it takes over the signals before MPI starts

# isort: split
import math
from dataclasses import dataclass

from hpcdl.errors import UsageError
from hpcdl.models.losses import Hinge, Huber
from hpcdl.runs.options import Options, option
from hpcdl.strategies.sgld import train


@dataclass
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

    def __post_init__(self):
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

    def global_batch(self, ranks, examples):
        """Examples per update of a chain."""
        return super().global_batch(max(1, ranks // self.chains), examples)


def check(options, ranks, model):
    if options.chains > ranks:
        raise UsageError(f"--chains {options.chains}: each has a rank at least, and there are {ranks}")
    loss = model.layers[-1] if hasattr(model, "layers") else None
    if isinstance(loss, Hinge):
        raise UsageError("the hinge loss is no log-likelihood: take --model logistic")
    if isinstance(loss, Huber):
        raise UsageError("the likelihood is a normal one: take --loss squared")
    if options.noise_variance != 1 and getattr(model, "target", None) is not None and model.target.kind != "f":
        raise UsageError("--noise-variance is of a regression; classes have none")


def start(comm, model, data, optimizer, run):
    options = run.options
    train(
        comm,
        model,
        data,
        optimizer,
        run,
        options.prior_precision,
        options.noise_variance,
        options.burn_in,
        options.thin,
        options.chains,
    )


TRAINING = Training("train-sgld", SgldOptions, __doc__, start, check=check)
main = TRAINING.main


if __name__ == "__main__":
    main()
