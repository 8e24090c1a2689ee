"""Train by data, pipeline, context, expert and tensor parallelism on a grid of ranks:
mpiexec -n 4 hpcdl train-grid --model gpt --data text --grid data=2,tensor=2

Axes data, pipeline, context, expert and tensor, whose product is the number of ranks; ZeRO along data and context:
--stage 1, 2 or 3."""

from hpcdl.launch.start import TrainingProgram
from hpcdl.strategies.grid import STRATEGY

main = TrainingProgram(STRATEGY, __doc__)


if __name__ == "__main__":
    main()
