"""Train by pipeline parallelism: mpiexec -n 4 hpcdl train-pipeline --model gpt --data text --microbatches 8

Schedules: naive, gpipe, 1f1b, interleaved (--chunks 2), pipedream. --draw shows a step as planned and as measured."""

from hpcdl.launch.start import TrainingProgram
from hpcdl.strategies.pipeline import STRATEGY

main = TrainingProgram(STRATEGY, __doc__)


if __name__ == "__main__":
    main()
