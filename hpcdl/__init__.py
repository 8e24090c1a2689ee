"""hpcdl: train models with every distributed-learning strategy, on any machine that has MPI.

The rooms, from the top; a room imports only from rooms below it:

    scripts                          one program per strategy or tool
    reports                          tables, pictures and comparisons of what runs have written
    search, rl, planning             many trainings in one job; reinforcement learning; forecasts of memory and time
    launch                           from a command line to a run
    strategies                       one file per strategy: the loop is the algorithm
    recovery, data_server            restarts, recovery in the job; ranks that make batches for others
    parameter_server, federated      parameters on servers; clients of federated learning
    parallel, inference              what a rank holds of a model that is cut; predictions of a trained model
    runs                             one training run
    faults                           fault injection and stragglers
    checkpoint                       the state of a run on disk
    torch                            PyTorch's modules as models; a backend of torch.distributed
    models, optim, data, machine     gradients, update rules, examples, properties of this machine
    comm                             messages between ranks
    kernels                          the compiled loops over the elements of arrays

The modules directly in hpcdl/ lie beneath all rooms."""

import importlib
from typing import Any

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """Return `job`, the context of a program of several ranks, whose import, at first use, starts MPI; or `launch`,
    which starts a program's ranks from a plain Python process, and starts no MPI in it."""
    if name == "job":
        from hpcdl.comm.failure import job

        return job
    if name == "launch":
        return importlib.import_module("hpcdl.launch")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
