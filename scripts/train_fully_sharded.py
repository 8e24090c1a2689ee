"""Train with parameters, gradients and optimizer sharded (ZeRO):
mpiexec -n 4 python scripts/train_fully_sharded.py --stage 3 --model gpt --data text
"""

from hpcdl.launch.training import Training  # first: it takes over the signals before MPI starts

# isort: split
from dataclasses import dataclass
from typing import Literal

from hpcdl.models.part import require_layers
from hpcdl.runs.options import Options, option
from hpcdl.strategies.fully_sharded import train


@dataclass
class ShardedOptions(Options):
    stage: Literal[1, 2, 3] = option(3, "what is sharded: 1 the optimizer's state, 2 and gradients, 3 and parameters")
    gather: Literal["all-gather", "broadcast"] = option(
        "all-gather", "each layer in equal chunks on all ranks, or whole on one of them, which broadcasts it"
    )


def start(comm, model, data, optimizer, run):
    train(comm, model, data, optimizer, run, run.options.stage, run.options.gather)


def fits(options, ranks, model):
    require_layers(model)


TRAINING = Training("train-fully-sharded", ShardedOptions, __doc__, start, check=fits, cut=True)
main = TRAINING.main


if __name__ == "__main__":
    main()
