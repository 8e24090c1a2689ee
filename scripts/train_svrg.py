"""Train by stochastic gradients of reduced variance: mpiexec -n 4 hpcdl train-svrg --model softmax

SAGA: --method saga. Asynchronous, on one rank: --threads 4."""

from hpcdl.launch.start import TrainingProgram
from hpcdl.strategies.svrg import STRATEGY

main = TrainingProgram(STRATEGY, __doc__)


if __name__ == "__main__":
    main()
