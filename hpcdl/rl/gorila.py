"""Gorila: actors, learners and replay memories on many ranks, parameters on servers, gradients as messages.

    bundle, repeats                                                            parameter server, for its slice
        theta  <- pull                                              <------    theta
        theta' <- theta, every target_every versions                           repeats
        act: train_every environment steps, by the theta of the last sync        g <- push of a learner
             -> its own replay memory                                            discard what is too stale
        g <- the gradient of a sample; discard it if its loss is an outlier      theta <- theta - lr * g, or the
        push g                                                      ------>               optimizer's rule

With separate actors and learners, an actor pulls, acts, and sends its steps to its learner (remote_actor.py), which
makes an update per train_every steps received.

Discarded (section 5 of the paper): by the servers, a gradient of parameters more than --max-staleness versions old; by
the learner, one whose loss is more than --outliers standard deviations over the mean of that learner's losses.

A step of the run is a push, of train_every environment steps; under bsp a push of each learner. One bundle under bsp,
with a sync before each step, is DQN, to the bit.

(Nair et al., "Massively parallel methods for deep reinforcement learning", 2015)
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from hpcdl.checkpoint.state import Tracked
from hpcdl.comm import Communicator
from hpcdl.comm.failure import refuse_together
from hpcdl.kernels.device import CPU, Array
from hpcdl.kernels.norm import sum_of_squares
from hpcdl.models.model import unwrapped
from hpcdl.optim import Optimizer
from hpcdl.parameter_server.parameter_store import ParameterStore
from hpcdl.parameter_server.run_on_servers import OnServers, request_step
from hpcdl.parameter_server.slice_server import Beside
from hpcdl.parameter_server.store_messages import Push
from hpcdl.parameter_server.store_settings import Serving, StoreLayout
from hpcdl.random import Random
from hpcdl.rl.agent import Actor, Epsilon, Learner
from hpcdl.rl.agent_state import ReturnScored, state_of, tracked_state
from hpcdl.rl.dqn import FIXED, fixed_summary, rate_summary
from hpcdl.rl.outliers import OutlierDetector
from hpcdl.rl.q_network import QNetwork
from hpcdl.rl.remote_actor import act, failing_alone, make_actor, make_recorder
from hpcdl.rl.replay_checkpoint import restore_replay, save_if_due
from hpcdl.rl.roles import RLRoles
from hpcdl.rl.tally import BytesByKind, RankCounts
from hpcdl.rl.task import EnvironmentTask
from hpcdl.rl.transition_stream import ChunkReceiver, ChunkSender
from hpcdl.runs.run import Run
from hpcdl.runs.stopwatch import Stopwatch
from hpcdl.strategies.parameter_server import Updates


def train(
    comm: Communicator,
    model: Any,
    task: EnvironmentTask,
    optimizer: Optimizer,
    run: Run,
    environments: Any,
    replay: Any,
    roles: RLRoles,
) -> None:
    """Learn on all ranks of `comm`, each by its role. run.options: those of the program."""
    options, random, stopwatch = run.options, run.random, run.stopwatch  # type: Any, Any, Stopwatch
    network: QNetwork = unwrapped(model)
    servers, serves, leads = len(roles.servers), comm.rank in roles.servers, comm.rank == 0
    layout = StoreLayout(network.size, comm.size, network.dtype, servers)
    per_step = options.environment_steps(len(roles.learners))
    group = run.until_end(comm.split(0 if serves else None, name="servers", allreduce="tree"))
    optimizer = optimizer.of_size(layout.length(comm.rank))
    by_kind = BytesByKind(comm.traffic)
    tally = RankCounts(by_kind)
    initial = CPU.array(network.initialize(random)) if leads else None
    pulled: Any = None if serves else network.device.empty(network.size, network.dtype)
    parameters = pulled if initial is None else initial
    ownership = GorilaOwnership(run, model, parameters, optimizer, not serves, tally, roles.servers, per_step)
    run.report(
        allreduce=None, consistency=options.consistency, staleness=0, servers=servers, **fixed_summary(task, options)
    )
    run.report(learners=len(roles.learners), actors=len(roles.actors), bundles=not roles.acts_elsewhere)
    run.begin("gorila", ownership, task, FIXED)
    updates = StalenessFilter(optimizer, group, options.chosen, options.max_staleness)
    store = ParameterStore(
        comm,
        layout,
        Serving(options.chosen),
        update=updates,
        initial=initial,
        start=(first := run.step),
        horizon=ownership.horizon_of_store if leads else None,
        memory=run.memory,
        beside=Beside(RankCounts.length, tally.packed, tally.take),
    )
    ownership.follow(store)
    with refuse_together(comm.mpi):
        restore_replay(options, replay, comm.rank)
    with run.going_on():
        if serves:
            with stopwatch.step("serve"):
                if leads:
                    for loss, total in store.completed_steps():
                        run.record(loss, int(total))
                        run.boundary(store.signalled or bool(tally["signal"]))
                else:
                    store.serve()
            by_kind.rest("parameters")
        elif comm.rank in roles.learners:
            save = partial(save_if_due, options, per_step, run.folder.path, replay, comm.rank)
            about = options, random, stopwatch, first, run.steps, save
            Bundle(comm, store, model, *about, environments, replay, roles, pulled, tally).learn()
        else:
            run_actor(comm, store, network, options, random, stopwatch, first, environments, roles, pulled, tally)
        if leads:
            run.report(staleness_histogram=store.staleness_histogram)
            rates = rate_summary(run.progress, per_step, tally["restarts"])
            run.report(**ownership.progress(), **rates)
        discarded = updates.discarded if serves else int(tally.local[3])
        run.report_own(bytes_by_kind=dict(by_kind.sent), discarded=discarded)
    store.free()
    ownership.raise_failure()


class Bundle:
    """A learner with its replay memory, which also acts if there are no separate actors. parameters: as pulled.

    first, steps: the run's step with which this leg begins, and the last one. save: `save_if_due`, of this memory.
    """

    def __init__(
        self,
        comm: Communicator,
        store: ParameterStore,
        model: Any,
        options: Any,
        random: Random,
        stopwatch: Stopwatch,
        first: int,
        steps: int,
        save: Callable[..., int],
        environments: Any,
        replay: Any,
        roles: RLRoles,
        parameters: Array,
        tally: RankCounts,
    ):
        self.comm, self.store, self.model, self.replay, self.save = comm, store, model, replay, save
        self.random, self.stopwatch, self.first, self.steps = random, stopwatch, first, steps
        assert tally.by_kind is not None
        by_kind = tally.by_kind
        self.options, network = options, unwrapped(model)  # type: Any, QNetwork
        self.parameters, self.gradient = parameters, network.device.zeros(network.size, network.dtype)
        self.target = network.device.zeros(network.size, network.dtype) if options.target_every else None
        self.learner = Learner(network, self.target, options.double == "yes")
        self.tally, self.by_kind, self.environments = tally, by_kind, environments
        self.number, self.all = roles.learners.index(comm.rank), len(roles.learners)
        self.epsilon, self.outliers = Epsilon.read(options.epsilon), OutlierDetector(options.outliers)
        self.pushes, self.updates = 0, first  # at least those of earlier legs, so random keys do not repeat
        self.version = -math.inf  # version of the target network, in units of target_every
        self.actor: Actor | None = None
        self.intake: ChunkReceiver | None = None
        if roles.acts_elsewhere:
            actors = roles.actors_of(comm.rank)
            self.intake = ChunkReceiver(comm, actors, roles.envs, replay, tally, by_kind)
            self.slack = options.chunk * roles.streams(comm.rank)
            store.client.attend = self.intake.attend
        else:
            earlier_steps = first * options.environment_steps(len(roles.learners))
            self.actor = make_actor(
                network, environments, random, replay.add, roles.first_copy(comm.rank), earlier_steps
            )
            self.acting, self.synced = parameters.copy(), -math.inf  # parameters that it acts by, and their step

    def learn(self) -> None:
        """Learn until no step is left."""
        if self.actor is not None:
            self.actor.begin()
        saved = self.first
        while True:
            with self.stopwatch.step():
                with self.by_kind("parameters"):
                    step = request_step(self.comm, self.store, self.stopwatch, self.store.pull, self.parameters)
                if step is None:
                    break
                saved = self.save(step, saved)
                self._follow()
                if self.intake is None:
                    self._act(step)
                else:
                    self._receive()
                self._push(step)
        self.save()
        if self.intake is not None:
            self.intake.close()
        with self.by_kind("parameters"):
            self.store.close(self.parameters)

    def _follow(self) -> None:
        """Copy the pulled parameters to the target network if target_every versions have passed."""
        every, version = self.options.target_every, self.store.client.connections[0].version
        if self.target is not None and version // every > self.version:
            self.target[:] = self.parameters
            self.version = version // every

    def _act(self, step: int) -> None:
        """Take the environment steps before a push; the acting parameters are synchronized now and then."""
        options: Any = self.options
        actor, times = self.actor, options.acts_before(self.pushes)
        assert actor is not None
        steps = actor.steps * options.envs
        if times and steps - self.synced >= options.sync_every:
            self.acting[:], self.synced = self.parameters, steps
        with self.stopwatch.fetching(), failing_alone():
            for i in range(times):
                own_steps = step * options.per_step + i * options.envs
                actor.act(self.acting, self.epsilon(options.sharing(self.all) * own_steps))
        self.tally.note(actor, self.environments)

    def _receive(self) -> None:
        """Wait until the actors have sent the environment steps of this push."""
        needed = (self.pushes + 1) * self.options.train_every
        assert self.intake is not None
        self.intake.allow(needed + self.slack)
        self.intake.look()
        self.comm.wait_until(lambda: self.intake.steps >= needed, self.intake.attend)  # type: ignore[union-attr]

    @property
    def ready(self) -> bool:
        """True if the memory holds enough transitions to learn from, or is full."""
        enough = max(-(-self.options.learning_starts // self.all), self.options.batch_size)
        return self.replay.size >= enough or self.replay.written >= self.replay.capacity

    def _push(self, step: int) -> None:
        """Push a gradient, or an empty one if it is too early to learn or the loss is an outlier."""
        options, loss, rows = self.options, 0.0, 0
        self.pushes += 1
        if self.ready:
            beta = options.beta + (1 - options.beta) * step / self.steps
            generator = self.random("sample", self.updates * self.all + self.number)
            sample = self.replay.sample(options.batch_size, beta, generator)
            self.gradient[:] = 0
            loss, errors = self.learner.gradient(
                self.parameters, sample, self.gradient, self.model, self.updates * self.all + self.number
            )
            self.updates += 1
            if options.prioritized:
                self.replay.update(sample.index, sample.serial, errors)
            rows = options.batch_size
            if self.outliers.is_outlier(loss / rows):
                self.tally.discard()
                rows = 0
        with self.by_kind("gradients"):
            if rows:
                norm = math.sqrt(sum_of_squares(self.gradient)) if options.clip_norm > 0 else 0.0
                self.store.push(self.gradient, count=rows, total=rows, loss=loss, norm=norm)
            else:
                self.store.push(self.gradient[:0], slice(0, 0), count=0, total=0)


def run_actor(
    comm: Communicator,
    store: ParameterStore,
    network: QNetwork,
    options: Any,
    random: Random,
    stopwatch: Stopwatch,
    first: int,
    environments: Any,
    roles: RLRoles,
    parameters: Array,
    tally: RankCounts,
) -> None:
    """Run an actor on a rank of its own: it reads the parameters, acts, and sends its steps.

    first: the run's step with which this leg begins.
    """
    assert tally.by_kind is not None
    recorder, by_kind = make_recorder(options, environments), tally.by_kind
    earlier_steps = first * options.environment_steps(len(roles.learners))
    actors = len(roles.actors)
    actor = make_actor(network, environments, random, recorder.add, roles.first_copy(comm.rank), earlier_steps)
    feeder = ChunkSender(comm, roles.memory_of(comm.rank), tally, by_kind)
    epsilon, synced = Epsilon.read(options.epsilon), -math.inf

    def newest(steps: int) -> Array:
        nonlocal synced
        if steps - synced >= options.sync_every:
            with by_kind("parameters"):
                store.peek(parameters)
            synced = steps
        return parameters

    act(
        stopwatch,
        actor,
        recorder,
        feeder,
        tally,
        newest,
        # Steps of all actors: the others are about as fast as this one.
        lambda: epsilon(earlier_steps + actor.steps * options.envs * actors),
    )
    with by_kind("parameters"):
        store.close(parameters)


class StalenessFilter(Updates):
    """The optimizer's step for each push, except empty ones and those of parameters over `most` versions old."""

    def __init__(self, optimizer: Optimizer, group: Any, consistency: Any, most: int):
        super().__init__(optimizer, group, consistency, aware=False)
        self.most, self.discarded = most, 0

    def __call__(self, values: np.ndarray, gradient: np.ndarray, push: Push) -> bool:  # type: ignore[override]
        """Apply a push; True if it changed the parameters."""
        too_stale = 0 < self.most < push.staleness
        self.discarded += too_stale and push.count > 0
        if too_stale or push.count == 0:
            return False
        # The rate follows the run's steps as the learner saw them: empty pushes make no version.
        super().__call__(values, gradient, push._replace(step=push.seen))
        return True


class GorilaOwnership(ReturnScored, OnServers):
    """Ownership of parameters on servers, scored by the returns of episodes."""

    def __init__(
        self,
        run: Run,
        model: Any,
        parameters: Array | None,
        optimizer: Optimizer,
        works: bool,
        tally: RankCounts,
        servers: range,
        per_step: int,
    ):
        super().__init__(run, model, parameters, optimizer, works)
        self.tally, self.servers, self.per_step, self.of_actors = tally, servers, per_step, dict[str, np.ndarray]()

    def tracked(self) -> dict[str, Tracked]:
        return super().tracked() | (tracked_state("actor", self, self.of_actors) if self.leads else {})

    def state(self) -> dict[str, np.ndarray]:
        """Return the counts of all ranks for a checkpoint."""
        self._count_servers()
        return self.tally.state()

    def _count_servers(self) -> None:
        """Servers report no counts: take their bytes as their answers have said."""
        for rank in self.servers:
            if rank in self.others_sent:
                self.tally.note_sent(rank, "parameters", self.others_sent[rank][0])

    def resumed(self, everyone: Communicator) -> None:
        super().resumed(everyone)
        if self.of_actors:
            self.tally.load(state_of("actor", self.of_actors))

    def scores(self, data: Any) -> dict:
        return data.scores(self.network, self.parameters) | self.tally.scores() | self.progress()

    def progress(self) -> dict:
        """Return environment steps, updates, replay ratio, discarded gradients and bytes by kind."""
        progress = self.run.progress
        steps = progress.step * self.per_step
        self._count_servers()
        assert self.tally.by_kind is not None
        self.tally.by_kind.rest("parameters")  # rank 0 sends nothing else
        return {
            "environment_steps": steps,
            "updates": self.optimizer.step,
            "replay_ratio": progress.examples / max(1, steps),
            "discarded_outliers": int(self.tally["discarded"]),
        } | self.tally.bytes_by_kind()
