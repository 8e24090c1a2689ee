"""Train by minibatch SGD with all-reduce: mpiexec -n 4 python scripts/train_allreduce.py --allreduce ring"""

from hpcdl.services.training import training  # first: it takes over the signals before MPI starts

# isort: split
from dataclasses import dataclass
from typing import Literal

from hpcdl.runs.options import Options, option
from hpcdl.strategies.all_reduce import train


@dataclass
class AllReduceOptions(Options):
    compress: Literal["none", "float16", "bfloat16"] = option(
        "none", "send gradients in 16 bits, with error feedback, by an all-reduce made for it instead of --allreduce"
    )


def main(arguments=None):
    def start(comm, model, data, optimizer, run):
        train(comm, model, data, optimizer, run, run.options.compress)

    training("train-allreduce", AllReduceOptions, __doc__, arguments, start)


if __name__ == "__main__":
    main()
