"""Train by tensor parallelism: mpiexec -n 4 hpcdl train-tensor-parallel --model gpt --data text"""

from hpcdl.launch.start import TrainingProgram
from hpcdl.strategies.tensor_parallel import STRATEGY

main = TrainingProgram(STRATEGY, __doc__)


if __name__ == "__main__":
    main()
