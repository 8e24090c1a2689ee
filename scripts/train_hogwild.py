"""Train by HOGWILD!, threads on one vector without locks: python scripts/train_hogwild.py --threads 4 --model softmax

All ranks of a node on one vector: mpiexec -n 2 python scripts/train_hogwild.py --shared. Ranks that each have a vector,
averaged every 10 rounds: mpiexec -n 4 python scripts/train_hogwild.py --threads 2 --join all-reduce --join-every 10
Threads with replicas, which exchange their changes: --threads 4 --exchange-every 1024"""

from hpcdl.launch.start import TrainingProgram
from hpcdl.strategies.hogwild import STRATEGY

main = TrainingProgram(STRATEGY, __doc__)


if __name__ == "__main__":
    main()
