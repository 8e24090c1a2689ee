"""Train with parameters, gradients and optimizer sharded (ZeRO):
mpiexec -n 4 hpcdl train-fully-sharded --stage 3 --model gpt --data text"""

from hpcdl.launch.start import TrainingProgram
from hpcdl.strategies.fully_sharded import STRATEGY

main = TrainingProgram(STRATEGY, __doc__)


if __name__ == "__main__":
    main()
