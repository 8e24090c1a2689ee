"""Train by local SGD: mpiexec -n 4 python scripts/train_local_sgd.py --sync-every 8

Post-local SGD: --local-from 10. SlowMo: --outer momentum:beta=0.5. DiLoCo: --sync-every 50 --optimizer adamw --lr 0.001
--outer nesterov --outer-lr 0.7.
"""

from hpcdl.launch.training import Training  # first: it takes over the signals before MPI starts

# isort: split
import math
from dataclasses import dataclass
from typing import Literal

from hpcdl.errors import UsageError
from hpcdl.recovery.options import SurvivingOptions
from hpcdl.runs.options import option
from hpcdl.strategies.local_sgd import outer_rule, train


@dataclass
class LocalOptions(SurvivingOptions):
    sync_every: int = option(8, "steps that a rank takes by itself between two averages of the parameters")
    local_from: int = option(0, "epoch from which steps are local, with all-reduce SGD before it; 0: from the start")
    local_momentum: Literal["keep", "average", "reset"] = option(
        "keep", "what becomes of each rank's momentum (adam: moments) when parameters are averaged"
    )
    outer: str = option(
        "average", "average, or an optimizer that takes the way to the average for a gradient, as in nesterov:beta=0.9"
    )
    outer_lr: float = option(1.0, "learning rate of that optimizer")

    def __post_init__(self):
        super().__post_init__()
        for name in ("sync_every", "outer_lr"):
            value = getattr(self, name)
            if not (value > 0 and math.isfinite(value)):
                raise UsageError(f"--{name.replace('_', '-')} must be greater than 0, not {value}")
        self._refuse_negative("local_from")
        if outer_rule(self.outer, self.outer_lr, 0, self.dtype) is None and self.outer_lr != 1:
            raise UsageError("--outer average has no learning rate: leave out --outer-lr, or add --outer sgd")
        if self.local_momentum != "keep" and self.optimizer == "sgd":
            raise UsageError(f"--local-momentum {self.local_momentum}: --optimizer sgd has none; leave it out")


def start(comm, model, data, optimizer, run):
    options = run.options
    train(
        comm,
        model,
        data,
        optimizer,
        run,
        options.sync_every,
        options.local_from,
        options.local_momentum,
        options.outer,
        options.outer_lr,
    )


TRAINING = Training("train-local-sgd", LocalOptions, __doc__, start)
main = TRAINING.main


if __name__ == "__main__":
    main()
