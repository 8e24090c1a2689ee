"""Train by tensor parallelism: mpiexec -n 4 python scripts/train_tensor_parallel.py --model gpt --data text"""

from hpcdl.launch.start import TrainingProgram
from hpcdl.strategies.tensor_parallel import STRATEGY

main = TrainingProgram(STRATEGY, __doc__)


if __name__ == "__main__":
    main()
