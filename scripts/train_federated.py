"""Train by federated averaging, on simulated clients:
mpiexec -n 4 hpcdl train-federated --clients 40 --fraction 0.25 --rounds 60"""

from hpcdl.launch.start import TrainingProgram
from hpcdl.strategies.federated import STRATEGY

main = TrainingProgram(STRATEGY, __doc__)


if __name__ == "__main__":
    main()
