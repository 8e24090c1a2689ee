"""From a command line to a run of reinforcement learning: what the programs of it share (services/training.py).

    TRAINING = Learning("train-dqn", RLOptions, __doc__, train, ranks=1)
    TRAINING.main()

calls `train(comm, model, task, optimizer, run, environments, replay)`.
"""

from hpcdl.services.training import Training  # first: it takes over the signals before MPI starts

# isort: split
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

from mpi4py import MPI
from threadpoolctl import threadpool_limits

from hpcdl.comm import Communicator, refuse_together
from hpcdl.kernels.device import open_device
from hpcdl.rl.environments import Environments
from hpcdl.rl.options import RLOptions
from hpcdl.rl.q_network import QNetwork
from hpcdl.rl.replay import Replay
from hpcdl.rl.task import Task
from hpcdl.runs.run import Run
from hpcdl.runs.straggler import slowed
from hpcdl.services.training import local_rank

SMALL = 1_000_000  # parameters


def opened_task(options: RLOptions, environments: Environments) -> Task:
    """The environment as the run sees it."""
    return Task(
        options.env, options.settings, partial(copies, options.env, options.settings), environments, options.episodes
    )


def copies(name: str, settings: dict[str, Any], count: int, seed: int, first: int) -> Environments:
    """So many copies of an environment that score a policy."""
    return Environments(name, settings, count, seed, first)


def made_replay(options: RLOptions, environments: Environments) -> Replay:
    """The replay memory that the options ask for, for what these environments show."""
    return Replay(
        options.replay,
        environments.shape,
        environments.dtype,
        streams=options.envs,
        stack=environments.stack,
        n_step=options.n_step,
        gamma=options.gamma,
        prioritized=options.prioritized,
        alpha=options.alpha,
    )


def few_threads(size: int) -> AbstractContextManager:
    """One thread for the products of a small network: several would wait for each other longer than they compute."""
    return threadpool_limits(1) if size < SMALL else nullcontext()


class Learning(Training):
    """A program that learns by acting."""

    def run(self, world: MPI.Intracomm, options: Any, opened: list | None = None) -> Run:
        opened = [] if opened is None else opened
        number = local_rank(world)
        with refuse_together(world):
            device = open_device(options.device, number)
        spans = 0 if options.out == "none" else options.trace
        comm = Communicator(world, options.allreduce, options.timeout, spans, device)
        opened.append(comm.free)
        with refuse_together(world):
            environments = Environments(
                options.env,
                options.settings,
                options.envs,
                options.seed,
                pretend_ms=options.pretend_env,
                from_file=options.from_file("env"),
            )
            task = opened_task(options, environments)
            replay = made_replay(options, environments)
            network = QNetwork(
                environments.shape,
                environments.actions,
                options.model,
                options.dtype,
                device,
                options.loss,
                options.from_file("model"),
            )
            options.refuse_too_large(network, 1)
        run = Run(comm, options)
        with refuse_together(world):
            optimizer = run.make_optimizer(network, task)
            model = slowed(network, options, comm.rank, range(comm.size))
        with run, few_threads(network.size):
            self.train(comm, model, task, optimizer, run, environments, replay)
        comm.free()
        return run
