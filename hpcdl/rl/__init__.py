"""Reinforcement learning: DQN on one rank (dqn.py), Gorila (gorila.py), Ape-X (apex.py); common parts: agent.py.
gymnasium (`pip install 'hpcdl[rl]'`) is imported only when an environment is made."""
