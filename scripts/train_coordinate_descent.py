"""Train a linear model by dual coordinate ascent, certified by its duality gap:
mpiexec -n 4 python scripts/train_coordinate_descent.py --model svm --weight-decay 0.001 --tolerance 0.0001

SDCA on one rank, CoCoA+ on several (CoCoA: --aggregate average), PASSCoDe in --threads.
"""

from hpcdl.launch.training import Training  # first: it takes over the signals before MPI starts

# isort: split
import math
from dataclasses import dataclass
from typing import Literal

from hpcdl.errors import UsageError
from hpcdl.runs.help import dashed
from hpcdl.runs.options import Options, option
from hpcdl.strategies.coordinate_descent import train

MOST = {"local_steps": 1e6, "threads": 1024}


@dataclass
class CoordinateOptions(Options):
    rounds: int = option(100, "how many rounds at most; the run counts them as its steps and its epochs")
    tolerance: float = option(0.0, "end when the duality gap, of an evaluation, is no larger; 0: after all rounds")
    local_steps: float = option(1.0, "passes of a rank over its own examples in a round, or a part of one, as 0.1")
    aggregate: Literal["add", "average"] = option(
        "add",
        "what becomes of the ranks' changes: added, of a problem that allows for it (CoCoA+), or averaged (CoCoA)",
    )
    l1: float = option(0.0, "L1 penalty per parameter, beside --weight-decay: the elastic net")
    threads: int = option(1, "threads of a rank that change the parameters together")
    locking: Literal["atomic", "none"] = option(
        "atomic", "of several threads: atomic loses no addition, none is faster and solves a slightly other problem"
    )
    weight_decay: float = option(0.001, "L2 penalty per parameter, lambda of the problem; greater than 0")
    model: str = option("svm", "linear, logistic or svm")
    optimizer: str = option("sgd", "has nothing to do here: each step is the best for its coordinate")

    unused = (
        *("epochs", "steps", "batch_size", "batch_per_rank", "lr", "optimizer", "schedule", "clip_norm"),
        *("accumulate", "augment", "average", "straggler", "pretend_compute", "initial"),
    )

    def __post_init__(self):
        super().__post_init__()
        for name in self.unused:
            if getattr(self, name) != getattr(type(self), name):
                raise UsageError(
                    f"--{dashed(name)} has no meaning where single coordinates are solved for: leave it out"
                )
        if self.device != "cpu":
            raise UsageError("--device cuda: coordinate descent is for CPUs; leave it out, or take train-allreduce")
        if self.placement == "streamed" or self.data_servers:
            raise UsageError(
                "each rank goes through rows in its memory: --placement shared or partitioned, no --data-servers"
            )
        for name in ("rounds", "local_steps", "threads"):
            value = getattr(self, name)
            if not 0 < value < math.inf:
                raise UsageError(f"--{dashed(name)} must be greater than 0, not {value}")
        for name, most in MOST.items():
            if getattr(self, name) > most:
                raise UsageError(f"--{dashed(name)} is {most:,.0f} at most, not {getattr(self, name)}")
        for name in ("tolerance", "l1"):
            self._refuse_negative(name)
        if not self.weight_decay > 0:
            pure = " (with --l1, too: the dual problem is that of a little L2 beside it)" if self.l1 else ""
            raise UsageError(f"--weight-decay must be greater than 0{pure}, and is {self.weight_decay}")

    def plan(self, ranks, data):
        """Rounds count as steps and as epochs."""
        batch = max(1, round(self.local_steps * data.examples))
        return batch, 1, self.allowance.steps(self.rounds, batch)


def start(comm, model, data, optimizer, run):
    options = run.options
    train(
        comm,
        model,
        data,
        optimizer,
        run,
        weight_decay=options.weight_decay,
        l1=options.l1,
        local_steps=options.local_steps,
        aggregate=options.aggregate,
        threads=options.threads,
        locking=options.locking,
        tolerance=options.tolerance,
    )


TRAINING = Training("train-coordinate-descent", CoordinateOptions, __doc__, start)
main = TRAINING.main


if __name__ == "__main__":
    main()
