"""Ape-X: many actors, each as bold as its number says; prioritized replay; one learner, or several by all-reduce.

    actor i, for ever                              replay memory, a shard               learner, for ever
        theta <- what has come last     <---------------------------------------------    broadcast theta, unasked
        act, random with probability                                                      sample that was asked for
            eps^(1 + i/(N-1) alpha)                                         --------->    g <- its gradient
        priorities <- its own |TD errors|                                                 all-reduce g
        send the chunk          ---------->          add with the priorities              update theta
                                                     priorities <- |TD errors|  <-----    send |TD errors|

Of Gorila's parameters and gradients for every step there remain parameters now and then; what travels instead is what
was seen, once to a memory and as often as it is learned from to a learner. --replays 0 has each learner hold a shard,
and saves the second.

The learner learns from --train-every environment steps an update, and whoever is too fast waits: actors for leave to
send (transition_stream.py), the learner for its sample (`learner_waited_seconds`). With `free` nobody waits for such a
ratio, as in the paper: the learner makes as many updates as it can, and the run ends after so many environment steps.

(Horgan et al., "Distributed prioritized experience replay", ICLR 2018)
"""

import math
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from hpcdl.checkpoint.state import Same, Tracked
from hpcdl.chunks import chunks
from hpcdl.comm import Communicator
from hpcdl.comm.failure import refuse_together
from hpcdl.comm.progress import activity
from hpcdl.comm.trace import Traffic
from hpcdl.errors import AgreedError, TrainingError
from hpcdl.faults import inject
from hpcdl.kernels.device import CPU, Array
from hpcdl.models.model_wrapper import plain
from hpcdl.optim import Optimizer
from hpcdl.rl.agent import Epsilon, Learner
from hpcdl.rl.agent_state import ByReturn, loose, part
from hpcdl.rl.dqn import FIXED, fixed
from hpcdl.rl.parameter_broadcast import Publisher, Receiver
from hpcdl.rl.q_network import QNetwork
from hpcdl.rl.remote_actor import act, made_actor, made_recorder
from hpcdl.rl.replay import Sample
from hpcdl.rl.replay_checkpoint import place, take_back, write
from hpcdl.rl.roles import RLRoles
from hpcdl.rl.shards import AHEAD, LocalShard, RemoteShard, SampleFormat, ShardServer, Wanted
from hpcdl.rl.tally import COUNTS, ByKind, RankCounts
from hpcdl.rl.task import EnvironmentTask
from hpcdl.rl.transition_stream import Feeder, Intake
from hpcdl.runs.ownership import Whole
from hpcdl.runs.run import Run

FAILED, REFUSED = 1, 2
OTHERS = -10  # less a learner's number: in the place of a rank that tells, for what that learner knows


def train(
    comm: Communicator,
    model: Any,
    task: EnvironmentTask,
    optimizer: Optimizer,
    run: Run,
    environments: Any,
    replay: Any,
    roles: RLRoles,
) -> Array:
    """What the learners do, which are `comm`; run.everyone are all ranks. Returns the parameters."""
    options: Any = run.options
    everyone, network = run.everyone, plain(model)
    by_kind = ByKind(everyone.traffic)
    tally = RankCounts(by_kind)
    with by_kind("parameters"):
        parameters = run.initial(network)
    target = parameters.copy() if options.target_every else None
    held = OnLearners(model, parameters, optimizer, target, tally, int(options.batch_size))
    run.report(**fixed(task, options), learners=comm.size, replays=len(roles.memories), actors=len(roles.actors))
    try:
        run.begin("apex", held, task, FIXED)
        begun(everyone, 0, run.folder.path, run.step)
    except (TrainingError, AgreedError) as error:
        begun(everyone, REFUSED if isinstance(error, AgreedError) else FAILED)
        raise
    there = filled(everyone, run, replay)
    learning = Learners(comm, model, run, optimizer, parameters, target, replay, roles, tally, there)
    try:
        learning.learn()
    except (TrainingError, AgreedError):
        learning.close(FAILED)
        raise
    learning.close()
    run.end()
    held.gather_tallies()
    run.report(**held.progress(), **learning.rates())
    run.legs.own["bytes_by_kind_per_rank"] = dict(by_kind.sent)
    return parameters


def begun(everyone: Communicator, status: int = 0, folder: Path | None = None, step: int = 0) -> tuple:
    """Whether the learners can begin, in which folder and after which step, as rank 0 knows it; collective."""
    with activity.inside("begin", everyone):
        found: tuple = everyone.mpi.bcast((status, folder, step))
    return found


def ignored(rank: int, message: np.ndarray) -> None:
    """What is told to the first learner alone."""


class Learners:
    """One of the learners: asks for samples, makes its share of each gradient, and hands out what comes of it.

    there: transitions that the memories have kept of the legs before.
    """

    def __init__(
        self,
        comm: Communicator,
        model: Any,
        run: Run,
        optimizer: Optimizer,
        parameters: Array,
        target: Array | None,
        replay: Any,
        roles: RLRoles,
        tally: RankCounts,
        there: int = 0,
    ):
        self.comm, self.everyone, self.model, self.run = comm, run.everyone, model, run
        options: Any = run.options
        self.options = options
        self.optimizer, self.parameters, self.target, self.tally = optimizer, parameters, target, tally
        assert tally.by_kind is not None
        self.by_kind, self.network = tally.by_kind, plain(model)
        self.learner = Learner(self.network, target, options.double == "yes")
        # The all-reduce also carries how far rank 0 is known to be, on which all have to agree, and each learner's
        # largest importance weight, in a place of its own: the sum of all vectors holds each of them.
        size = self.network.size
        self.sums = comm.empty(size + 1 + comm.size, self.network.dtype)
        self.gradient, self.farthest, self.largest = self.sums[:size], self.sums[size : size + 1], self.sums[size + 1 :]
        cut = chunks(int(options.batch_size), comm.size)[comm.rank]
        self.rows, self.kept = cut.stop - cut.start, run.saved
        self.asked = self.taken = 0  # samples of this leg
        self.starts = max(0, int(options.learning_starts) - there)  # environment steps of it before the first
        self.first = optimizer.step
        mine = [actor for i, actor in enumerate(roles.actors) if i % comm.size == comm.rank]
        self.publisher = Publisher(self.everyone, mine, self.by_kind)
        self.roles, self.everywhere = roles, sum(map(roles.streams, roles.memories))
        self.shards: dict[int, Any] = self._shards(replay)

    def _shards(self, replay: Any) -> dict[int, Any]:
        """By the rank of the memory; where the learners remember, its own."""
        rank, options = self.everyone.rank, self.options
        if rank in self.roles.memories:
            intake = Intake(
                self.everyone, self.roles.actors_of(rank), self.roles.envs, replay, self.tally, self.by_kind
            )
            save = partial(kept, self.run.folder.path, replay, rank)
            return {rank: LocalShard(intake, options.prioritized, self.run.random, save)}
        form = SampleFormat(self.network.shape, self.run.data.environment["dtype"])
        heard = self.tally.take if self.comm.rank == 0 else ignored
        return {each: RemoteShard(self.everyone, each, form, self.by_kind, heard) for each in self.roles.memories}

    def learn(self) -> None:
        """Until the run is over."""
        run = self.run
        self.publisher.publish(self.parameters, self.network.device)
        run.start()
        losses, total = 0.0, 0
        while not run.over:
            with run.stopwatch.step():
                samples = self._samples()
                if samples:
                    losses, total = losses + self._update(samples), total + int(self.options.batch_size)
                for _ in range(self._steps(bool(samples))):
                    run.record(losses, total)
                    losses, total = 0.0, 0
                    run.signalled |= bool(self.tally["signal"])
                    run.boundary()
                    if self.options.save_replay and run.saved != self.kept:
                        self._keep()
                    if run.over:
                        break
                self.publisher.catch_up(self.parameters, self.network.device)

    def _keep(self) -> None:
        """The memories are written with this checkpoint: a learner's own by itself, the others once."""
        self.kept = self.run.saved
        for rank, shard in self.shards.items():
            if self.comm.rank == 0 or rank == self.everyone.rank:
                shard.keep()

    # -- samples -----------------------------------------------------------------------------------------------------

    def _samples(self) -> list[tuple[Any, Sample]]:
        """This learner's share of a batch, from each shard a part; nothing where it is too early to learn."""
        while self.asked <= self.taken + AHEAD:
            self._ask(self.asked)
            self.asked += 1
        self.taken += 1
        shards = self.shards.values()
        if not all(shard.ready for shard in shards):
            with self.run.stopwatch.fetching():
                self.everyone.wait_until(lambda: all(shard.ready for shard in shards), patient=True)
        found = [(shard, shard.take()) for shard in shards]
        return [(shard, sample) for shard, sample in found if sample is not None]

    def _ask(self, number: int) -> None:
        """Ask the shards for a sample: the one of this number in this leg."""
        options, many = self.options, len(self.shards)
        steps, starts = (number + 1) * options.per_step, self.starts
        rows = self.rows if steps >= starts else 0
        beyond = min(steps, max(starts, options.per_step)) if options.free else steps
        beta = options.beta + (1 - options.beta) * min(1.0, (self.run.step + number - self.taken) / self.run.steps)
        for i, (rank, shard) in enumerate(self.shards.items()):
            streams = self.roles.streams(rank)
            share = -(-beyond * streams // self.everywhere)
            part = chunks(rows, many)[(i + number) % many]
            key = ((self.first + number) * self.comm.size + self.comm.rank) * many + i
            allowed = math.inf if options.free else share + options.chunk * streams
            shard.ask(Wanted(part.stop - part.start, beta, key, share, allowed))

    def _update(self, samples: list[tuple[Any, Sample]]) -> float:
        """An update by all learners' samples; returns this one's sum of losses."""
        options, optimizer = self.options, self.optimizer
        of = [sample for _, sample in samples]
        sample = of[0] if len(of) == 1 else Sample(*map(np.concatenate, zip(*of, strict=True)))
        self.sums[:] = 0
        loss, errors = self.learner.gradient(
            self.parameters, sample, self.gradient, self.model, optimizer.step, whole=False
        )
        self.largest[self.comm.rank] = sample.weights.max(initial=0)
        if self.comm.rank == 0:
            self.farthest[:] = self.reached
        with self.by_kind("gradients"):
            self.comm.all_reduce(self.sums)
        rate = optimizer.schedule(self.run.step)
        largest = float(self.largest.max())  # the batch's, wherever its rows lie
        optimizer.update(self.parameters, self.gradient, 1 / (int(options.batch_size) * largest), rate=rate)
        if options.prioritized:
            ends = np.cumsum([len(each.actions) for each in of])[:-1]
            for (shard, each), own in zip(samples, np.split(errors, ends), strict=True):
                shard.update(each, own)
        if self.target is not None and optimizer.step % options.target_every == 0:
            self.target[:] = self.parameters
        if optimizer.step % options.broadcast_every == 0:
            self.publisher.publish(self.parameters, self.network.device)
        return loss / largest

    @property
    def reached(self) -> int:
        """The steps of the run that the environment steps make which have come, as far as this rank knows."""
        return int(self.tally["steps"]) // int(self.options.per_step)

    def _steps(self, updated: bool) -> int:
        """How many steps of the run have passed by now."""
        if not (self.options.free and updated):
            return 1
        return max(0, min(int(self.farthest[0]), self.run.steps) - self.run.step)

    # -- the end -----------------------------------------------------------------------------------------------------

    def close(self, status: int = 0) -> None:
        """Memories and actors come to their end, too; status: 0, or why the run cannot go on."""
        for shard in self.shards.values():
            shard.close(status)
        self.publisher.close()

    def rates(self) -> dict:
        """Over all legs; and how long the first learner has waited for samples in this one."""
        run, seconds = self.run, max(1e-9, self.run.seconds)
        return {
            "environment_steps_per_second": run.step * self.options.per_step / seconds,
            "updates_per_second": self.optimizer.step / seconds,
            "environment_restarts": int(self.tally["restarts"]),
            "learner_waited_seconds": run.stopwatch.data_seconds,
        }


class OnLearners(ByReturn, Whole):
    """All learners hold the same parameters, and the same target network; the first knows what all ranks have done."""

    def __init__(
        self, model: Any, parameters: Array, optimizer: Optimizer, target: Array | None, tally: RankCounts, batch: int
    ):
        super().__init__(model, parameters, optimizer)
        self.target, self.tally, self.of_actors, self.batch = target, tally, dict[str, np.ndarray](), batch

    def tracked(self) -> dict[str, Tracked]:
        state = super().tracked() | loose("actor", self.tally, self.of_actors)
        return state | ({"target": Same(self.target)} if self.target is not None else {})

    def resumed(self, everyone: Communicator) -> None:
        super().resumed(everyone)
        if self.of_actors:
            self.tally.load(part("actor", self.of_actors))

    def sent(self, traffic: Traffic) -> tuple[float, float]:
        """Of this learner, and on the first one of memories and actors, up to what those have told."""
        bytes, messages = super().sent(traffic)
        others = [told[len(COUNTS) :].sum() for rank, told in self.tally.of.items() if rank >= 0]
        return bytes + float(sum(others)), math.nan if others else messages

    def gather_tallies(self) -> None:
        """The first learner knows what the others know; collective."""
        if self.peers.size == 1:
            return
        with activity.inside("score", self.peers):
            told = self.peers.mpi.gather(self.tally.packed())
        for rank, message in enumerate(told or ()):
            if rank > 0:
                self.tally.take(OTHERS - rank, message)

    def scores(self, data: Any) -> dict:
        self.gather_tallies()
        found = None
        if self.peers.rank == 0:
            found = data.scores(self.network, self.parameters) | self.tally.scores() | self.progress()
        with activity.inside("score", self.peers):
            scores: dict = self.peers.mpi.bcast(found)
        return scores

    def progress(self) -> dict:
        """How far it is, as DQN says it, and what has travelled so far."""
        steps = max(1.0, self.tally["steps"])
        return {
            "environment_steps": int(self.tally["steps"]),
            "updates": self.optimizer.step,
            "replay_ratio": self.optimizer.step * self.batch / steps,
        } | self.tally.bytes_by_kind()


# -- what the others do ----------------------------------------------------------------------------------------------


def assist(comm: Communicator, network: QNetwork, run: Run, environments: Any, replay: Any, roles: RLRoles) -> None:
    """What memories and actors do; `comm` are all ranks. Raises what the learners raise, who say why."""
    status, folder, step = begun(comm)
    if not status:
        tally = RankCounts(ByKind(comm.traffic))
        filled(comm, run, replay)
        if comm.rank in roles.memories:
            status = remember(comm, run, replay, roles, tally, folder)
        else:
            status = explore(comm, network, run, environments, roles, tally, step)
        run.legs.own["bytes_by_kind_per_rank"] = dict(tally.by_kind.sent) if tally.by_kind else None
    if status:
        error = AgreedError("") if status == REFUSED else TrainingError("")
        error.speaker = None
        raise error


def filled(everyone: Communicator, run: Run, replay: Any) -> int:
    """Memories are filled with what was kept of them; returns the transitions in all of them. Collective."""
    with refuse_together(everyone.mpi):
        take_back(run, replay, everyone.rank)
    with activity.inside("begin", everyone):
        there: int = everyone.mpi.allreduce(replay.size if replay is not None else 0)
    return there


def kept(folder: Path | None, replay: Any, rank: int) -> None:
    """Write a memory beside the checkpoint."""
    if folder is not None:
        write(replay, place(folder, rank))


def remember(comm: Communicator, run: Run, replay: Any, roles: RLRoles, tally: RankCounts, folder: Path | None) -> int:
    """What a memory does; returns the status with which the learners have ended."""
    assert tally.by_kind is not None
    intake = Intake(comm, roles.actors_of(comm.rank), roles.envs, replay, tally, tally.by_kind)
    memory = ShardServer(comm, intake, list(roles.learners), run.random, partial(kept, folder, replay, comm.rank))
    inject.arm(run)
    with run.stopwatch.step("serve"):
        memory.serve()
    return memory.status


def explore(
    comm: Communicator, network: QNetwork, run: Run, environments: Any, roles: RLRoles, tally: RankCounts, step: int
) -> int:
    """What an actor does; returns the status with which the learners have ended."""
    options: Any = run.options
    assert tally.by_kind is not None
    number, copies = roles.actors.index(comm.rank), len(roles.actors) * roles.envs
    learner = roles.learners[number % len(roles.learners)]
    receiver = Receiver(comm, learner, CPU.empty(network.size, network.dtype), tally.by_kind)
    recorder = made_recorder(options, environments)
    before = step * options.per_step
    actor = made_actor(network, environments, run.random, recorder.add, roles.first_copy(comm.rank), before)
    feeder = Feeder(comm, roles.memory_of(comm.rank), tally, tally.by_kind)
    base = Epsilon.read(options.epsilon)
    exponents = boldness(roles.first_copy(comm.rank) + np.arange(roles.envs), copies, options.epsilon_alpha)
    receiver.first()
    inject.arm(run)
    act(
        run,
        actor,
        recorder,
        feeder,
        tally,
        receiver.newest,
        lambda: base(before + actor.steps * copies) ** exponents,
        options.prioritized,
    )
    receiver.close()
    return FAILED if feeder.failed else 0


def boldness(number: np.ndarray, copies: int, alpha: float) -> np.ndarray:
    """Of these copies of the environment, 1 + i / (N - 1) alpha: to which power of epsilon an action is random."""
    return 1 + number / max(1, copies - 1) * alpha
