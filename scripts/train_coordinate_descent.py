"""Train a linear model by dual coordinate ascent, certified by its duality gap:
mpiexec -n 4 hpcdl train-coordinate-descent --model svm --weight-decay 0.001 --tolerance 0.0001

SDCA on one rank, CoCoA+ on several (CoCoA: --aggregate average), PASSCoDe in --threads."""

from hpcdl.launch.start import TrainingProgram
from hpcdl.strategies.coordinate_descent import STRATEGY

main = TrainingProgram(STRATEGY, __doc__)


if __name__ == "__main__":
    main()
