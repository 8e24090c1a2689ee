"""Learn to act on many ranks, by gradients to parameter servers: mpiexec -n 5 python scripts/train_gorila.py

Each rank but the servers is a bundle of an actor, a replay memory and a learner; with --actors and --learners they are
ranks of their own. --consistency bsp has the learners push together; with one bundle that is DQN.
"""

from hpcdl.rl.training import Learning  # first: it takes over the signals before MPI starts

# isort: split
from dataclasses import dataclass
from typing import Literal

from hpcdl.errors import UsageError
from hpcdl.parameter_server.consistency import Consistency
from hpcdl.rl.gorila import train
from hpcdl.rl.options import RLOptions
from hpcdl.rl.roles import RLRoles, bundle_roles, separate_roles
from hpcdl.runs.help import dashed
from hpcdl.runs.options import option


@dataclass
class GorilaOptions(RLOptions):
    sharing = 1  # learners whose pushes are one step of the run

    servers: int = option(1, "how many ranks hold the parameters, a slice each")
    actors: int = option(0, "with --learners: ranks that only act; 0: those that are left over")
    learners: int = option(0, "ranks that learn from what others see; 0: each rank acts and learns")
    consistency: Literal["bsp", "async"] = option(
        "async", "bsp: learners push in rounds; async: none waits for another"
    )
    sync_every: int = option(16, "environment steps of an actor before it takes the newest parameters again")
    chunk: int = option(16, "with --learners: steps of each copy of the environment that an actor sends at once")
    max_staleness: int = option(0, "discard gradients from parameters more than so many updates old; 0: none")
    outliers: float = option(5.0, "discard gradients whose loss is so many deviations over the mean; 0: none")

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("actors", "learners", "max_staleness", "outliers"):
            self._refuse_negative(name)
        for name in ("servers", "sync_every", "chunk"):
            if getattr(self, name) < 1:
                raise UsageError(f"--{dashed(name)} must be greater than 0, not {getattr(self, name)}")
        if (self.actors or self.learners) and self.consistency == "bsp":
            raise UsageError("--consistency bsp is for bundles: with --actors and --learners none waits for another")

    @property
    def chosen(self) -> Consistency:
        return Consistency(self.consistency)

    def roles(self, size: int) -> RLRoles:
        if self.actors or self.learners:
            found = separate_roles(size, self.servers, self.learners, self.actors, self.envs)
        else:
            found = bundle_roles(size, self.servers, self.envs)
        self.sharing = len(found.learners) if self.consistency == "bsp" else 1
        self.check_apart(found)
        return found

    @property
    def per_step(self) -> int:  # type: ignore[override]
        """Environment steps of a step of the run: those of a push, of each learner under bsp."""
        return self.train_every * self.sharing

    @property
    def updates_per_step(self) -> int:
        """Batches of a step of the run."""
        return self.sharing

    def acts_before(self, push: int) -> int:
        """How often all copies act before a learner's push of this number."""
        return (
            self.train_every // self.envs
            if self.envs <= self.train_every
            else not push % (self.envs // self.train_every)
        )


TRAINING = Learning("train-gorila", GorilaOptions, __doc__, train)
main = TRAINING.main


if __name__ == "__main__":
    main()
