"""Train by HOGWILD!, threads on one vector without locks: hpcdl train-hogwild --threads 4 --model softmax

All ranks of a node on one vector: mpiexec -n 2 hpcdl train-hogwild --shared. Ranks that each have a vector,
averaged every 10 rounds: mpiexec -n 4 hpcdl train-hogwild --threads 2 --join all-reduce --join-every 10
Threads with replicas, which exchange their changes: --threads 4 --exchange-every 1024"""

from hpcdl.launch.start import TrainingProgram
from hpcdl.strategies.hogwild import STRATEGY

main = TrainingProgram(STRATEGY, __doc__)


if __name__ == "__main__":
    main()
