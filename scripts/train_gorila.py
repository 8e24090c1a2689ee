"""Learn to act on many ranks, by gradients to parameter servers: mpiexec -n 5 python scripts/train_gorila.py

Each rank but the servers is a bundle of an actor, a replay memory and a learner; with --actors and --learners they are
ranks of their own. --consistency bsp has the learners push together; with one bundle that is DQN.
"""

from hpcdl.launch.start import TrainingProgram
from hpcdl.rl.options import GORILA

main = TrainingProgram(GORILA, __doc__, "hpcdl.rl.training:Learning")


if __name__ == "__main__":
    main()
