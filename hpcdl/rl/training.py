"""From a command line to a reinforcement learning run: code shared by its programs (launch/training.py).

    Learning(DQN).main(arguments)

calls `train(comm, model, task, optimizer, run, environments, replay)`, with the roles (roles.py) as a further argument
if there are several ranks.
"""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from mpi4py import MPI
from threadpoolctl import threadpool_limits

from hpcdl.comm import Communicator, refuse_together
from hpcdl.faults.straggler import with_stragglers
from hpcdl.kernels.device import open_device
from hpcdl.launch.training import Training, local_rank
from hpcdl.rl.environments import Environments
from hpcdl.rl.options import ActingStrategy, RLOptions
from hpcdl.rl.q_network import QNetwork
from hpcdl.rl.replay import Replay
from hpcdl.rl.roles import RLRoles
from hpcdl.rl.task import EnvironmentTask
from hpcdl.runs.context import RunContext
from hpcdl.runs.run import Run

SMALL = 1_000_000  # parameters


def make_task(options: RLOptions, environments: Environments) -> EnvironmentTask:
    """Return the environment as the run's task."""
    return EnvironmentTask(
        options.env, options.settings, partial(copies, options.env, options.settings), environments, options.episodes
    )


def copies(name: str, settings: dict[str, Any], count: int, seed: int, first: int) -> Environments:
    """Return copies of an environment for scoring a policy."""
    return Environments(name, settings, count, seed, first)


def make_replay(options: RLOptions, environments: Environments, roles: RLRoles, rank: int) -> Replay | None:
    """Return the replay memory of this rank for such environments; None if it has none."""
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
    """Context with one thread for matrix products of a small network: more threads would mostly wait."""
    return threadpool_limits(1) if size < SMALL else nullcontext()


@dataclass(frozen=True)
class Learning(Training):
    """A reinforcement learning program."""

    strategy: ActingStrategy

    def refuse(self, options: Any, size: int) -> None:
        options.roles(size)  # first: it knows the roles by their names
        super().refuse(options, size)

    def run(
        self,
        world: MPI.Intracomm,
        options: Any,
        context: RunContext | None = None,
        opened: list | None = None,
    ) -> Run:
        opened, context = [] if opened is None else opened, context or RunContext()
        number, assist = local_rank(world), self.strategy.assistance
        with refuse_together(world):
            roles = options.roles(world.size)
            learns = world.rank in roles.learners
            device = open_device(options.device if learns else "cpu", number)
        spans = 0 if options.out == "none" else options.trace
        everyone = Communicator(world, options.allreduce, options.timeout, spans, device, check=options.checks.asked)
        opened.append(everyone.free)
        comm = everyone if assist is None else everyone.split(int(not learns), name="training")
        with refuse_together(world):
            environments = Environments(
                options.env,
                options.settings,
                roles.envs if world.rank in roles.actors else 1,
                options.seed,
                roles.first_copy(world.rank),
                options.pretend_env,
            )
            task = make_task(options, environments)
            replay = make_replay(options, environments, roles, world.rank)
            network = QNetwork(
                environments.shape,
                environments.actions,
                options.model,
                options.dtype,
                device,
                options.loss,
            )
            options.refuse_too_large(network, 1)
        run = Run(comm, options, replace(context, everyone=everyone, workers=len(roles.learners)))
        with refuse_together(world):
            optimizer = run.make_optimizer(network, task)
            model = with_stragglers(network, options, everyone.rank, roles.learners)
        more = () if self.strategy.ranks == 1 else (roles,)
        if assist is not None and not learns:
            with few_threads(network.size):
                assist(everyone, network, run, environments, replay, roles)
            run.leave()
        else:
            with run, few_threads(network.size):
                self.strategy.loop(comm, model, task, optimizer, run, environments, replay, *more)
        everyone.free()
        return run
