"""Reinforcement learning: environments, replay memory, a network of action values, and what acts and learns with them.

    environments.py    copies of an environment, stepped together, each seeded by its number
    replay.py          transitions in a ring, drawn uniformly or by priority
    chunk.py           steps of an actor as one message, with the priorities of their transitions
    q_network.py       the values of actions, over a flat vector (torch_values.py: of a module of PyTorch's)
    agent.py           acting, and learning from a sample
    task.py            the environment as a run sees it: what is learned, and how it is scored
    held.py            what a run holds, and its checkpoints
    dqn.py             the algorithm, on one rank

gymnasium (`pip install 'hpcdl[rl]'`) is imported where an environment is asked for, and nowhere else.
"""
