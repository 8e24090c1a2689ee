"""Train by sequential minibatch SGD, on one rank: python scripts/train_sequential.py --data digits"""

from hpcdl.services.training import training  # first: it takes over the signals before MPI starts

# isort: split
from hpcdl.runs.options import Options
from hpcdl.strategies.sequential import train


def main(arguments=None):
    training("train-sequential", Options, __doc__, arguments, train, ranks=1)


if __name__ == "__main__":
    main()
