"""Learn to act, actors, replay and learners on ranks of their own: mpiexec -n 5 hpcdl train-apex

The first --learners ranks learn, the next --replays remember, and the others act. --replays 0 has the learners
remember. The faster of actors and learners waits, so that an update comes with --train-every environment steps; with
--free the learner makes as many updates as it can."""

from hpcdl.launch.start import TrainingProgram
from hpcdl.rl.options import APEX

main = TrainingProgram(APEX, __doc__, "hpcdl.rl.training:Learning")


if __name__ == "__main__":
    main()
