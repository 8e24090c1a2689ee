"""Reinforcement learning: environments, replay memory, a network of action values, and what acts and learns with them.

    environments.py    copies of an environment, stepped together, each seeded by its number
    replay.py          transitions in a ring, drawn uniformly or by priority
    chunk.py           steps of an actor as one message, with the priorities of their transitions
    q_network.py       action values over a flat vector (torch_values.py: of a PyTorch module)
    agent.py           the parts of an agent: acting, and learning from a sample
    task.py            the environment in the place of a data set, and the scores
    agent_state.py     what checkpoints hold beside the parameters
    dqn.py             the algorithm, on one rank

gymnasium (`pip install 'hpcdl[rl]'`) is imported only when an environment is made.
"""
