"""Train by gossip on a sparse graph: mpiexec -n 4 hpcdl train-gossip --topology ring --method dpsgd"""

from hpcdl.launch.start import TrainingProgram
from hpcdl.strategies.gossip import STRATEGY

main = TrainingProgram(STRATEGY, __doc__)


if __name__ == "__main__":
    main()
