"""What a training loop should not spell out: steps, metrics, evaluation, checkpoints, signals and the summary.

    run.begin("all_reduce", Whole(model, parameters, optimizer), data)
    for batch in run.batches(data, share=(comm.rank, comm.size)):
        ...                                the strategy: gradient, communication, update
        run.record(loss, batch.total)      local: this rank's sum of losses
        run.boundary()                     the one collective: agree on losses, signals and stopping

A run composes parts that know nothing of each other: where the time goes (stopwatch.py), what the ranks agree on
(agreement.py), when it ends (stopping.py), what is saved (checkpoint/state.py), who holds parameters (ownership.py).
If rank 0 runs alone (on_one_rank.py), it records; other ranks time steps: `with run.stopwatch.step(): ...`."""

import contextlib
import logging
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from hpcdl.checkpoint import buffers
from hpcdl.checkpoint.state import PerRank, Same, State, Tracked
from hpcdl.comm import Communicator
from hpcdl.comm.progress import exempt
from hpcdl.data import Batch
from hpcdl.data.scale_warning import scale_warning
from hpcdl.errors import AgreedError, LoneError, TrainingError, reason
from hpcdl.faults import inject
from hpcdl.kernels.device import CPU, Array
from hpcdl.machine.display import Display
from hpcdl.machine.threads import Threads
from hpcdl.memory import Memory
from hpcdl.models.mixture import counted_choices
from hpcdl.models.model import unwrapped
from hpcdl.optim import Optimizer
from hpcdl.random import Random
from hpcdl.runs import signals, stopwatch
from hpcdl.runs.accumulated import refuse_another_accumulation
from hpcdl.runs.agreeing_replicas import AgreeingReplicas
from hpcdl.runs.agreement import Agreement, NotFinite, Step
from hpcdl.runs.context import RunContext, RunSetup
from hpcdl.runs.folder import Folder
from hpcdl.runs.metrics import Metrics, shown
from hpcdl.runs.options import Options
from hpcdl.runs.ownership import Ownership, Scored, averaged, warm_up
from hpcdl.runs.progress import Progress
from hpcdl.runs.resume import open_folder, position
from hpcdl.runs.saving import BEST, LAST, Saver
from hpcdl.runs.segments import Legs
from hpcdl.runs.stopping import Due, Goal, Stopping
from hpcdl.runs.summary import conclude, finish

log = logging.getLogger("hpcdl")


class Run:
    """One training run of all ranks of `comm`, used as a context: `with Run(comm, options) as run: train(..., run)`. At
    the end of the context it writes the summary: `run.summary` on rank 0; `run.stopped`: why the run ended
    (stopping.py). Ranks of `context.everyone` that are not in `comm` serve the ranks of `comm`, and call `leave`."""

    held: Ownership  # set by `begin`, as the next five
    scored: Scored
    batch: int  # examples of a step
    per_epoch: int  # steps
    fixed: dict  # the entries of `reported` that a resumed run must have unchanged
    agreement: Agreement

    def __init__(self, comm: Communicator, options: Options | None = None, context: RunContext | None = None):
        self.comm, self.options, self.context = comm, options or Options(), context or RunContext()
        self.everyone, self.survivor = self.context.everyone or comm, self.context.survivor  # type: Communicator, Any
        self.workers, self.device = self.context.workers or comm.size, CPU  # type: int, Any
        self.per_step = self.options.environment_steps(self.workers)
        self.save_every = self.options.checkpoint_every // (self.per_step or 1)  # steps; 0: only the last is saved
        self.bookkeeping = comm.duplicate("run", allreduce="tree")  # exact counts, the same bits on all ranks
        self.random, self.display = Random(self.options.seed), Display(self.options.progress, comm.rank)
        self.stopwatch, self.memory = stopwatch.Stopwatch(comm.traffic, comm.timeline), Memory()
        goals = [] if self.options.aim is None else [self.options.aim]
        self.stopping, self.state = Stopping(self.options.patience, self.options.allowance, goals), State()
        self.legs = Legs(self.everyone, comm, self.bookkeeping, self.stopwatch, self.memory)
        self.metrics = Metrics(self.display, hasattr(self.options, "rounds"), self.per_step)
        self.folder = Folder(None, comm.rank)
        self.strategy, self.model, self.optimizer, self.data = "", None, None, None  # type: str, Any, Any, Any
        self.signalled = False  # True if a rank that does not meet the others has had a signal
        self._progress = self.bounded = Progress()  # bounded: as of the last step whose boundary has been passed
        self.saver = Saver(self.options, self.state, self.display)
        self.reported, self.groups, self.observers = {}, [], []  # type: dict, list[Any], list[Callable]
        self.summary, self.agree = None, None  # type: dict | None, bool | None

    # -- before the loop ---------------------------------------------------------------------------------------------

    def plan(self, data: Any) -> tuple[int, int, int]:
        """Return examples per update, updates per epoch and updates in all, by the options."""
        return self.options.plan(self.workers, data)

    def make_optimizer(self, model: Any, data: Any, size: int | None = None) -> Optimizer:
        """Return the optimizer that the options name, for `size` parameters (default: all of the model's)."""
        return self.options.make_optimizer(model, self.workers, data, size)

    def until_end(self, group: Any) -> Any:
        """Free `group` (None: no group) when the run ends; return it. MPI has no more than some thousands of groups."""
        self.groups += [group] if group is not None else []
        return group

    def initial(self, model: Any) -> Array:
        """Return the model's initial values, the same flat vector on all ranks, broadcast by rank 0; collective."""
        parameters = self.comm.empty(model.layout.size, model.layout.dtype)
        if self.comm.rank == 0:
            parameters[:] = model.initialize(self.random)
        self.comm.broadcast(parameters)
        return parameters

    def track(self, name: str, vector: Tracked, counted: bool = True) -> None:
        """Add a vector to each checkpoint, before `begin` loads it. counted: True if it is the optimizer's memory."""
        self.state.tracked[name] = vector
        if counted and isinstance(vector, Same | PerRank):
            self.memory.hold("optimizer", vector.array)

    def say(self, text: str) -> None:
        """Show a line, or several, on rank 0."""
        self.display.line(text)

    def report(self, **entries: Any) -> None:
        """Add entries to the summary."""
        self.reported |= entries

    def report_own(self, **entries: Any) -> None:
        """Add this rank's values to the summary, as entries NAME_per_rank."""
        self.legs.own |= {f"{name}_per_rank": value for name, value in entries.items()}

    def observe(self, observer: Callable) -> None:
        """Call observer(run, loss, total) after each step, with this rank's sum of losses and all ranks' examples."""
        self.observers.append(observer)

    def begin(
        self,
        strategy: str,
        held: Ownership,
        data: Any,
        fixed: tuple[str, ...] = (),
        learning_rate: Callable[[int], float] | None = None,
        accuracy: float = 0.0,
        tolerance: float = 0.0,
        scored: Scored | None = None,
    ) -> None:
        """Track what is held, make the run's folder, load the state of a resumed run, compile a step. fixed: names of
        the reported entries that a resumed run must have unchanged. learning_rate: the recorded rate by updates done;
        None: the optimizer's. accuracy: the test accuracy at which the run ends, 0: none; tolerance: of `Stopping`.
        scored: gives the scores; None: `held` does."""
        self.stopping.tolerance = tolerance
        self.stopping.goals += [Goal("test_accuracy", accuracy, "accuracy")] if accuracy else []
        held.further = self.options.further
        self.strategy, self.held, self.scored, self.data = strategy, held, scored or held, data
        self.model, self.optimizer, self.device = held.model, held.optimizer, held.device
        self.fixed = {name: self.reported[name] for name in fixed}
        refuse_another_accumulation(held.model, self.options.accumulate)
        data.to(self.device)
        self.batch, self.per_epoch, steps = self.plan(data)
        self.stopping.plan(steps, self.per_epoch, self.context.pause)
        buffers.follow(held.model, self.random)
        held.join(self.bookkeeping, self.memory)
        readers = held.share[1] if hasattr(held, "share") else self.workers
        sizes = self.everyone.size, self.workers, self.batch, self.per_epoch, readers
        self.setup = RunSetup(strategy, self.options, held.model, data, *sizes, self.fixed)
        self.legs.begin(held.device)
        if held.peers is not None:
            self.state.tracked |= {f"data/{name}": Same(vector) for name, vector in data.statistics.items()}
        self.state.tracked |= held.saved()
        self.folder = open_folder(self)
        inject.arm(self)
        if self.optimizer.averaged:  # loaded as it was shown
            held.hide_average()
        self.metrics.open(self.folder, self.per_epoch, learning_rate or self.optimizer.schedule)
        self.agreement = Agreement(held.peers, self.step)
        self.replicas = AgreeingReplicas(held, self.options.checks.replicas, strategy, self.step)
        with self.memory.paused():
            warm_up(held, self.scored, data, self.make_optimizer, self.comm)
        for counted in counted_choices(unwrapped(held.model)).values():
            counted[:] = 0
        self.bounded = self._progress
        self.bookkeeping.barrier()
        if self.survivor is not None:
            self.survivor.follow(self)
        log.info("%s, rank %d of %d, from step %d", strategy, self.comm.rank, self.comm.size, self.step)

    # -- the loop ----------------------------------------------------------------------------------------------------

    def batches(self, data: Any, share: tuple[int, int]) -> Iterator[Batch]:
        """Yield this rank's share of each batch, epoch after epoch, until the run ends; the loop body is timed."""
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

    def rounds(self) -> Iterator[int]:
        """Yield the steps of a strategy that reads its examples itself, until the run ends; the loop body is timed."""
        self.start()
        while not self.over:
            with self.stopwatch.step():
                yield self.step
        self.end()

    @contextlib.contextmanager
    def going_on(self) -> Iterator[None]:
        """Context of the loop of a rank that serves, or that gets its steps from a server."""
        self.start()
        yield
        self.end()

    @property
    def over(self) -> bool:
        """True if no step is to follow."""
        return self.stopping.over(self._progress)

    @property
    def progress(self) -> Progress:
        """The progress of the run now."""
        updates = 0 if self.optimizer is None else self.optimizer.step
        return replace(self._progress, updates=updates, seconds=self.stopwatch.seconds)

    @progress.setter
    def progress(self, progress: Progress) -> None:
        """Set the run, its optimizer and its clock to this progress."""
        self._progress, self.optimizer.step = progress, progress.updates
        self.stopwatch.earlier_seconds += progress.seconds - self.stopwatch.seconds

    def go_on_from(self, attributes: dict) -> None:
        """Continue from a checkpoint's attributes; stop if a goal or budget is reached."""
        self.progress = Progress.read(attributes)
        self.legs.go_on_from(attributes)
        self.stop(self.stopping.reached(self.scores))
        self.stop(self.stopping.used(self._progress, self.seconds, self.legs.bytes, self.examples))

    def stop(self, reason: str | None, known: bool = False) -> None:
        """End the run for this reason, if any; an earlier reason stays, unless this is the leading rank's (`known`)."""
        if known or (reason is not None and self._progress.stopped is None):
            self._progress = replace(self._progress, stopped=reason)

    @property
    def step(self) -> int:
        """The number of steps done."""
        return self._progress.step

    @property
    def examples(self) -> int:
        """The number of examples trained on, by all ranks."""
        return self._progress.examples

    @property
    def saved(self) -> int | None:
        """The step of the run's last checkpoint.h5; None if there is none."""
        return self.saver.saved

    @property
    def outlived(self) -> bool:
        """True if this leg continues the run without ranks that were lost."""
        return self.survivor is not None and self.survivor.goes_on

    @property
    def stopped(self) -> str | None:
        """Why the run ended; None while it goes on."""
        return self._progress.stopped

    @property
    def steps(self) -> int:
        """The number of the run's last step."""
        return self.stopping.steps

    @property
    def seconds(self) -> float:
        """Seconds spent on steps and data so far, also before a resumption, but not on evaluations or checkpoints."""
        return self.stopwatch.seconds

    @property
    def rate(self) -> float:
        """Examples trained on per second, by all ranks."""
        return self.examples / max(1e-9, self.seconds)

    @property
    def horizon(self) -> tuple[int, int]:
        """The last step (if the run is over, the present one), and the next step that is saved, at most the last."""
        last, every = self.step if self.over else self.steps, self.save_every
        return last, min(last, (self.step // every + 1) * every) if every else last

    def note(self, since: int) -> dict:
        """Return where the run is, for a rank that takes this rank's place and counts its own updates. known: the last
        step with agreed losses. fresh: the steps after both `known` and `since`. first: the step before these."""
        known, place = self.agreement.step, self.progress
        fresh = self.agreement.steps_done[max(0, since - known) :]
        return {name: value for name, value in place.attributes().items() if name != "updates"} | {
            "sent": self.legs.sent_so_far,
            "saved": self.saved,
            "reason": place.stopped,
            "signalled": self.stopping.pending == "signal",
            "known": known,
            "first": self.step - len(fresh),
            "fresh": fresh,
        }

    @property
    def parameters(self) -> Any:
        """The parameters that are scored and saved, as this rank holds them."""
        return self.held.parameters

    @property
    def scores(self) -> dict:
        """The scores of the last evaluation, by name."""
        return self._progress.scores

    def agree_seldom(self, steps: int) -> None:
        """Let the ranks agree at most once in so many steps, if more meetings cost too much; called before the loop."""
        self.agreement.fewest = self.agreement.interval = steps

    def start(self) -> None:
        """Start clocks and display: the loop begins."""
        self.agreement.start()
        self.display.start(self.step, self.steps)
        if self.outlived and self.survivor.handover.owed:
            self._meet(self._due())
            self.bounded = self._progress

    def end(self) -> None:
        """Note why the loop has ended; stop the display."""
        self.stop(self.stopping.ended(self.examples))
        self.display.stop()

    def share(self, loss: float) -> None:
        """If a rank may be lost, share a step's loss with all ranks before its update, collective; else do nothing."""
        if self.survivor is not None:
            self.survivor.share(self, loss)

    def record(self, loss: float, total: int) -> None:
        """Note a step of `total` examples, all ranks together. loss: this rank's sum of losses. Local."""
        self.agreement.steps_done.append(Step(float(loss), total, self.stopwatch.now()))
        self._progress = self._progress.after_step(total)
        for observer in self.observers:
            observer(self, loss, total)

    def boundary(self, signalled: bool = False) -> None:
        """End a step: when due, agree with all ranks, evaluate, save, stop. signalled: True if a rank that does not
        come to boundaries has had a signal. Raises TrainingError (at the end of the run, if rank 0 runs it alone)."""
        try:
            self.signalled |= signalled
            self._end_step()
        except TrainingError as error:
            self.held.fail(error)

    def _end_step(self) -> None:
        if self.replicas.due(self.step):
            with self.stopwatch.apart(), self.comm.timeline.span("compare the replicas"):
                self.replicas.compare(self.step)
        due, survivor = self._due(), self.survivor
        if any(due) or self.agreement.due(self.step) or (survivor is not None and survivor.meets(self)):
            with self.stopwatch.apart():
                self._meet(due)
        self.bounded = self._progress
        if survivor is not None:
            survivor.passed(self)

    def interrupted(self) -> None:
        """End a run on one rank at its last whole step: a signal came in the middle of a step, which is given up."""
        with self.stopwatch.apart():
            if self.agreement.steps_done:
                self._agree()
            self.stop("signal" if self.step < self.steps else None)
            self._evaluate_and_save(Due(False, False, False))

    def _due(self) -> Due:
        return Due.after(self.step, self.per_epoch, self.save_every, self.steps)

    def _meet(self, due: Due) -> None:
        if self.agreement.steps_done:
            with self.comm.timeline.span("agree"):
                self._agree()
            self._progress = self.stopping.extend(self._progress, self.held.horizon(self.step))
        self._evaluate_and_save(due)

    def _agree(self) -> None:
        first, told = self.agreement.step + 1, signals.told() + self.signalled
        try:
            sent = self.held.sent(self.comm.traffic)
            agreed = self.agreement.meet(told, self.options.time_limit, sent, self.threads.vote())
        except NotFinite as found:
            raise self.not_finite(*found.args) from None
        self.legs.sent = agreed.sent
        self.threads.agreed(agreed.threads)
        if known := [each.mean for each in agreed.steps if each.total]:
            self._progress = replace(self._progress, train_loss=known[-1])
        self.metrics.record(first, agreed.steps, self._progress, self.steps, self.rate)
        self.stop(self.stopping.told(self._progress, agreed.signalled, agreed.late))
        self.stop(self.stopping.used(self._progress, agreed.seconds, self.legs.bytes, self.examples))

    def _evaluate_and_save(self, due: Due) -> None:
        """Evaluate and save as due, and settle a checkpoint written in the background; collective over the peers."""
        self.saver.settle(wait=False)
        epochs = 1 if self.per_step else self.options.evaluate_every  # a run that acts is evaluated each epoch
        scored = due.epoch_ends and self.step // self.per_epoch % epochs == 0
        if not (scored or due.ends or due.saving or self.stopped is not None):
            return
        with self.memory.paused(), exempt(), averaged(self.held, lambda: self.over):
            names = []
            if scored or due.ends or self.stopped in ("time limit", "budget"):
                self.held.refresh()
                with self.comm.timeline.span("evaluate"), self.comm.traffic.uncounted():
                    self._evaluate()
                names += [] if self._progress.waited else [BEST]
                self._progress = self.stopping.extend(self._progress, self.held.horizon(self.step))
            names += [LAST] if due.saving or due.ends or self.stopped is not None else []
            self.saver.save(names, self.over, lambda: position(self.setup, self.progress, self.legs))

    def _evaluate(self) -> None:
        found = self.scored.scores(self.data)
        if "consensus_distance" in found:
            before = [self.scores.get(name, 0.0) for name in ("consensus_distance", "consensus_distance_max")]
            found["consensus_distance_max"] = max(found["consensus_distance"], *before)
        for name, value in found.items():
            if not math.isfinite(value):  # on all ranks alike: the sums are the same
                what = f"the {name.replace('_', ' ')} after step {self.step} is not finite"
                raise TrainingError(f"{what}; {self.folder.kept()}; {self.advice}")
        loss = self.scored.judged(found, shown(self._progress.train_loss))
        self._progress = self._progress.scored(found, loss)
        if (aim := self.options.aim) is not None and aim.name not in found:
            raise TrainingError(f"--goal {self.options.goal}: an evaluation has {', '.join(found)} alone")
        self.stop(self.stopping.judged(self._progress))
        if self.over:
            self._progress = replace(self._progress, scores=found | self.scored.last_scores(self.data))
        self.metrics.evaluated(found, self.progress, self.steps, self.rate, self.legs.sent_so_far)

    @property
    def advice(self) -> str:
        """Advice for a loss that is not finite: on the scales of the data, if they are odd, then on the options."""
        return "; ".join(filter(None, (scale_warning(self.data.scales), self.options.advice)))

    def not_finite(self, step: int, rank: int) -> TrainingError:
        """Return the error for a loss that is not finite. rank: in `comm`, whose ranks come after the serving ranks."""
        what = f"the loss of step {step} is not finite on rank {rank + self.everyone.size - self.comm.size}"
        return TrainingError(f"{what}; {self.folder.kept()}; {self.advice}")

    # -- after the loop ----------------------------------------------------------------------------------------------

    def leave(self) -> None:
        """End the run on a rank that has only served other ranks; collective over all ranks."""
        self.stop(conclude(self.everyone, self.legs.measured())[1], known=True)
        self.bookkeeping.free()

    def __enter__(self) -> "Run":
        self.threads = Threads(self.bookkeeping.mpi).__enter__()
        self.warnings = np.seterr(all="ignore")  # the run finds and reports values that are not finite
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: object) -> None:
        if value is not None:
            with contextlib.suppress(LoneError):  # for `hpcdl runs` and `hpcdl watch`; a full disk is not the error
                log.info("ended after step %d: failed: %s", self.step, reason(value))
        self.threads.__exit__(None, None, None)
        np.seterr(**self.warnings)
        self.display.stop()
        with contextlib.ExitStack() as stack:
            stack.callback(self.saver.abandon)  # a rank may be lost at the end, too: survivors find the folder free
            if kind is None:
                finish(self)
                stack.pop_all()
        known = kind is None or issubclass(kind, TrainingError | AgreedError)  # on all ranks: freeing is collective
        for group in [*self.groups, self.bookkeeping] if known else []:
            group.free()
