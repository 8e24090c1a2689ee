"""Train by sequential minibatch SGD, on one rank: hpcdl train-sequential --data digits"""

from hpcdl.launch.start import TrainingProgram
from hpcdl.strategies.sequential import STRATEGY

main = TrainingProgram(STRATEGY, __doc__)


if __name__ == "__main__":
    main()
