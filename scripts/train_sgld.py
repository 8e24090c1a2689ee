"""Draw models from a posterior by Langevin dynamics: mpiexec -n 4 hpcdl train-sgld --chains 4

A rate that falls: --lr 0.001 --schedule polynomial:b=10,gamma=0.55. Then: hpcdl evaluate RUN --samples."""

from hpcdl.launch.start import TrainingProgram
from hpcdl.strategies.sgld import STRATEGY

main = TrainingProgram(STRATEGY, __doc__)


if __name__ == "__main__":
    main()
