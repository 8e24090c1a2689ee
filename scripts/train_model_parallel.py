"""Train with the layers of the model on consecutive ranks:
mpiexec -n 4 hpcdl train-model-parallel --model mlp:64,64,64

One rank computes at a time, the simplest way to cut a model that does not fit; train-pipeline fills the idle time."""

from hpcdl.launch.start import TrainingProgram
from hpcdl.strategies.model_parallel import STRATEGY

main = TrainingProgram(STRATEGY, __doc__)


if __name__ == "__main__":
    main()
