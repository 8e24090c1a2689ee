"""Train with parameter servers: mpiexec -n 5 hpcdl train-parameter-server --servers 2 --consistency ssp"""

from hpcdl.launch.start import TrainingProgram
from hpcdl.strategies.parameter_server import STRATEGY

main = TrainingProgram(STRATEGY, __doc__)


if __name__ == "__main__":
    main()
