"""From a command line to a run of reinforcement learning: what the programs of it share (launch/training.py).

    TRAINING = Learning("train-dqn", RLOptions, __doc__, train, ranks=1)
    TRAINING.main()

calls `train(comm, model, task, optimizer, run, environments, replay)`, and where there are several ranks gives it the
roles, too (roles.py).
"""

from hpcdl.launch.training import Training  # first: it takes over the signals before MPI starts

# isort: split
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

from mpi4py import MPI
from threadpoolctl import threadpool_limits

from hpcdl.comm import Communicator, refuse_together
from hpcdl.faults.straggler import slowed
from hpcdl.kernels.device import open_device
from hpcdl.launch.training import local_rank
from hpcdl.rl.environments import Environments
from hpcdl.rl.options import RLOptions
from hpcdl.rl.q_network import QNetwork
from hpcdl.rl.replay import Replay
from hpcdl.rl.roles import RLRoles
from hpcdl.rl.task import EnvironmentTask
from hpcdl.runs.run import Run
from hpcdl.runs.segments import measured
from hpcdl.runs.summary import conclude

SMALL = 1_000_000  # parameters


def opened_task(options: RLOptions, environments: Environments) -> EnvironmentTask:
    """The environment as the run sees it."""
    return EnvironmentTask(
        options.env, options.settings, partial(copies, options.env, options.settings), environments, options.episodes
    )


def copies(name: str, settings: dict[str, Any], count: int, seed: int, first: int) -> Environments:
    """So many copies of an environment that score a policy."""
    return Environments(name, settings, count, seed, first)


def made_replay(options: RLOptions, environments: Environments, roles: RLRoles, rank: int) -> Replay | None:
    """The replay memory of this rank, for what such environments show; None where it has none."""
    if rank not in roles.memories:
        return None
    return Replay(
        roles.room(rank, options.replay),
        environments.shape,
        environments.dtype,
        streams=roles.streams(rank),
        stack=environments.stack,
        n_step=options.n_step,
        gamma=options.gamma,
        prioritized=options.prioritized,
        alpha=options.alpha,
    )


def few_threads(size: int) -> AbstractContextManager:
    """One thread for the products of a small network: several would wait for each other longer than they compute."""
    return threadpool_limits(1) if size < SMALL else nullcontext()


@dataclass(frozen=True)
class Learning(Training):
    """A program that learns by acting.

    train: also of (roles), where there are several. assist(comm, network, run, environments, replay, roles): what ranks
    do that do not learn; then `comm` of train, as that of the run, is of the learners alone, and that of assist of all.
    """

    assist: Callable | None = None

    def refuse(self, options: Any, size: int) -> None:
        options.roles(size)  # first: it knows the roles by their names
        super().refuse(options, size)

    def run(self, world: MPI.Intracomm, options: Any, opened: list | None = None) -> Run:
        opened = [] if opened is None else opened
        number = local_rank(world)
        with refuse_together(world):
            roles = options.roles(world.size)
            learns = world.rank in roles.learners
            device = open_device(options.device if learns else "cpu", number)
        spans = 0 if options.out == "none" else options.trace
        everyone = Communicator(world, options.allreduce, options.timeout, spans, device, check=options.checks.asked)
        opened.append(everyone.free)
        comm = everyone if self.assist is None else everyone.split(int(not learns), name="training")
        with refuse_together(world):
            environments = Environments(
                options.env,
                options.settings,
                roles.envs if world.rank in roles.actors else 1,
                options.seed,
                roles.first_copy(world.rank),
                options.pretend_env,
            )
            task = opened_task(options, environments)
            replay = made_replay(options, environments, roles, world.rank)
            network = QNetwork(
                environments.shape,
                environments.actions,
                options.model,
                options.dtype,
                device,
                options.loss,
            )
            options.refuse_too_large(network, 1)
        run = Run(comm, options, everyone, len(roles.learners))
        with refuse_together(world):
            optimizer = run.make_optimizer(network, task)
            model = slowed(network, options, everyone.rank, roles.learners)
        more = () if self.ranks == 1 else (roles,)
        if self.assist is not None and not learns:
            with few_threads(network.size):
                self.assist(everyone, network, run, environments, replay, roles)
            _, run.stopping.reason = conclude(everyone, measured(run))
            run.bookkeeping.free()
        else:
            with run, few_threads(network.size):
                self.train(comm, model, task, optimizer, run, environments, replay, *more)
        everyone.free()
        return run
