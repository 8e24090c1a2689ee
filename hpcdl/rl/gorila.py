"""Gorila: actors, learners and replay memories on many ranks, and parameters on servers, by gradients.

    bundle, for ever                                                           parameter server, for its slice
        theta  <- pull                                              <------    theta
        theta' <- theta, after each so many versions                           for ever
        act: train_every environment steps, by the theta of the last sync        g <- push of a learner
             -> its own replay memory                                            discard what is too stale
        g <- the gradient of a sample; discard it where its loss is an outlier   theta <- theta - lr * g, or the
        push g                                                      ------>               optimizer's rule

With actors and learners apart, an actor pulls, acts, and sends what it sees to its learner (remote_actor.py), which
learns as often as it is sent train_every steps.

What is discarded (section 5 of the paper): a gradient from parameters more than so many versions old, by the servers;
and one whose loss is beyond so many standard deviations over the mean of that learner's losses, by the learner.

A step of the run is a push, of train_every environment steps; under bsp a push of each learner. One bundle under bsp,
with a sync before each step, is DQN, to the bit.

(Nair et al., "Massively parallel methods for deep reinforcement learning", 2015)
"""

import math
from typing import Any

import numpy as np

from hpcdl.checkpoint.state import Tracked
from hpcdl.comm import Communicator
from hpcdl.comm.failure import refuse_together
from hpcdl.kernels.device import CPU, Array
from hpcdl.kernels.norm import sum_of_squares
from hpcdl.models.model_wrapper import plain
from hpcdl.optim import Optimizer
from hpcdl.parameter_server.parameter_store import ParameterStore, cut_slices
from hpcdl.parameter_server.run_on_servers import Keeper, OnServers, asked
from hpcdl.parameter_server.step_coordinator import LedStore
from hpcdl.parameter_server.store_messages import Push
from hpcdl.rl.agent import Actor, Epsilon, Learner
from hpcdl.rl.agent_state import ByReturn, loose, part
from hpcdl.rl.dqn import FIXED, fixed
from hpcdl.rl.outliers import Outliers
from hpcdl.rl.q_network import QNetwork
from hpcdl.rl.remote_actor import act, failing_alone, made_actor, made_recorder
from hpcdl.rl.replay_checkpoint import keep, take_back
from hpcdl.rl.roles import RLRoles
from hpcdl.rl.tally import ByKind, RankCounts
from hpcdl.rl.task import EnvironmentTask
from hpcdl.rl.transition_stream import Feeder, Intake
from hpcdl.runs.run import Run
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
    """Learn on all ranks of `comm`, each by its role. The options are those of the program."""
    options: Any = run.options
    network: QNetwork = plain(model)
    servers, serves = len(roles.servers), comm.rank in roles.servers
    group = run.until_end(comm.split(0 if serves else None, name="servers", allreduce="tree"))
    cut = cut_slices(network.size, servers)[comm.rank] if serves else slice(0, 0)
    optimizer = optimizer.of_size(cut.stop - cut.start)
    by_kind = ByKind(comm.traffic)
    tally = RankCounts(by_kind)
    whole = CPU.array(network.initialize(run.random)) if comm.rank == 0 else None
    pulled: Any = None if serves else network.device.empty(network.size, network.dtype)
    keeper = Counting(run, tally, roles.servers) if comm.rank == 0 else None
    held = OnServersActing(model, pulled if whole is None else whole, optimizer, not serves, keeper, tally)
    run.report(allreduce=None, consistency=options.consistency, staleness=0, servers=servers, **fixed(task, options))
    run.report(learners=len(roles.learners), actors=len(roles.actors), bundles=not roles.acts_elsewhere)
    run.begin("gorila", held, task, FIXED)
    updates = Discarding(optimizer, group, options.chosen, options.max_staleness)
    store = ParameterStore(
        comm,
        network.size,
        network.dtype,
        servers=servers,
        consistency=options.chosen,
        update=updates,
        initial=whole,
        lead=keeper,
        start=run.step,
        memory=run.memory,
        beside=tally.packed,
    )
    if options.resume:
        for which in range(1, 1 + len(optimizer.state)):
            store.scatter(held.loaded.get(which), which)
    with refuse_together(comm.mpi):
        take_back(run, replay, comm.rank)
    run.start()
    if serves:
        with run.stopwatch.step("serve"):
            store.serve()
        by_kind.rest("parameters")
    elif comm.rank in roles.learners:
        bundle = Bundle(comm, store, model, run, environments, replay, roles, pulled, tally, by_kind)
        bundle.learn()
    else:
        act_apart(comm, store, network, run, environments, roles, pulled, tally, by_kind)
    if keeper is not None:
        counts = store.server.clocks.staleness
        run.report(staleness_histogram=[counts[each] for each in range(max(counts, default=-1) + 1)])
        run.report(**held.progress(), **keeper.rates())
    run.legs.own["bytes_by_kind_per_rank"] = dict(by_kind.sent)
    run.legs.own["discarded_per_rank"] = updates.discarded if serves else int(tally.own[3])
    run.end()
    store.free()
    held.raise_failure(run.bookkeeping)


class Bundle:
    """A learner with its replay memory; where nobody acts for it, it acts, too. parameters: what is pulled."""

    def __init__(
        self,
        comm: Communicator,
        store: ParameterStore,
        model: Any,
        run: Run,
        environments: Any,
        replay: Any,
        roles: RLRoles,
        parameters: Array,
        tally: RankCounts,
        by_kind: ByKind,
    ):
        self.comm, self.store, self.model, self.run, self.replay = comm, store, model, run, replay
        options: Any = run.options
        self.options, network = options, plain(model)  # type: Any, QNetwork
        self.parameters, self.gradient = parameters, network.device.zeros(network.size, network.dtype)
        self.target = network.device.zeros(network.size, network.dtype) if options.target_every else None
        self.learner = Learner(network, self.target, options.double == "yes")
        self.tally, self.by_kind, self.environments = tally, by_kind, environments
        self.number, self.all = roles.learners.index(comm.rank), len(roles.learners)
        self.epsilon, self.outliers = Epsilon.read(options.epsilon), Outliers(options.outliers)
        self.pushes, self.updates = 0, run.step  # more than it has made before: no sample is drawn as one before
        self.version = -math.inf  # of the parameters that the target network has
        self.actor: Actor | None = None
        self.intake: Intake | None = None
        if roles.acts_elsewhere:
            actors = roles.actors_of(comm.rank)
            self.intake = Intake(comm, actors, roles.envs, replay, tally, by_kind)
            self.slack = options.chunk * roles.streams(comm.rank)
            store.client.attend = self.intake.attend
        else:
            before = run.step * options.per_step
            self.actor = made_actor(network, environments, run.random, replay.add, roles.first_copy(comm.rank), before)
            self.acting, self.synced = parameters.copy(), -math.inf  # what it acts by, and since which of its steps

    def learn(self) -> None:
        """Until no step is left."""
        if self.actor is not None:
            self.actor.begin()
        saved = self.run.step
        while True:
            with self.run.stopwatch.step():
                with self.by_kind("parameters"):
                    step = asked(self.comm, self.store, self.run, self.store.pull, self.parameters)
                if step is None:
                    break
                saved = keep(self.run, self.replay, self.comm.rank, step, saved)
                self._follow()
                if self.intake is None:
                    self._act(step)
                else:
                    self._receive()
                self._push(step)
        keep(self.run, self.replay, self.comm.rank)
        if self.intake is not None:
            self.intake.close()
        with self.by_kind("parameters"):
            self.store.close(self.parameters)

    def _follow(self) -> None:
        """The target network <- what was pulled, when the servers have gone on far enough."""
        every, version = self.options.target_every, self.store.client.connections[0].version
        if self.target is not None and version // every > self.version:
            self.target[:] = self.parameters
            self.version = version // every

    def _act(self, step: int) -> None:
        """The environment steps before a push, by parameters that are brought up to date now and then."""
        options: Any = self.options
        actor, times = self.actor, options.acts_before(self.pushes)
        assert actor is not None
        steps = actor.steps * options.envs
        if times and steps - self.synced >= options.sync_every:
            self.acting[:], self.synced = self.parameters, steps
        with self.run.stopwatch.fetching(), failing_alone():
            for i in range(times):
                actor.act(self.acting, self.epsilon(step * options.per_step + i * options.envs * options.sharing))
        self.tally.note(actor, self.environments)

    def _receive(self) -> None:
        """Wait until the actors have sent the environment steps that belong to this push."""
        needed = (self.pushes + 1) * self.options.train_every
        assert self.intake is not None
        self.intake.allow(needed + self.slack)
        self.intake.look()
        self.comm.wait_until(lambda: self.intake.steps >= needed, self.intake.attend)  # type: ignore[union-attr]

    @property
    def ready(self) -> bool:
        """Whether there is enough to learn from; of a memory that is full all that it can hold is."""
        enough = max(-(-self.options.learning_starts // self.all), self.options.batch_size)
        return self.replay.size >= enough or self.replay.written >= self.replay.capacity

    def _push(self, step: int) -> None:
        """A gradient, or nothing, where there is none, or where it is discarded."""
        options, loss, rows = self.options, 0.0, 0
        self.pushes += 1
        if self.ready:
            beta = options.beta + (1 - options.beta) * step / self.run.steps
            keyed = self.run.random("sample", self.updates * self.all + self.number)
            sample = self.replay.sample(options.batch_size, beta, keyed)
            self.gradient[:] = 0
            loss, errors = self.learner.gradient(
                self.parameters, sample, self.gradient, self.model, self.updates * self.all + self.number
            )
            self.updates += 1
            if options.prioritized:
                self.replay.update(sample.index, sample.serial, errors)
            rows = options.batch_size
            if self.outliers.found(loss / rows):
                self.tally.discard()
                rows = 0
        with self.by_kind("gradients"):
            if rows:
                norm = math.sqrt(sum_of_squares(self.gradient)) if options.clip_norm > 0 else 0.0
                self.store.push(self.gradient, count=rows, total=rows, loss=loss, norm=norm)
            else:
                self.store.push(self.gradient[:0], slice(0, 0), count=0, total=0)


def act_apart(
    comm: Communicator,
    store: ParameterStore,
    network: QNetwork,
    run: Run,
    environments: Any,
    roles: RLRoles,
    parameters: Array,
    tally: RankCounts,
    by_kind: ByKind,
) -> None:
    """What an actor on a rank of its own does: it looks at the parameters, acts, and sends what it sees."""
    options: Any = run.options
    recorder = made_recorder(options, environments)
    before, together = run.step * options.per_step, len(roles.actors)
    actor = made_actor(network, environments, run.random, recorder.add, roles.first_copy(comm.rank), before)
    feeder = Feeder(comm, roles.memory_of(comm.rank), tally, by_kind)
    epsilon, synced = Epsilon.read(options.epsilon), -math.inf

    def newest(steps: int) -> Array:
        nonlocal synced
        if steps - synced >= options.sync_every:
            with by_kind("parameters"):
                store.peek(parameters)
            synced = steps
        return parameters

    act(
        run,
        actor,
        recorder,
        feeder,
        tally,
        newest,
        # Of all actors together, which go on about as fast as this one.
        lambda: epsilon(before + actor.steps * options.envs * together),
    )
    with by_kind("parameters"):
        store.close(parameters)


class Discarding(Updates):
    """A step of the optimizer for each push, but for one of nothing, or of parameters older than `most` versions."""

    def __init__(self, optimizer: Optimizer, group: Any, consistency: Any, most: int):
        super().__init__(optimizer, group, consistency, aware=False)
        self.most, self.discarded = most, 0

    def __call__(self, values: np.ndarray, gradient: np.ndarray, push: Push) -> bool:  # type: ignore[override]
        """Whether it has made one."""
        late = 0 < self.most < push.staleness
        self.discarded += late and push.count > 0
        if late or push.count == 0:
            return False
        # The rate follows the steps of the run, as the learner saw them: where nothing is pushed there is no version.
        super().__call__(values, gradient, push._replace(step=push.seen))
        return True


class Counting(Keeper):
    """Leads the store, and knows what the others have done."""

    def __init__(self, run: Run, tally: RankCounts, servers: range):
        super().__init__(run)
        self.tally, self.servers = tally, servers

    def begin(self, store: LedStore, step: int) -> None:
        super().begin(store, step)
        self.beside = RankCounts.length

    def told(self, rank: int, numbers: np.ndarray) -> None:
        self.tally.take(rank, numbers)
        self.run.signalled |= bool(self.tally["signal"])

    def sent(self, rank: int, bytes: float, messages: float) -> None:
        super().sent(rank, bytes, messages)
        if rank in self.servers:
            self.tally.note_sent(rank, "parameters", bytes)

    def rates(self) -> dict:
        """Of all legs."""
        seconds = max(1e-9, self.run.seconds)
        return {
            "environment_steps_per_second": self.run.step * self.run.options.per_step / seconds,  # type: ignore[operator]
            "updates_per_second": self.held.optimizer.step / seconds,
            "environment_restarts": int(self.tally["restarts"]),
        }


class OnServersActing(ByReturn, OnServers):
    """Parameters on servers, which are judged by the returns of episodes."""

    def __init__(
        self, model: Any, parameters: Array | None, optimizer: Optimizer, works: bool, keeper: Any, tally: RankCounts
    ):
        super().__init__(model, parameters, optimizer, works, keeper)
        self.tally, self.of_actors = tally, dict[str, np.ndarray]()

    def tracked(self) -> dict[str, Tracked]:
        return super().tracked() | (loose("actor", self.tally, self.of_actors) if self.leads else {})

    def resumed(self, everyone: Communicator) -> None:
        super().resumed(everyone)
        if self.of_actors:
            self.tally.load(part("actor", self.of_actors))

    def scores(self, data: Any) -> dict:
        return data.scores(self.network, self.parameters) | self.tally.scores() | self.progress()

    def progress(self) -> dict:
        """How far it is, as DQN says it, and what has travelled so far."""
        run = self.keeper.run
        steps = run.step * run.options.per_step
        assert self.tally.by_kind is not None
        self.tally.by_kind.rest("parameters")  # rank 0 sends nothing else
        return {
            "environment_steps": steps,
            "updates": self.optimizer.step,
            "replay_ratio": run.examples / max(1, steps),
            "discarded_outliers": int(self.tally["discarded"]),
        } | self.tally.bytes_by_kind()
