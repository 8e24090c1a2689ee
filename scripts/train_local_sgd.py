"""Train by local SGD: mpiexec -n 4 hpcdl train-local-sgd --sync-every 8

Post-local SGD: --local-from 10. SlowMo: --outer momentum:beta=0.5. DiLoCo: --sync-every 50 --optimizer adamw --lr 0.001
--outer nesterov --outer-lr 0.7."""

from hpcdl.launch.start import TrainingProgram
from hpcdl.strategies.local_sgd import STRATEGY

main = TrainingProgram(STRATEGY, __doc__)


if __name__ == "__main__":
    main()
