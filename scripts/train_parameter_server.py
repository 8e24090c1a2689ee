"""Train with parameter servers: mpiexec -n 5 python scripts/train_parameter_server.py --servers 2 --consistency ssp"""

from hpcdl.launch.start import TrainingProgram
from hpcdl.strategies.parameter_server import STRATEGY

main = TrainingProgram(STRATEGY, __doc__)


if __name__ == "__main__":
    main()
