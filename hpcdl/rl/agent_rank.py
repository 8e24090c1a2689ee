"""The objects of a rank in a reinforcement learning run, and the summary entries that all such programs write."""

from dataclasses import dataclass
from typing import Any

from hpcdl.comm import Communicator
from hpcdl.models.model import unwrapped
from hpcdl.optim import Optimizer
from hpcdl.random import Random
from hpcdl.rl.agent import Actor
from hpcdl.rl.agent_state import ReturnScored
from hpcdl.rl.environments import Environments
from hpcdl.rl.q_network import QNetwork
from hpcdl.rl.replay import Replay
from hpcdl.rl.roles import RLRoles
from hpcdl.rl.tally import RankCounts
from hpcdl.rl.task import EnvironmentTask
from hpcdl.runs.ownership import Ownership
from hpcdl.runs.run import Run
from hpcdl.runs.stopwatch import Stopwatch


@dataclass(frozen=True)
class AgentRank:
    """The objects of a rank, whatever its roles. everyone: communicator of all ranks; comm: of all that train,
    or of all that assist. options: `RLOptions`. model: QNetwork or a straggler's wrapper. replay: None: no memory."""

    comm: Communicator
    everyone: Communicator
    options: Any
    random: Random
    stopwatch: Stopwatch
    roles: RLRoles
    model: Any
    task: EnvironmentTask
    optimizer: Optimizer
    environments: Environments
    replay: Replay | Any
    tally: RankCounts

    @property
    def network(self) -> QNetwork:
        network: QNetwork = unwrapped(self.model)
        return network

    def actor(self, add: Any, before: int = 0) -> Actor:
        """Return an actor. add: takes its steps. before: environment steps of earlier legs; numbers its episodes on."""
        if before:
            self.environments.load({"episodes": [before] * self.environments.count, "restarts": [0]})
        first = self.roles.first_copy(self.everyone.rank)
        return Actor(self.network, self.environments, self.random, add, first, since=before)

    def begin(self, run: Run, strategy: str, held: Ownership, scored: ReturnScored, **reported: Any) -> None:
        """Begin the run, report its settings; a resumed run must have equal --env, --gamma, --n-step and --replay."""
        names = ("env", "envs", "gamma", "n_step", "replay")
        fixed = {"env_options": self.options.settings, "environment_steps_per_step": self.options.per_step}
        fixed |= {name: getattr(self.options, name) for name in names}
        run.report(**fixed, **reported)
        run.begin(strategy, held, self.task, tuple(fixed), scored=scored)

    def report_end(self, run: Run, progress: dict, restarts: float) -> None:
        """Report the progress, and the rates and environment restarts over all legs."""
        done, per_step = run.progress, self.options.environment_steps(len(self.roles.learners))
        seconds = max(1e-9, done.seconds)
        run.report(
            **progress,
            environment_steps_per_second=done.step * per_step / seconds,
            updates_per_second=done.updates / seconds,
            environment_restarts=int(restarts),
        )
