"""Train by sequential minibatch SGD, on one rank: python scripts/train_sequential.py --data digits"""

from hpcdl.launch.training import Training  # first: it takes over the signals before MPI starts

# isort: split
from hpcdl.runs.options import Options
from hpcdl.strategies.sequential import train

TRAINING = Training("train-sequential", Options, __doc__, train, ranks=1)
main = TRAINING.main


if __name__ == "__main__":
    main()
