"""Learn to act by DQN, on one rank: hpcdl train-dqn --env CartPole-v1

Double DQN with n-step returns, a dueling network and Huber's loss; --double no, --n-step 1, --model mlp:64,64, --loss
squared and --target-every 0 turn them off, --prioritized turns prioritized replay on. Evaluations give the mean return
of the greedy policy, over --episodes episodes that are always the same."""

from hpcdl.launch.start import TrainingProgram
from hpcdl.rl.options import DQN

main = TrainingProgram(DQN, __doc__, "hpcdl.rl.training:Learning")


if __name__ == "__main__":
    main()
