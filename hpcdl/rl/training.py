"""From a command line to a reinforcement learning run: `Learning(DQN).main(arguments)` (launch/training.py).
Ranks that learn call `train(rank, run)`, other ranks `assist(rank, run)`; rank: an `AgentRank`."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pkgutil import resolve_name
from typing import Any

from mpi4py import MPI
from threadpoolctl import threadpool_limits

from hpcdl.comm import refuse_together
from hpcdl.faults.straggler import with_stragglers
from hpcdl.launch.training import Training, open_communicator
from hpcdl.rl.agent_rank import AgentRank
from hpcdl.rl.environments import Environments
from hpcdl.rl.options import ActingStrategy
from hpcdl.rl.q_network import QNetwork
from hpcdl.rl.replay import Replay
from hpcdl.rl.tally import BytesByKind, RankCounts
from hpcdl.rl.task import EnvironmentTask
from hpcdl.runs.context import RunContext
from hpcdl.runs.run import Run

SMALL = 1_000_000  # parameters


@dataclass(frozen=True)
class Learning(Training):
    """A reinforcement learning program."""

    strategy: ActingStrategy

    def refuse(self, options: Any, size: int) -> None:
        options.roles(size)  # first: its messages name the roles
        super().refuse(options, size)

    def run(
        self,
        world: MPI.Intracomm,
        options: Any,
        context: RunContext | None = None,
        opened: Any = None,
        starting: Callable[[], None] = lambda: None,
    ) -> Run:
        with refuse_together(world):
            roles = options.roles(world.size)
        learns, name = world.rank in roles.learners, self.strategy.assist
        assist = resolve_name(name) if name else None  # None: all ranks learn
        everyone = open_communicator(world, options, learns, [] if opened is None else opened)
        comm = everyone if assist is None else everyone.split(int(not learns), name="training")
        with refuse_together(world):
            acting = roles.envs if world.rank in roles.actors else 1
            make, first = partial(Environments, options.env, options.settings), roles.first_copy(world.rank)
            environments = make(acting, options.seed, first, options.pretend_env)
            shape, actions, dtype = environments.shape, environments.actions, environments.dtype
            task = EnvironmentTask(options.env, options.settings, make, environments, options.episodes)
            replay = None
            if world.rank in roles.memories:
                about = {name: getattr(options, name) for name in ("n_step", "gamma", "prioritized", "alpha")}
                about |= {"streams": roles.streams(world.rank), "stack": environments.stack}
                replay = Replay(roles.room(world.rank, options.replay), shape, dtype, **about)
            network = QNetwork(shape, actions, options.model, options.dtype, everyone.device, options.loss)
            options.refuse_too_large(network, 1)
        run = Run(comm, options, replace(context or RunContext(), everyone=everyone, workers=len(roles.learners)))
        with refuse_together(world):
            optimizer = run.make_optimizer(network, task)
            model = with_stragglers(network, options, everyone.rank, roles.learners)
        how, tally = (options, run.random, run.stopwatch, roles), RankCounts(BytesByKind(everyone.traffic))
        rank = AgentRank(comm, everyone, *how, model, task, optimizer, environments, replay, tally)
        starting()
        # More threads for the matrix products of a small network would mostly wait.
        with threadpool_limits(1) if network.size < SMALL else nullcontext():
            if assist is None or learns:
                with run:
                    self.strategy.loop(rank, run)
            else:
                assist(rank, run)
                run.leave()
        everyone.free()
        return run
