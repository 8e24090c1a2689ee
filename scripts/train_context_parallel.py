"""Train on long sequences, cut over the ranks: mpiexec -n 4 hpcdl train-context-parallel --model gpt --data text"""

from hpcdl.launch.start import TrainingProgram
from hpcdl.strategies.context_parallel import STRATEGY

main = TrainingProgram(STRATEGY, __doc__)


if __name__ == "__main__":
    main()
