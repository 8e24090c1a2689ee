"""Train by minibatch SGD with all-reduce: mpiexec -n 4 python scripts/train_allreduce.py --allreduce ring"""

from hpcdl.runs.training import training  # first: it takes over the signals before MPI starts

# isort: split
from hpcdl.runs.options import Options
from hpcdl.strategies.all_reduce import train


def main(arguments=None):
    with training("train-allreduce", Options, __doc__, arguments) as (comm, model, data, optimizer, run):
        train(comm, model, data, optimizer, run)


if __name__ == "__main__":
    main()
