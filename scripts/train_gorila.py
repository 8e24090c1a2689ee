"""Learn to act on many ranks, by gradients to parameter servers: mpiexec -n 5 hpcdl train-gorila

Each rank but the servers is a bundle of an actor, a replay memory and a learner; with --actors and --learners actors
and learners have ranks of their own. With --consistency bsp the learners push together; with one bundle this is DQN."""

from hpcdl.launch.start import TrainingProgram
from hpcdl.rl.options import GORILA

main = TrainingProgram(GORILA, __doc__, "hpcdl.rl.training:Learning")


if __name__ == "__main__":
    main()
