"""Train by minibatch SGD with all-reduce: mpiexec -n 4 hpcdl train-allreduce --allreduce ring"""

from hpcdl.launch.start import TrainingProgram
from hpcdl.strategies.all_reduce import STRATEGY

main = TrainingProgram(STRATEGY, __doc__)


if __name__ == "__main__":
    main()
