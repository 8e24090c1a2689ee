"""hpcdl: train models with every distributed-learning strategy, on any machine that has MPI.

The rooms, from the top: scripts, strategies, runs, models / optim / data, comm, kernels. A room imports from rooms
below it, never upwards. Three small modules lie beneath all rooms: `chunks`, `errors` and `random`.
"""

__version__ = "0.1.0"
