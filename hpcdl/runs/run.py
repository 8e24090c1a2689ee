"""What a training loop should not spell out: steps, metrics, evaluation, checkpoints, signals and the summary.

    run.begin("all_reduce", Whole(model, parameters, optimizer), data)
    for batch in run.batches(data, share=(comm.rank, comm.size)):
        ...                                the strategy: gradient, communication, update
        run.record(loss, batch.total)      local: this rank's sum of losses
        run.boundary()                     the one collective: agree on losses, signals and stopping

A run composes parts that know nothing of each other: where the time goes (stopwatch.py), what the ranks agree on
(agreement.py), when it ends (stopping.py), what is saved (checkpoint/state.py), who holds parameters (ownership.py).

The ranks agree in one small message on a communicator of the run's own, counted apart from the training's; when steps
are short, only every few steps. Where rank 0 runs the run by itself (on_one_rank.py), it records, and the others time
their steps: `with run.stopwatch.step(): ...`.
"""

import logging
import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from hpcdl.checkpoint import buffers
from hpcdl.checkpoint.state import PerRank, Same, State, Tracked
from hpcdl.comm import Communicator
from hpcdl.data import Batch
from hpcdl.errors import AgreedError, TrainingError
from hpcdl.faults import inject
from hpcdl.kernels.device import CPU, Array
from hpcdl.machine.threads import Threads
from hpcdl.memory import Memory
from hpcdl.optim import Optimizer
from hpcdl.random import Random
from hpcdl.runs import signals, stopwatch
from hpcdl.runs.accumulated import refuse_another_accumulation
from hpcdl.runs.advice import not_finite
from hpcdl.runs.agreeing_replicas import AgreeingReplicas
from hpcdl.runs.agreement import Agreement, NotFinite, Step
from hpcdl.runs.boundary_actions import Due, evaluate_and_save
from hpcdl.runs.folder import Folder
from hpcdl.runs.metrics import Metrics
from hpcdl.runs.options import Options
from hpcdl.runs.ownership import Ownership, warm_up
from hpcdl.runs.progress import Display
from hpcdl.runs.resume import open_folder
from hpcdl.runs.saving import Saver
from hpcdl.runs.segments import Legs
from hpcdl.runs.stopping import Stopping
from hpcdl.runs.summary import finish

log = logging.getLogger("hpcdl")


class Run:
    """One training run of all ranks of `comm`. Use it as a context: `with Run(comm, options) as run: train(..., run)`.

    Leaving the context evaluates, saves and writes the summary; `run.summary` holds it on rank 0, `run.stopped` why the
    run ended (stopping.py). everyone: the communicator of all ranks that the summary speaks of, where others serve
    those of `comm`, and call `summary.conclude`. workers: how many ranks compute.
    """

    held: Ownership  # from `begin` on, as the four that follow
    batch: int  # examples of a step
    per_epoch: int  # steps
    fixed: dict  # of `reported`, what a run that goes on must have as it was
    agreement: Agreement

    def __init__(self, comm: Communicator, options: Options | None = None, everyone: Any = None, workers: int = 0):
        self.comm, self.options, self.everyone = comm, options or Options(), everyone or comm
        self.workers, self.device = workers or comm.size, CPU  # type: int, Any
        self.bookkeeping = comm.duplicate("run", allreduce="tree")  # exact counts, the same bits on all ranks
        self.random, self.display = Random(self.options.seed), Display(self.options.progress, comm.rank)
        self.stopwatch, self.memory = stopwatch.Stopwatch(comm.traffic, comm.timeline), Memory()
        self.stopping, self.state = Stopping(self.options.patience, self.options.allowance), State()
        self.legs, self.metrics = Legs(self.everyone), Metrics(self.display, self.options)
        self.strategy, self.model, self.optimizer, self.data = "", None, None, None  # type: str, Any, Any, Any
        self.folder, self.step, self.examples = Folder(None, comm.rank), 0, 0
        self.signalled = False  # whether a rank that does not meet the others has had a signal
        self.saved: int | None = None  # the step of the checkpoint that this run has written last
        self.bounded = 0  # the last step whose boundary has been passed
        self.before = math.inf, 0  # of `stopping`, the best and the evaluations since, after that boundary
        self.saver = Saver(self)
        self.reported, self.groups, self.observers = {}, [], []  # type: dict, list[Any], list[Callable]
        self.summary, self.agree = None, None  # type: dict | None, bool | None

    # -- before the loop ---------------------------------------------------------------------------------------------

    def plan(self, data: Any) -> tuple[int, int, int]:
        """Examples per update, updates per epoch, updates in all, as the options say."""
        return self.options.plan(self.workers, data)

    def make_optimizer(self, model: Any, data: Any, size: int | None = None) -> Optimizer:
        """The optimizer that the options name, for `size` parameters (default: all of the model's)."""
        return self.options.make_optimizer(model, self.plan(data), size)

    def until_end(self, group: Any) -> Any:
        """A group of ranks, or None, that is freed when the run ends: MPI has no more than some thousands at once."""
        self.groups += [group] if group is not None else []
        return group

    def initial(self, model: Any) -> Array:
        """The model's initial values, made on rank 0 and broadcast: the same flat vector on all ranks; collective."""
        parameters = self.comm.empty(model.layout.size, model.layout.dtype)
        if self.comm.rank == 0:
            parameters[:] = model.initialize(self.random)
        self.comm.broadcast(parameters)
        return parameters

    def track(self, name: str, vector: Tracked) -> None:
        """Make a vector (checkpoint/state.py) part of each checkpoint; called before `begin`, which loads it."""
        self.state.track(name, vector)
        if isinstance(vector, Same | PerRank):
            self.memory.hold("optimizer", vector.array)

    def report(self, **entries: Any) -> None:
        """Add entries to the summary."""
        self.reported |= entries

    def observe(self, observer: Callable) -> None:
        """Call observer(run, loss, total) after each step, with this rank's sum of losses and all ranks' examples."""
        self.observers.append(observer)

    def begin(self, strategy: str, held: Ownership, data: Any, fixed: tuple[str, ...] = ()) -> None:
        """Track what is held, make the run's folder, load the state where the run goes on from one, compile a step.

        fixed: which reported entries a run that goes on must have as they were, for what is saved depends on them.
        """
        self.strategy, self.held, self.data = strategy, held, data
        self.model, self.optimizer, self.device = held.model, held.optimizer, held.device
        self.fixed = {name: self.reported[name] for name in fixed}
        refuse_another_accumulation(held.model, self.options.accumulate)
        data.to(self.device)
        self.batch, self.per_epoch, steps = self.plan(data)
        self.stopping.plan(steps, self.per_epoch, self.options.pause)
        buffers.follow(held.model, self.random)
        held.join(self.bookkeeping, self.memory)
        self.legs.begin(self.bookkeeping)
        if held.peers is not None:
            for name, vector in data.statistics.items():
                self.state.track(f"data/{name}", Same(vector))
        self.state.tracked |= held.saved()
        self.folder = open_folder(self)
        inject.arm(self)
        if self.optimizer.averaged:  # loaded as it was shown
            held.hide_average()
        self.metrics.open(self.folder, self.per_epoch, self.optimizer.schedule)
        self.agreement = Agreement(held.peers, self.step)
        self.replicas = AgreeingReplicas(held, self.options.checks.replicas, strategy, self.step)
        with self.memory.paused():
            warm_up(held, data, self.make_optimizer, self.comm.traffic.uncounted())
        self._bound()
        self.bookkeeping.barrier()
        if self.options.survivor is not None:
            self.options.survivor.follow(self)
        log.info("%s, rank %d of %d, from step %d", strategy, self.comm.rank, self.comm.size, self.step)

    # -- the loop ----------------------------------------------------------------------------------------------------

    def batches(self, data: Any, share: tuple[int, int]) -> Iterator[Batch]:
        """This rank's share of each batch, epoch after epoch, until the run ends; the loop body is timed as a step."""
        self.start()
        while not self.over:
            epoch, start = divmod(self.step, self.per_epoch)
            source, asked = iter(data.batches(epoch, self.batch, share, start)), stopwatch.clock()
            for batch in source:
                self.stopwatch.fetched_since(asked)
                with self.stopwatch.step():
                    yield batch
                if self.over:
                    source.close()
                    break
                asked = stopwatch.clock()
        self.end()

    @property
    def over(self) -> bool:
        """Whether no more steps are to be done."""
        return self.stopping.over(self.step)

    @property
    def outlived(self) -> bool:
        """Whether this leg goes on without ranks that are gone."""
        return self.options.survivor is not None and self.options.survivor.goes_on

    @property
    def stopped(self) -> str | None:
        """Why the run ended; None while it goes on."""
        return self.stopping.reason

    @property
    def steps(self) -> int:
        """The last step."""
        return self.stopping.steps

    @property
    def seconds(self) -> float:
        """Seconds spent on steps and data so far, those before a resumption included; no evaluation, no checkpoints."""
        return self.stopwatch.seconds

    @property
    def rate(self) -> float:
        """Examples per second."""
        return self.examples / max(1e-9, self.seconds)

    @property
    def parameters(self) -> Any:
        """What is scored and saved, as this rank holds it."""
        return self.held.parameters

    @property
    def scores(self) -> dict:
        """Of the last evaluation, by name."""
        return self.metrics.scores

    def agree_seldom(self, steps: int) -> None:
        """Agree at most every so many steps, where to meet at each of them would cost too much; before the loop."""
        self.agreement.fewest = self.agreement.interval = steps

    def start(self) -> None:
        """The loop begins: clocks and display start."""
        self.agreement.start()
        self.display.start(self.step, self.steps)
        if self.options.survivor is not None and self.options.survivor.owed:
            self._meet(Due.of(self))
            self._bound()

    def end(self) -> None:
        """The loop has ended."""
        self.stopping.end(self.examples)
        self.display.stop()

    def share(self, loss: float) -> None:
        """Before a step's update: let all ranks know its loss, where one may be lost; collective then."""
        if self.options.survivor is not None:
            self.options.survivor.share(self, loss)

    def record(self, loss: float, total: int) -> None:
        """Note this rank's sum of losses of a step of `total` examples, all ranks together; local."""
        self.agreement.steps_done.append(Step(float(loss), total, self.stopwatch.now()))
        self.step, self.examples = self.step + 1, self.examples + total
        for observer in self.observers:
            observer(self, loss, total)

    def boundary(self) -> None:
        """The end of a step: when it is time to, agree with all ranks, evaluate, save, stop."""
        self.replicas.look(self)
        due, survivor = Due.of(self), self.options.survivor
        if any(due) or self.agreement.due(self.step) or (survivor is not None and survivor.meets(self)):
            with self.stopwatch.apart():
                self._meet(due)
        self._bound()
        if survivor is not None:
            survivor.passed(self)

    def _meet(self, due: Due) -> None:
        """Agree on the steps that are done, evaluate, save."""
        if self.agreement.steps_done:
            with self.comm.timeline.span("agree"):
                self._agree()
            self.stopping.extend(self.step, self.held.horizon(self.step))
        evaluate_and_save(self, due)

    def _bound(self) -> None:
        """The boundary of the last step has been passed."""
        self.bounded, self.before = self.step, (self.stopping.best, self.stopping.evaluations_since_best)

    def _agree(self) -> None:
        """Share losses, signals and the time limit; write and show them."""
        first, told = self.agreement.step + 1, signals.told() + self.signalled
        try:
            sent = self.held.sent(self.comm.traffic)
            agreed = self.agreement.meet(told, self.options.time_limit, sent, self.threads.vote())
        except NotFinite as found:
            raise not_finite(self, found.step, found.rank) from None
        self.legs.sent = agreed.sent
        self.threads.agreed(agreed.threads)
        self.metrics.record(first, agreed.steps, self.steps, self.rate)
        self.stopping.told(self.step, agreed.signalled, agreed.late)
        self.stopping.used(self.step, agreed.seconds, self.legs.bytes, self.examples)

    # -- after the loop ----------------------------------------------------------------------------------------------

    def __enter__(self) -> "Run":
        self.threads = Threads(self.bookkeeping.mpi).__enter__()
        self.warnings = np.seterr(all="ignore")  # what is not finite is found by the run, and said once
        return self

    def __exit__(self, kind: type[BaseException] | None, value: object, trace: object) -> None:
        self.threads.__exit__(None, None, None)
        np.seterr(**self.warnings)
        self.display.stop()
        if kind is None:
            finish(self)
        else:
            self.saver.abandon()
        known = kind is None or issubclass(kind, TrainingError | AgreedError)  # on all ranks; to free is collective
        for group in [*self.groups, self.bookkeeping] if known else []:
            group.free()
