"""Learn to act by DQN, on one rank: python scripts/train_dqn.py --env CartPole-v1

Double DQN with n-step returns, a dueling network and Huber's loss; --double no, --n-step 1, --model mlp:64,64, --loss
squared and --target-every 0 turn them off, --prioritized turns prioritized replay on. A mean return of evaluations is
that of the greedy policy, over --episodes episodes that are always the same.
"""

from hpcdl.rl.training import Learning  # first: it takes over the signals before MPI starts

# isort: split
from hpcdl.rl.dqn import train
from hpcdl.rl.options import RLOptions

TRAINING = Learning("train-dqn", RLOptions, __doc__, train, ranks=1)
main = TRAINING.main


if __name__ == "__main__":
    main()
