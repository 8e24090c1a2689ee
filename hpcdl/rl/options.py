"""Options of the reinforcement learning programs, in units of environment steps, and their descriptions.

A step of the run is what happens between two updates, with `per_step` environment steps:

    --env-steps 100000 --train-every 4 --envs 2       25,000 steps of 4 environment steps, an update each
    --env-steps 100000 --train-every 1 --envs 8       12,500 steps of 8 environment steps, 8 updates each
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from hpcdl.errors import UsageError
from hpcdl.faults.clock import LONGEST
from hpcdl.formatting import dashed
from hpcdl.parameter_server.consistency import Consistency
from hpcdl.plugins import setting
from hpcdl.rl.roles import RLRoles, bundle_roles, separate_roles, sharded_roles, single_rank_roles
from hpcdl.runs.options import Options, option
from hpcdl.strategies.description import Strategy, named


@dataclass(frozen=True)
class RLOptions(Options):
    """Options shared by all reinforcement learning programs. Raises UsageError for invalid values."""

    unused = (
        *("data", "placement", "partition", "validation", "augment", "standardize", "data_servers"),
        *("epochs", "steps", "batch_per_rank", "accumulate", "patience"),
    )

    env: str = option(
        "CartPole-v1", "environment: a name that gymnasium knows, or your package.module:function, which makes one"
    )
    env_options: str = option("", "its settings, as sutton_barto_reward=True, several with commas between")
    env_steps: int = option(60_000, "environment steps, of all copies together")
    envs: int = option(1, "copies of the environment that act side by side, on each rank that acts")
    pretend_env: float = option(0.0, "milliseconds that an environment step takes at least; the rest is slept")
    replay: int = option(100_000, "transitions that the replay memory holds")
    prioritized: bool = option(False, "draw from it by priorities, the last temporal-difference errors")
    alpha: float = option(0.6, "with --prioritized: the exponent of priorities")
    beta: float = option(0.4, "with --prioritized: the exponent of importance weights, which rises to 1 by the end")
    n_step: int = option(3, "rewards of a return, before the value of a state takes their place")
    gamma: float = option(0.99, "discount of what comes a step later")
    double: Literal["yes", "no"] = option(
        "yes", "double DQN: the target network values the action that the network itself likes best", bare="yes"
    )
    target_every: int = option(128, "updates between copies to the target network; 0: there is none")
    learning_starts: int = option(1000, "transitions in the replay memory before the first update")
    train_every: int = option(2, "environment steps for each update")
    epsilon: str = option(
        "linear:last=0.04,steps=8000",
        "probability of a random action: a number, or linear:first=1,last=0.04,steps=8000 by environment steps",
    )
    episodes: int = option(20, "episodes of an evaluation, of the greedy policy, with the same seeds each time")
    save_replay: bool = option(False, "keep the replay memory in checkpoints: what is gone on with is as never stopped")

    model: str = option("mlp:64,64,dueling", "mlp:128,128 (widths), with dueling streams or without, or torch:nets:cnn")
    loss: str = option("huber", "of an error: huber:delta=1, or squared")
    batch_size: int | str = option(64, "transitions of an update")
    lr: float = option(2e-3, "learning rate (step size)")
    clip_norm: float = option(10.0, "largest allowed 2-norm of the mean gradient; 0: any")
    optimizer: str = option("adam", "sgd, momentum, nesterov, adam, adamw, adagrad; as in adam:beta1=0.9")
    evaluate_every: int = option(10_000, "environment steps between evaluations")
    checkpoint_every: int = option(0, "environment steps between checkpoints; 0: only when the run ends")

    def __post_init__(self) -> None:
        from hpcdl.rl.agent import Epsilon
        from hpcdl.rl.q_network import delta_of

        plain = Options()
        for name in self.unused:
            if getattr(self, name) != getattr(plain, name):
                raise UsageError(f"--{dashed(name)}: this program learns in an environment (--env), not from data")
        super().__post_init__()
        if isinstance(self.batch_size, str):
            raise UsageError("--batch-size: a number of transitions")
        self._check_numbers()
        Epsilon.read(self.epsilon)
        delta_of(self.loss)
        _ = self.settings
        long, short = max(self.train_every, self.envs), min(self.train_every, self.envs)
        if long % short:
            raise UsageError(
                f"--train-every {self.train_every} and --envs {self.envs}: one must be a multiple of the other, "
                "for all copies act together"
            )

    def roles(self, size: int) -> RLRoles:
        """Return the roles of `size` ranks. Raises UsageError if these or other options do not fit together."""
        for name in ("evaluate_every", "checkpoint_every"):
            if getattr(self, name) % self.per_step:
                raise UsageError(
                    f"--{dashed(name)} {getattr(self, name)}: it must be a multiple of {self.per_step} environment "
                    "steps, the larger one of --train-every and --envs"
                )
        return single_rank_roles(self.envs)

    def check_apart(self, roles: RLRoles) -> None:
        """Raise UsageError if the memories can never hold enough, or a step of all ranks is too long."""
        room = sum(roles.room(each, self.replay) - roles.streams(each) * (self.n_step + 2) for each in roles.memories)
        for name in ("batch_size", "learning_starts"):
            if room < getattr(self, name):
                raise UsageError(
                    f"--{dashed(name)} {getattr(self, name):,}: the replay memories of {len(roles.memories)} ranks "
                    f"never hold more than {max(0, room):,} of the --replay {self.replay:,}; give a larger one"
                )
        shortest = self.environment_steps(len(roles.learners))
        for name in ("evaluate_every", "checkpoint_every"):
            if 0 < getattr(self, name) < shortest:
                raise UsageError(f"--{dashed(name)} must be at least {shortest} environment steps, a step of all")

    def _check_numbers(self) -> None:
        for name in ("env_steps", "envs", "replay", "n_step", "train_every", "episodes"):
            if getattr(self, name) < 1:
                raise UsageError(f"--{dashed(name)} must be greater than 0, not {getattr(self, name)}")
        for name in ("pretend_env", "alpha", "target_every", "learning_starts"):
            self._refuse_negative(name)
        if self.pretend_env > LONGEST:
            raise UsageError(f"--pretend-env is {LONGEST:,.0f} at most, not {self.pretend_env}")
        for name in ("gamma", "beta"):
            if not 0 <= getattr(self, name) <= 1:
                raise UsageError(f"--{name} is at least 0 and at most 1, not {getattr(self, name)}")
        if not math.isfinite(self.alpha):
            raise UsageError(f"--alpha is a number, not {self.alpha}")
        for name in ("batch_size", "learning_starts"):
            if self.room < getattr(self, name):
                raise UsageError(
                    f"--{dashed(name)} {getattr(self, name):,}: the replay memory never holds more than "
                    f"{self.room:,} of the --replay {self.replay:,}; give a larger one"
                )

    @property
    def room(self) -> int:
        """Transitions that can be drawn from a full replay memory, if no episode is truncated."""
        return self.replay - self.envs * (self.n_step + 2)

    @property
    def per_step(self) -> int:
        """Environment steps between two updates of a learner."""
        return max(self.train_every, self.envs)

    def sharing(self, learners: int) -> int:
        """How many of so many learners take part in a step of the run, each with `per_step` environment steps."""
        return 1

    def environment_steps(self, workers: int) -> int:
        return self.per_step * self.sharing(workers)

    @property
    def updates_per_step(self) -> int:
        """Updates of a learner per step of the run."""
        return max(1, self.envs // self.train_every)

    @property
    def settings(self) -> dict[str, Any]:
        """The settings of the environment, by name."""
        option = f"--env-options {self.env_options}"
        return dict(setting(item, option) for item in filter(None, self.env_options.split(",")))

    @property
    def advice(self) -> str:
        return "a smaller --lr or a --clip-norm may help, or rewards that are scaled"

    def plan(self, ranks: int, data: Any) -> tuple[int, int, int]:
        """Return (transitions of an update, steps between evaluations, steps in all)."""
        batch, per_step = int(self.batch_size), self.environment_steps(ranks)
        updates = self.updates_per_step * self.sharing(ranks)
        return (
            batch,
            max(1, self.evaluate_every // per_step),
            self.allowance.steps(math.ceil(self.env_steps / per_step), batch * updates),
        )


@dataclass(frozen=True)
class GorilaOptions(RLOptions):
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
        self.check_apart(found)
        return found

    def sharing(self, learners: int) -> int:
        return learners if self.consistency == "bsp" else 1

    @property
    def per_step(self) -> int:
        return self.train_every

    @property
    def updates_per_step(self) -> int:
        return 1

    def acts_before(self, push: int) -> int:
        """How often all copies act before a learner's push of this number."""
        return (
            self.train_every // self.envs
            if self.envs <= self.train_every
            else not push % (self.envs // self.train_every)
        )


@dataclass(frozen=True)
class ApexOptions(RLOptions):
    updates_per_step = 1

    learners: int = option(1, "ranks that learn, together by all-reduce")
    replays: int = option(1, "ranks that hold a part of the replay memory; 0: each learner holds one")
    actors: int = option(0, "ranks that act; 0: those that are left over")
    uniform: bool = option(False, "draw uniformly from the replay memory, not by priorities")
    epsilon: str = option("0.4", "probability of a random action of the boldest actor: a number, or linear:first=...")
    epsilon_alpha: float = option(7.0, "of actor i of N the probability is epsilon^(1 + i / (N - 1) * this)")
    broadcast_every: int = option(8, "updates between broadcasts of the parameters to actors")
    chunk: int = option(16, "steps of each copy of the environment that an actor sends at once")
    free: bool = option(False, "learn as often as the learner can, whatever --train-every says")

    def __post_init__(self) -> None:
        object.__setattr__(self, "prioritized", not self.uniform)
        super().__post_init__()
        for name in ("replays", "actors", "epsilon_alpha"):
            self._refuse_negative(name)
        if not math.isfinite(self.epsilon_alpha):
            raise UsageError(f"--epsilon-alpha is a number, not {self.epsilon_alpha}")
        for name in ("learners", "broadcast_every", "chunk"):
            if getattr(self, name) < 1:
                raise UsageError(f"--{dashed(name)} must be greater than 0, not {getattr(self, name)}")

    def roles(self, size: int) -> RLRoles:
        found = sharded_roles(size, self.learners, self.replays, self.actors, self.envs)
        if int(self.batch_size) < self.learners:
            raise UsageError(f"--batch-size {self.batch_size}: {self.learners} learners share it; give a larger one")
        self.check_apart(found)
        return found

    @property
    def per_step(self) -> int:
        return self.train_every


@dataclass(frozen=True)
class ActingStrategy(Strategy):
    """A way to learn by acting: train(comm, model, task, optimizer, run, environments, replay), and roles, if several.

    assist(comm, network, run, environments, replay, roles), by its name: what ranks do that do not learn; then `comm`
    of train, as that of the run, is of the learners alone, and that of assist of all.
    """

    assist: str = ""

    def __post_init__(self) -> None:
        """No forecast is asked for: how long an episode is, nobody knows before."""

    @property
    def assistance(self) -> Callable | None:
        """`assist`, imported; None where all ranks learn."""
        return named(self.assist) if self.assist else None


DQN = ActingStrategy("train-dqn", RLOptions, "hpcdl.rl.dqn:train", ranks=1)
GORILA = ActingStrategy("train-gorila", GorilaOptions, "hpcdl.rl.gorila:train")
APEX = ActingStrategy("train-apex", ApexOptions, "hpcdl.rl.apex:train", assist="hpcdl.rl.apex:assist")
