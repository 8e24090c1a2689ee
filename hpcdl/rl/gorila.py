"""Gorila: actors, learners and replay memories on many ranks, parameters on servers, gradients as messages.

    bundle, repeats                                                            parameter server, for its slice
        theta  <- pull                                              <------    theta
        theta' <- theta, every target_every versions                           repeats
        act: train_every environment steps, by the theta of the last sync        g <- push of a learner
             -> its own replay memory                                            discard what is too stale
        g <- the gradient of a sample; discard it if its loss is an outlier      theta <- theta - lr * g, or the
        push g                                                      ------>               optimizer's rule

Separate actors (remote_actor.py) pull, act, and send their steps to a learner, which makes an update per train_every
steps received. A step of the run is a push, of train_every environment steps; under bsp a push of each learner. One
bundle under bsp, with a sync before each step, is DQN, to the bit.

Servers discard gradients more than --max-staleness versions old; a learner discards gradients whose loss is more than
--outliers standard deviations above the mean of its losses (section 5 of the paper: Nair et al., "Massively parallel
methods for deep reinforcement learning", 2015)."""

import math
from functools import partial
from typing import Any

import numpy as np

from hpcdl.comm.failure import refuse_together
from hpcdl.kernels.device import CPU, Array
from hpcdl.kernels.norm import sum_of_squares
from hpcdl.optim import Optimizer
from hpcdl.parameter_server.consistency import Consistency
from hpcdl.parameter_server.parameter_store import ParameterStore
from hpcdl.parameter_server.run_on_servers import OnServers, request_step
from hpcdl.parameter_server.slice_server import Beside
from hpcdl.parameter_server.store_messages import Push
from hpcdl.parameter_server.store_settings import Serving, StoreLayout
from hpcdl.rl.agent import Epsilon, Learner
from hpcdl.rl.agent_rank import AgentRank
from hpcdl.rl.agent_state import ReturnScored, track_state
from hpcdl.rl.outliers import OutlierDetector
from hpcdl.rl.remote_actor import act, chunk_receiver, chunk_sender, failing_alone
from hpcdl.rl.replay_checkpoint import restore_replay, save_if_due
from hpcdl.rl.tally import RankCounts
from hpcdl.runs.run import Run
from hpcdl.strategies.parameter_server import Updates


def train(rank: AgentRank, run: Run) -> None:
    """Serve, learn or act, by the role of this rank."""
    comm, options, network, roles, tally = rank.comm, rank.options, rank.network, rank.roles, rank.tally
    servers, serves, leads = len(roles.servers), comm.rank in roles.servers, comm.rank == 0
    layout = StoreLayout(network.size, comm.size, network.dtype, servers)
    per_step = options.environment_steps(len(roles.learners))
    group = run.until_end(comm.split(0 if serves else None, name="servers", allreduce="tree"))
    optimizer = rank.optimizer.of_size(layout.length(comm.rank))
    initial = CPU.array(network.initialize(rank.random)) if leads else None
    pulled: Any = None if serves else network.device.empty(network.size, network.dtype)
    parameters = pulled if initial is None else initial
    ownership = GorilaOwnership(run, rank, parameters, optimizer)
    counts = track_state(run, "actor", ownership) if leads else {}
    about = {"allreduce": None, "consistency": options.consistency, "staleness": 0, "servers": servers}
    about |= {"learners": len(roles.learners), "actors": len(roles.actors), "bundles": not roles.acts_elsewhere}
    scored = ReturnScored(ownership, lambda: tally.scores() | ownership.progress())
    rank.begin(run, "gorila", ownership, scored, **about)
    tally.load(counts)
    first = run.step
    consistency = Consistency(options.consistency)
    updates = StalenessFilter(optimizer, group, consistency, options.max_staleness)
    store = ParameterStore(
        comm,
        layout,
        Serving(consistency),
        update=updates,
        initial=initial,
        start=first,
        horizon=ownership.horizon_of_store if leads else None,
        memory=run.memory,
        beside=Beside(RankCounts.length, tally.packed, tally.take),
    )
    ownership.follow(store)
    with refuse_together(comm.mpi):
        restore_replay(options, rank.replay, comm.rank)
    with run.going_on():
        if serves:
            with rank.stopwatch.step("serve"):
                if leads:
                    for loss, total in store.completed_steps():
                        run.record(loss, int(total))
                        run.boundary(store.signalled or bool(tally["signal"]))
                else:
                    store.serve()
            tally.by_kind.rest("parameters")
        elif comm.rank in roles.learners:
            Bundle(rank, run, store, pulled).learn()
        else:
            run_actor(rank, store, pulled, first * per_step)
        if leads:
            run.report(staleness_histogram=store.staleness_histogram)
            rank.report_end(run, ownership.progress(), tally["restarts"])
        discarded = updates.discarded if serves else int(tally.local[3])
        run.report_own(bytes_by_kind=dict(tally.by_kind.sent), discarded=discarded)
    store.free()
    ownership.raise_failure()


class Bundle:
    """A learner with its replay memory, which also acts if there are no separate actors. parameters: as last pulled."""

    def __init__(self, rank: AgentRank, run: Run, store: ParameterStore, parameters: Array):
        self.rank, self.run, self.store, self.parameters, self.tally = rank, run, store, parameters, rank.tally
        options, roles, network, comm, first = rank.options, rank.roles, rank.network, rank.comm, run.step
        self.options, self.replay, self.by_kind = options, rank.replay, rank.tally.by_kind
        self.gradient = network.device.zeros(network.size, network.dtype)
        self.target = network.device.zeros(network.size, network.dtype) if options.target_every else None
        self.learner = Learner(network, self.target, options.double == "yes")
        self.number, self.all = roles.learners.index(comm.rank), len(roles.learners)
        self.epsilon, self.outliers = Epsilon.read(options.epsilon), OutlierDetector(options.outliers)
        self.pushes, self.updates = 0, first  # `updates` keys random numbers: above those of earlier legs
        self.version = -math.inf  # version of the target network, in units of target_every
        self.actor: Any = None
        self.intake: Any = None  # receiver of chunks from separate actors; None: this rank acts
        if roles.acts_elsewhere:
            self.intake = chunk_receiver(rank)
            self.slack = options.chunk * roles.streams(comm.rank)
            store.client.attend = self.intake.attend
        else:
            self.actor = rank.actor(self.replay.add, first * options.environment_steps(self.all))
            self.acting, self.synced = parameters.copy(), -math.inf  # the parameters it acts by, and their step

    def learn(self) -> None:
        if self.actor is not None:
            self.actor.begin()
        about = self.options, self.options.environment_steps(self.all), self.run.folder.path, self.replay
        save, saved = partial(save_if_due, *about, self.rank.comm.rank), self.updates
        while True:
            with self.rank.stopwatch.step():
                with self.by_kind("parameters"):
                    asked = self.rank.comm, self.store, self.rank.stopwatch
                    step = request_step(*asked, self.store.pull, self.parameters)
                if step is None:
                    break
                saved = save(step, saved)
                self._follow()
                if self.intake is None:
                    self._act(step)
                else:
                    self._receive()
                self._push(step)
        save()
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
        """Take the environment steps before a push; update the acting parameters every sync_every steps."""
        options: Any = self.options
        actor, often = self.actor, options.train_every // options.envs  # 0: not before each push
        times = often or int(self.pushes % (options.envs // options.train_every) == 0)
        steps = actor.steps * options.envs
        if times and steps - self.synced >= options.sync_every:
            self.acting[:], self.synced = self.parameters, steps
        with self.rank.stopwatch.fetching(), failing_alone():
            for i in range(times):
                own_steps = step * options.per_step + i * options.envs
                actor.act(self.acting, self.epsilon(options.sharing(self.all) * own_steps))
        self.tally.note(actor)

    def _receive(self) -> None:
        """Wait until the actors have sent the environment steps of this push."""
        needed = (self.pushes + 1) * self.options.train_every
        self.intake.allow(needed + self.slack)
        self.intake.inbox.look()  # from outside a wait
        self.intake.attend()
        self.rank.comm.wait_until(lambda: self.intake.steps >= needed, self.intake.attend)

    def _push(self, step: int) -> None:
        """Push a gradient, or an empty one if it is too early to learn or the loss is an outlier."""
        options, loss, rows = self.options, 0.0, 0
        self.pushes += 1
        if self.replay.holds(max(-(-options.learning_starts // self.all), options.batch_size)):
            beta, key = options.beta + (1 - options.beta) * step / self.run.steps, self.updates * self.all + self.number
            sample = self.replay.sample(options.batch_size, beta, self.rank.random("sample", key))
            self.gradient[:] = 0
            loss, errors = self.learner.gradient(self.parameters, sample, self.gradient, self.rank.model, key)
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


def run_actor(rank: AgentRank, store: ParameterStore, parameters: Array, before: int) -> None:
    """Pull parameters, act and send the steps, on a separate actor. before: environment steps of earlier legs."""
    synced = -math.inf

    def newest(steps: int) -> Array:
        nonlocal synced
        if steps - synced >= rank.options.sync_every:
            with rank.tally.by_kind("parameters"):
                store.peek(parameters)
            synced = steps
        return parameters

    act(rank, chunk_sender(rank), newest, before)
    with rank.tally.by_kind("parameters"):
        store.close(parameters)


class StalenessFilter(Updates):
    """Applies each push by the optimizer, unless it is empty or over `most` versions stale; most 0: no limit."""

    def __init__(self, optimizer: Optimizer, group: Any, consistency: Any, most: int):
        super().__init__(optimizer, group, consistency, aware=False)
        self.most, self.discarded = most, 0

    def __call__(self, values: np.ndarray, gradient: np.ndarray, push: Push) -> bool:  # type: ignore[override]
        """Apply a push; return True if it changed the parameters."""
        too_stale = 0 < self.most < push.staleness
        self.discarded += too_stale and push.count > 0
        if too_stale or push.count == 0:
            return False
        # The rate follows the run's steps as the learner saw them: empty pushes make no version.
        super().__call__(values, gradient, push._replace(step=push.seen))
        return True


class GorilaOwnership(OnServers):
    """Ownership of parameters on servers; rank 0 has the counts of all ranks."""

    def __init__(self, run: Run, rank: AgentRank, parameters: Array | None, optimizer: Optimizer):
        super().__init__(run, rank.model, parameters, optimizer, rank.comm.rank not in rank.roles.servers)
        self.rank, self.tally = rank, rank.tally

    def state(self) -> dict[str, np.ndarray]:
        self._count_servers()
        return self.tally.state()

    def _count_servers(self) -> None:
        """Take the bytes sent by servers from their answers: servers report no counts."""
        for rank in self.rank.roles.servers:
            if rank in self.others_sent:
                self.tally.note_sent(rank, "parameters", self.others_sent[rank][0])

    def progress(self) -> dict:
        """Return environment steps, updates, replay ratio, discarded gradients and bytes by kind."""
        progress = self.run.progress
        steps = progress.step * self.rank.options.environment_steps(len(self.rank.roles.learners))
        self._count_servers()
        self.tally.by_kind.rest("parameters")  # rank 0 sends nothing else
        return {
            "environment_steps": steps,
            "updates": self.optimizer.step,
            "replay_ratio": progress.examples / max(1, steps),
            "discarded_outliers": int(self.tally["discarded"]),
        } | self.tally.bytes_by_kind()
