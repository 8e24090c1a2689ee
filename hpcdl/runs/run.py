"""What a training loop should not spell out: steps, metrics, evaluation, checkpoints, signals and the summary.

    for batch in run.batches(data, share=(comm.rank, comm.size)):
        ...                          the strategy: gradient, communication, update
        run.record(loss, batch)      local: this rank's sum of losses
        run.boundary()               the one collective: agree on losses, signals and stopping

The ranks agree in one small message on a communicator of the run's own, counted apart from the training's; when
steps are short, only every few steps. All that a decision depends on travels in that message, so that all ranks
take the same one.

Where parameters live on servers, rank 0 runs the run alone (`begin(..., alone=True)`): it records, evaluates and saves
what it holds, and nothing but the set-up and the summary is collective. The other ranks time their steps:

    with run.timed():
        ...                          pull, compute, push
        with run.fetching():         the data of the step
            ...
"""

import contextlib
import hashlib
import logging
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
from threadpoolctl import threadpool_limits

from hpcdl.comm import Communicator, agreement
from hpcdl.comm.operations import SUM
from hpcdl.comm.watchdog import activity
from hpcdl.data import Batch
from hpcdl.errors import TrainingError, UsageError
from hpcdl.kernels.device import CPU, device_of
from hpcdl.memory import KINDS, Memory
from hpcdl.optim import make_optimizer, make_schedule
from hpcdl.random import Random
from hpcdl.runs import signals
from hpcdl.runs.checkpoint import Checkpoint, one_line, rotate
from hpcdl.runs.cut import CutVector
from hpcdl.runs.evaluation import evaluate, scores
from hpcdl.runs.folder import Folder, absolute, automatic, check
from hpcdl.runs.options import Options
from hpcdl.runs.progress import Display
from hpcdl.runs.replicas import Replicas
from hpcdl.runs.straggler import unslowed
from hpcdl.runs.summary import conclude, measured, summarize
from hpcdl.runs.threads import threads

log = logging.getLogger("hpcdl")
ADVICE = "a smaller --lr or a --clip-norm may help"
AGREE_SECONDS = 0.1  # the ranks agree about that often, or at every step when steps are longer


class Run:
    """One training run of all ranks of `comm`. Use it as a context: `with Run(comm, options) as run: train(..., run)`.

    Leaving the context evaluates, saves and writes the summary; `run.summary` holds it on rank 0, `run.stopped` why the
    run ended: finished, time limit, patience, accuracy or signal. everyone: the communicator of all ranks that the
    summary speaks of, where others serve those of `comm`, and call `summary.conclude`. workers: how many ranks compute.
    """

    def __init__(self, comm: Communicator, options: Options | None = None, everyone=None, workers: int | None = None):
        self.comm, self.options, self.everyone = comm, options or Options(), everyone or comm
        self.workers = workers or comm.size
        self.own = comm.duplicate("run", allreduce="tree")  # exact counts, the same bits on all ranks, few steps
        self.peers = self.own  # those that agree at boundaries
        self.random = Random(self.options.seed)
        self.display = Display(self.options.progress, comm.rank)
        self.model, self.data, self.optimizer, self.device = None, None, None, CPU
        self.tracked: dict[str, np.ndarray | Elsewhere] = {}  # the same on all ranks
        self.owned: dict[str, np.ndarray] = {}  # of each rank its own
        self.cuts: dict[str, CutVector] = {}  # of each rank a part
        self.extra = {}  # what a strategy adds to the summary
        self.step = self.agreed = self.examples = 0
        self.every, self.seldom, self.stopped, self.steps_done = 1, 1, None, []
        self.stopping, self.signalled, self.paused_seconds = None, False, 0.0
        self.goal = 0.0  # the test accuracy that ends the run; 0: none does
        self.best, self.improved, self.waited, self.scores, self.train_loss = math.inf, False, 0, {}, math.nan
        self.loop_seconds = self.data_seconds = self.earlier_seconds = 0.0
        self.blocked_seconds = self.talked_seconds = 0.0
        self.folder = self.summary = self.agree = self.saved = self.replicas = self.part = None
        self.groups = []
        self.memory = Memory()

    # -- before the loop ---------------------------------------------------------------------------------------------

    def plan(self, data) -> tuple[int, int, int]:
        """Examples per update, updates per epoch, updates in all, as the options say."""
        return self.options.plan(self.workers, data)

    def make_optimizer(self, model, data, size: int | None = None):
        """The optimizer that the options name, for `size` parameters (default: all of the model's)."""
        options, (batch, per_epoch, steps) = self.options, self.plan(data)
        schedule = make_schedule(options.rate_schedule, options.lr, steps, per_epoch, batch)
        size = model.layout.size if size is None else size
        return make_optimizer(
            options.optimizer,
            size,
            model.layout.dtype,
            schedule,
            options.weight_decay,
            options.clip_norm,
            getattr(model, "device", CPU),
        )

    def until_end(self, group):
        """A group of ranks, or None, that is freed when the run ends: MPI has no more than some thousands at once."""
        self.groups += [group] if group is not None else []
        return group

    def initial(self, model):
        """The model's initial values, made on rank 0 and broadcast: the same flat vector on all ranks; collective."""
        parameters = self.comm.empty(model.layout.size, model.layout.dtype)
        if self.comm.rank == 0:
            parameters[:] = model.initialize(self.random)
        self.comm.broadcast(parameters)
        return parameters

    def track(
        self, name: str, array: "np.ndarray | Elsewhere", cut: list | None = None, *, per: str = "global"
    ) -> None:
        """Make `array`, a flat vector, part of each checkpoint; before `begin`, which loads what the run goes on from.

        cut: where this rank's array is but a part of the vector, [(piece, whether it speaks for it), ...]
        (hpcdl/runs/cut.py): the checkpoint holds the whole one. per: "global", the same on all ranks; or "rank", this
        rank's own, of one length on all ranks: it is stored as row `rank` of ranks/NAME, and the run can be gone on
        with on the same number of ranks only. A run that rank 0 runs alone may track what lies `Elsewhere`.
        """
        if cut is not None:
            self.cuts[name] = CutVector(self.own, array, cut)
        else:
            {"global": self.tracked, "rank": self.owned}[per][name] = array

    def begin(
        self,
        strategy: str,
        model,
        parameters,
        optimizer,
        data,
        *,
        alone=False,
        replicas=False,
        refresh=None,
        horizon=None,
        fixed=(),
        part=None,
    ):
        """Track parameters and optimizer, make the run's folder, and load the state when the run resumes.

        alone: rank 0 runs the run alone, and the strategy has tracked what it wants to keep there; `parameters` are
        None on ranks that hold no whole vector. replicas: each rank has parameters and an optimizer of its own, which
        need not agree; the run scores, saves and reports the average (`Replicas`). refresh(): called before
        `parameters` are scored or saved. horizon(): the last step that is under way already, to which a run that is
        told to stop still goes. fixed: which entries of `extra` a run that resumes must have as they were, for what is
        saved depends on them. part: what this rank holds of a model that is cut (hpcdl/services/holding.py), and then
        `parameters` are what of them it owns, and it scores: `evaluate(None, batch)` over its `share` of the examples.
        """
        self.strategy, self.model, self.optimizer, self.data = strategy, model, optimizer, data
        self.fixed = {name: self.extra[name] for name in fixed}
        self.parameters, self.device = parameters, getattr(model, "device", CPU)
        self.refresh, self.horizon = refresh or (lambda: None), horizon or (lambda: self.step)
        if replicas:
            self.replicas = Replicas(self, parameters)
            self.parameters, self.refresh = self.replicas.average, self.replicas.refresh
            self.track("replica", parameters, per="rank")
        self.part = part
        data.to(self.device)
        self.batch, self.per_epoch, self.steps = self.plan(data)
        if self.comm.rank == 0 or not alone:
            for name, vector in data.statistics.items():
                self.track(f"data/{name}", vector)
        if alone:
            self.peers = self.own.split(0 if self.comm.rank == 0 else None, name="keeper")
        elif part is not None:
            self.track("parameters", self.parameters, part.parameter_pieces)
            for name, vector in optimizer.state.items():
                self.track(f"optimizer/{name}", vector, part.pieces)
        else:
            self._weigh(model, optimizer)
            self.track("parameters", self.parameters)
            for name, vector in optimizer.state.items():
                self.track(f"optimizer/{name}", vector, per="rank" if replicas else "global")
        with activity.inside("broadcast"):
            path = self.own.mpi.bcast(self._path() if self.comm.rank == 0 else None)
        self.folder = Folder(path, self.comm.rank)
        resumed = bool(self.options.resume)
        with agreement(self.own.mpi):
            if path is not None and self.comm.rank == 0:
                check(path, resumed and path.resolve() == Path(self.options.resume).resolve())
            found = Checkpoint.read(Path(self.options.resume)) if resumed and self.comm.rank == 0 else None
            if found is not None:
                self._check(found)
        if resumed:
            self._load(found)
        with agreement(self.own.mpi):
            if path is not None and self.comm.rank == 0:
                try:
                    self.folder.create(self.options)
                except OSError as error:
                    raise UsageError(f"--out {path} cannot be written: {error.strerror}") from None
        self.folder.open(self.step)
        self._warm_up()
        log.info("%s, rank %d of %d, from step %d", strategy, self.comm.rank, self.comm.size, self.step)
        reduces = self.extra.get("allreduce", self.comm.allreduce) == self.comm.allreduce
        if reduces and self.comm.memory is not None and self.comm.memory.table:
            log.info("all-reduce by length: %s", ", ".join(self.comm.memory.table))

    def _weigh(self, model, optimizer) -> None:
        """Count the memory of a rank that holds a whole model; that of the gradient is counted by `backward`."""
        self.memory.hold("parameters", self.parameters)
        for vector in optimizer.state.values():
            self.memory.hold("optimizer", vector)
        if hasattr(model, "pool"):
            model.pool.memory = self.memory

    def _warm_up(self) -> None:
        """Compile, or load from the cache, what a step needs, before any clock runs."""
        device, dtype = self.device, self.model.layout.dtype
        least = 0 if device is CPU else 1  # a launch of nothing compiles nothing
        if self.parameters is not None:
            x, y = (device.array(each[:least]) for each in self.data.train.rows(0, 1))
            few = Batch(x, y, 1, epoch=0, step=0, index=np.arange(least))
            with self.memory.paused(), self.comm.traffic.uncounted():
                if self.part is not None:
                    self.part.try_out(few)
                else:
                    gradient = device.zeros(self.parameters.size, dtype)
                    unslowed(self.model).loss_and_gradient(self.parameters, few, gradient)
        self.make_optimizer(self.model, self.data, least).update(device.zeros(least, dtype), device.zeros(least, dtype))
        SUM(np.empty(0, dtype), np.empty(0, dtype))
        self.own.barrier()

    def _path(self) -> Path | None:
        if self.options.out == "auto":
            return automatic(self.strategy)
        return None if self.options.out in ("", "none") else Path(self.options.out)

    def _attributes(self) -> dict:
        """What a checkpoint says of its run, beside the vectors."""
        return {
            "strategy": self.strategy,
            "model": self.options.model,
            "source": absolute(self.options.data),
            "layout": self.model.layout.describe(),
            "data": {
                "name": self.data.name,
                "features": list(self.data.features),
                "classes": self.data.classes,
                "rows": self.data.examples,
            },
            "optimizer": self.options.optimizer,
            "seed": self.options.seed,
            "batch": self.batch,
            "step": self.step,
            "epoch": self.step / self.per_epoch,
            "updates": self.optimizer.step,
            "examples": self.examples,
            "best": None if math.isinf(self.best) else self.best,
            "waited": self.waited,
            "scores": self.scores,
            "train_loss": self.known_loss,
            "seconds": self.seconds,
            "fixed": self.fixed,
        }

    def _check(self, found: Checkpoint) -> None:
        """Refuse to go on from a checkpoint of another model, optimizer, seed or batch size."""
        mine, theirs = self._attributes(), found.attributes
        refusal = f"--resume {self.options.resume}: that run's"
        if mine["layout"] != theirs["layout"]:
            vectors = {"theirs": found.vectors["parameters"], "mine": self.model.layout}
            sizes = {name: f"{vector.size} parameters of {vector.dtype}" for name, vector in vectors.items()}
            theirs, mine = f"{theirs['model']} with {sizes['theirs']}", f"{mine['model']} with {sizes['mine']}"
            raise UsageError(f"{refusal} model is {theirs}, not {mine}")
        if mine["data"] != theirs["data"]:
            rows = [f"{each['data']['name']} with {each['data']['rows']} training rows" for each in (theirs, mine)]
            raise UsageError(f"{refusal} data are {rows[0]}, not {rows[1]}")
        for name in ("optimizer", "seed", "batch"):
            if mine[name] != theirs[name]:
                raise UsageError(f"{refusal} {name} is {theirs[name]}, not {mine[name]}")
        for name, value in mine["fixed"].items():
            before = theirs.get("fixed", {}).get(name, value)
            if before != value:
                raise UsageError(f"{refusal} {name.replace('_', ' ')} is {before}, not {value}")
        wanted = {*self.tracked, *self.cuts, *map(stored, self.owned)}
        if set(found.vectors) != wanted:
            raise UsageError(f"{refusal} state is {', '.join(sorted(found.vectors))}, not {', '.join(sorted(wanted))}")
        for name in self.owned:
            ranks = len(found.vectors[stored(name)])
            if ranks != self.comm.size:
                raise UsageError(f"{refusal} {name} belongs to its {ranks} ranks; start {ranks}, not {self.comm.size}")

    def _load(self, found: Checkpoint | None) -> None:
        """Give all ranks the state that rank 0 has read."""
        with activity.inside("broadcast"):
            attributes = self.own.mpi.bcast(found.attributes if found else None)
        for name in sorted(self.tracked):
            if isinstance(self.tracked[name], Elsewhere):
                self.tracked[name].write(found.vectors[name])
                continue
            if found:
                device_of(self.tracked[name]).copy_in(self.tracked[name], found.vectors[name])
            self.peers.broadcast(self.tracked[name])
        for name, vector in self.cuts.items():
            vector.scatter(found and found.vectors[name])
        self._scatter(found)
        self.step = self.agreed = attributes["step"]
        if self.folder.path is not None and self.folder.path.resolve() == Path(self.options.resume).resolve():
            self.saved = self.step
        self.optimizer.step, self.examples = attributes["updates"], attributes["examples"]
        self.best = math.inf if attributes["best"] is None else attributes["best"]
        self.waited, self.scores = attributes["waited"], attributes["scores"]
        self.train_loss = math.nan if attributes["train_loss"] is None else attributes["train_loss"]
        self._check_goal()
        self.earlier_seconds = attributes["seconds"]

    def _scatter(self, found: Checkpoint | None) -> None:
        """Give each rank the states of its own that rank 0 has read."""
        for name, array in self.owned.items():
            if found:
                rows = found.vectors[stored(name)]
                device_of(array).copy_in(array, rows[0])
                for rank in range(1, self.comm.size):
                    self.own.push(rows[rank], rank)
            else:
                self.own.wait(array, 0)

    def _gather(self) -> dict[str, np.ndarray]:
        """The ranks' own states as a checkpoint holds them, one row for each rank, on rank 0; nothing on the others."""
        gathered = {}
        for name, array in self.owned.items():
            if self.comm.rank > 0:
                self.own.push(array, 0)
            else:
                rows = gathered[stored(name)] = np.empty((self.comm.size, array.size), array.dtype)
                rows[0] = device_of(array).host(array)
                for rank in range(1, self.comm.size):
                    self.own.wait(rows[rank], rank)
        for name, vector in self.cuts.items():
            whole = vector.gather(self.model.layout.size)
            if whole is not None:
                gathered[name] = whole
        return gathered

    # -- the loop ----------------------------------------------------------------------------------------------------

    def batches(self, data, share: tuple[int, int]):
        """This rank's share of each batch, epoch after epoch, until the run ends; the loop body is timed as a step."""
        clock = time.perf_counter_ns
        self.start()
        while not self.over:
            epoch, start = divmod(self.step, self.per_epoch)
            source, asked = iter(data.batches(epoch, self.batch, share, start)), clock()
            for batch in source:
                self.data_seconds += (clock() - asked) / 1e9
                with self.timed():
                    yield batch
                if self.over:
                    source.close()
                    break
                asked = clock()
        self.end()

    @property
    def over(self) -> bool:
        """Whether no more steps are to be done."""
        return self.stopped is not None or self.step >= self.steps

    def agree_seldom(self, steps: int) -> None:
        """Agree at most every so many steps, where to meet at each of them would cost too much; before the loop."""
        self.every = self.seldom = steps

    def start(self) -> None:
        """The loop begins: clocks and display start."""
        self.started = self.agreed_at = time.perf_counter()
        self.display.start(self.step, self.steps)

    def end(self) -> None:
        """The loop has ended."""
        self.stopped = self.stopped or self.stopping or "finished"
        self.display.stop()

    @contextlib.contextmanager
    def timed(self, name: str = "step"):
        """`with run.timed(): ...` counts what is inside as a step's time, but for boundaries and `fetching`."""
        traffic = self.comm.traffic
        talked, blocked = traffic.seconds, traffic.blocked_seconds
        self.mark = begun = time.perf_counter_ns()
        yield
        self._lap()
        self.comm.timeline.add(name, begun, self.mark)
        self.talked_seconds += traffic.seconds - talked
        self.blocked_seconds += traffic.blocked_seconds - blocked

    @contextlib.contextmanager
    def fetching(self):
        """Within `timed`: what is inside counts as waiting for data, and not as the step's time."""
        with self._apart():
            begun = self.mark
            yield
        self.data_seconds += (self.mark - begun) / 1e9

    @contextlib.contextmanager
    def _apart(self):
        """Within `timed`: what is inside is no part of the step, neither its time nor its messages."""
        traffic = self.comm.traffic
        self._lap()
        talked, blocked = traffic.seconds, traffic.blocked_seconds
        yield
        self.mark = time.perf_counter_ns()
        self.talked_seconds -= traffic.seconds - talked
        self.blocked_seconds -= traffic.blocked_seconds - blocked

    def excuse(self, seconds: float) -> None:
        """Take off a wait within the step that was due to an evaluation or a checkpoint on the rank that answers."""
        self.loop_seconds -= seconds
        self.talked_seconds -= seconds
        self.blocked_seconds -= seconds

    def _lap(self) -> None:
        """Add the time since the mark to the steps' time, and set the mark anew."""
        now = time.perf_counter_ns()
        self.loop_seconds += (now - self.mark) / 1e9
        self.mark = now

    @property
    def seconds(self) -> float:
        """Seconds spent on steps and data so far, those before a resumption included; no evaluation, no checkpoints."""
        return self.earlier_seconds + self.loop_seconds + self.data_seconds

    def backward(self, parameters, batch, gradient, on_ready=None, meanwhile=None) -> float:
        """gradient <- the sum of gradients over the batch's rows, in --accumulate parts; returns the sum of losses.

        on_ready(slice): called when a slice of the gradient is final, so in the last part only; instead of it,
        meanwhile(slice) is called between all layers of all parts.
        """
        gradient[:] = 0
        if not self.memory.now["gradients"]:
            self.memory.hold("gradients", gradient)
        *parts, last = batch.split(self.options.accumulate)
        loss = sum(self.model.loss_and_gradient(parameters, part, gradient, meanwhile) for part in parts)
        return loss + self.model.loss_and_gradient(parameters, last, gradient, on_ready or meanwhile)

    def show(self, text: str) -> None:
        """Print a text on rank 0, however progress is shown."""
        if self.comm.rank == 0 and text:
            self.display.console.print(text, highlight=False, markup=False, soft_wrap=True)

    def record(self, loss: float, batch) -> None:
        """Note this rank's sum of losses of a step; local."""
        passed = (time.perf_counter_ns() - self.mark) / 1e9
        self.steps_done.append((float(loss), batch.total, self.seconds + passed))
        self.step += 1
        self.examples += batch.total

    def boundary(self) -> None:
        """The end of a step: when it is time to, agree with all ranks, evaluate, save, stop."""
        options, epoch_ends = self.options, self.step % self.per_epoch == 0
        saving = bool(options.checkpoint_every) and self.step % options.checkpoint_every == 0
        ends = self.step >= self.steps
        if not (epoch_ends or saving or ends or self.step - self.agreed >= self.every):
            return
        with self._apart():
            begun = self.mark
            self._conclude_step(epoch_ends, saving, ends)
        self.paused_seconds += (self.mark - begun) / 1e9

    def _conclude_step(self, epoch_ends: bool, saving: bool, ends: bool) -> None:
        """What `boundary` does when it is time to."""
        with self.comm.timeline.span("agree"):
            self._agree()
        self._finish_what_has_begun()
        with self.memory.paused():
            self._evaluate_and_save(epoch_ends, saving, ends)

    def _evaluate_and_save(self, epoch_ends: bool, saving: bool, ends: bool) -> None:
        """What of it is due."""
        due = epoch_ends and self.step // self.per_epoch % self.options.evaluate_every == 0
        if due or ends or self.stopped == "time limit":
            self.refresh()
            with self.comm.timeline.span("evaluate"), self.comm.traffic.uncounted():
                self._evaluate()
            if self.improved:
                self.save_best()
            self._finish_what_has_begun()
        if saving or ends or self.stopped is not None:
            self.refresh()
            with self.comm.timeline.span("checkpoint"):
                self.save()

    def _finish_what_has_begun(self) -> None:
        """Told to stop, go on to the end of the steps that some ranks have begun with."""
        if self.stopped is not None and self.step < self.horizon():
            self.stopping, self.stopped, self.steps = self.stopped, None, self.horizon()

    def _agree(self) -> None:
        """Sum the losses of the steps since the last agreement; share signals, the time limit and the next interval."""
        count, options = len(self.steps_done), self.options
        elapsed = time.perf_counter() - self.started
        message = np.zeros(count + 3)
        message[:count] = [loss for loss, _, _ in self.steps_done]
        message[count] = len(signals.received) + self.signalled
        if self.comm.rank == 0:  # what depends on a clock is decided by one rank
            message[count + 1] = bool(options.time_limit) and elapsed >= options.time_limit
            lately = (time.perf_counter() - self.agreed_at) / count
            message[count + 2] = min(1000, max(1, AGREE_SECONDS // lately))
        self.peers.all_reduce(message)
        losses, (signalled, late, every) = message[:count], message[count:]
        self._refuse_infinite(losses)
        lines = []
        for step, loss, (_, total, seconds) in zip(
            range(self.agreed + 1, self.step + 1), losses, self.steps_done, strict=True
        ):
            train_loss = loss / total if total else None  # in a round of which all clients stay away
            self.train_loss = self.train_loss if train_loss is None else train_loss
            lines.append(self._position(step) | {"train_loss": train_loss, "seconds": round(seconds, 6)})
        self.folder.record(lines)
        rate = self.examples / max(1e-9, self.seconds)
        self.display.update(self.step, self.steps, lines[-1]["epoch"], self.train_loss, self._score(), rate)
        self.steps_done, self.agreed, self.every = [], self.step, max(self.seldom, int(every))
        self.agreed_at = time.perf_counter()
        if self.step < self.steps and self.stopping is None:
            self.stopped = "signal" if signalled else "time limit" if late else None

    def _refuse_infinite(self, losses) -> None:
        """End the run when the loss of a step is not a finite number, and say of which step and rank."""
        if np.isfinite(losses).all():
            return
        count = len(losses)
        first = np.full(self.peers.size, count, np.int64)
        bad = np.flatnonzero(~np.isfinite([loss for loss, _, _ in self.steps_done]))
        first[self.peers.rank] = bad[0] if bad.size else count
        self.peers.all_reduce(first, op="min")
        rank = int(first.argmin())
        raise self.infinite(self.agreed + 1 + int(first[rank]), rank)

    def infinite(self, step: int, rank: int) -> TrainingError:
        """The error for a loss that is not a finite number; rank: in `comm`, which follows the ranks that serve it."""
        rank += self.everyone.size - self.comm.size
        return TrainingError(f"the loss of step {step} is not finite on rank {rank}; {self._kept()}; {ADVICE}")

    def _kept(self) -> str:
        last = self.folder.path and self.folder.path / "checkpoint.h5"
        return f"the last good checkpoint is {last}" if last and last.exists() else "there is no checkpoint yet"

    def _evaluate(self) -> None:
        """Score the model on the test part and the validation part, all ranks together."""
        line = self._position(self.step)
        scored, share = self.model, (self.peers.rank, self.peers.size)
        if self.part is not None:
            scored, share = self.part, self.part.share
        for name, split in (("test", self.data.test), ("validation", self.data.validation)):
            if split is not None:
                sums = evaluate(scored, self.parameters, split, self.data.classes, share)
                self.peers.all_reduce(sums)
                line |= scores(sums, self.data.classes).named(name)
        if self.replicas is not None:
            line["consensus_distance"] = self.replicas.distance()
        self.scores = {name: value for name, value in line.items() if name not in self._position(self.step)}
        for name, value in self.scores.items():
            if not math.isfinite(value):  # on all ranks alike: the sums are the same
                name = name.replace("_", " ")
                raise TrainingError(f"the {name} after step {self.step} is not finite; {self._kept()}; {ADVICE}")
        judged = self.scores.get("validation_loss", self.scores.get("test_loss", self.train_loss))
        self.improved = judged < self.best
        self.best, self.waited = (judged, 0) if self.improved else (self.best, self.waited + 1)
        if self.options.patience and self.waited >= self.options.patience and self.stopped is None:
            self.stopped = "patience"
        self._check_goal()
        if self.replicas is not None and self.over:
            self.scores["replica_test_accuracy"] = self.replicas.accuracies()
        self.folder.record([line | {"train_loss": self.known_loss, "seconds": round(self.seconds, 6)}])
        if self.display.mode == "lines":
            rate = self.examples / max(1e-9, self.seconds)
            where = "round" if "round" in line else f"epoch {line['epoch']:g}  step"
            self.display.line(
                f"{where} {self.step}/{self.steps}  loss {self.train_loss:.4f}  {self._score()}  {rate:,.0f} examples/s"
            )

    def _check_goal(self) -> None:
        """End the run where it scores what it was to reach."""
        if self.goal and self.scores.get("test_accuracy", 0) >= self.goal and self.stopped is None:
            self.stopped = "accuracy"

    @property
    def known_loss(self) -> float | None:
        """The mean loss of the last step that had examples; None before there was one."""
        return None if math.isnan(self.train_loss) else self.train_loss

    def _position(self, step: int) -> dict:
        """How a line of the metrics says where the run is."""
        position = {"step": step, "epoch": step / self.per_epoch}
        return position | {"round": step} if hasattr(self.options, "rounds") else position

    def _score(self) -> str:
        for name in ("validation_accuracy", "test_accuracy"):
            if name in self.scores:
                return f"{name.replace('_', ' ')} {self.scores[name]:.2%}"
        return f"test rmse {self.scores['test_rmse']:.4g}" if "test_rmse" in self.scores else ""

    def save(self) -> None:
        """Write checkpoint.h5, and keep as many older ones as the options say."""
        self._write(lambda found: rotate(self.folder.path, self.options.keep, found, self.saved))
        self.saved = self.step

    def save_best(self) -> None:
        """Write best.h5: the state that scored best so far."""
        self._write(lambda found: found.write(self.folder.path / "best.h5"))

    def _write(self, write) -> None:
        """Write a checkpoint on rank 0, unless the state is not finite: a checkpoint is always a good one."""
        if self.folder.path is None:
            return
        failed, reason = np.zeros(2), ""
        vectors = self.tracked | self._gather()
        if self.comm.rank == 0:
            vectors = {name: on_host(vector) for name, vector in vectors.items()}
            if not all(np.isfinite(vector).all() for vector in vectors.values()):
                failed[0] = 1
            else:
                try:
                    write(Checkpoint(vectors, self._attributes()))
                except (OSError, RuntimeError) as error:  # h5py says RuntimeError when the disk is full
                    failed[1], reason = 1, one_line(error)
        self.peers.broadcast(failed)
        if failed[0]:
            raise TrainingError(f"the parameters after step {self.step} are not finite; {self._kept()}")
        if failed[1]:
            raise TrainingError(f"the checkpoint of step {self.step} cannot be written: {reason}")

    # -- after the loop ----------------------------------------------------------------------------------------------

    def replicas_agree(self) -> bool:
        """Whether all ranks that hold the whole parameters hold the same, to the bit; where the model is cut, whether
        those do that hold the same part of it."""
        if self.part is not None:
            return self.part.agree(self.own)
        low, high = np.array([np.iinfo(np.int64).max]), np.array([0])
        if self.parameters is not None:
            low[0] = high[0] = fingerprint(self.device.host(self.parameters))
        self.own.all_reduce(low, op="min")
        self.own.all_reduce(high, op="max")
        return bool(low[0] == high[0])

    def measurements(self) -> dict:
        """What this run cost this rank, in the names of summary.json."""
        seconds = self.loop_seconds, self.talked_seconds, self.blocked_seconds, self.data_seconds
        costs = measured(self.comm.traffic, self.own.traffic.bytes, *seconds, self.device)
        weighed = self.memory.peak["gradients"] > 0
        return costs | ({"memory": {kind: self.memory.peak[kind] for kind in KINDS}} if weighed else {})

    def finish(self) -> dict | None:
        """Write trace and summary and print the table; if a signal stopped the run, say how to go on."""
        trace = self.folder.path and self.folder.path / "trace.json"
        leads = self.comm.rank == 0
        ranks, self.stopped = conclude(self.everyone, self.measurements(), leads, trace, self.stopped)
        if self.stopped == "signal":
            where = f"go on with --resume {self.folder.path}" if self.folder.path else "nothing was saved (no --out)"
            self.display.line(f"stopped by a signal after step {self.step} of {self.steps}; {where}")
        else:
            self.agree = self.replicas_agree() if self.replicas is None else None
            if ranks is not None:
                self.summary = summarize(self, ranks, self.agree)
                self.folder.write("summary.json", self.summary)
        log.info("ended after step %d: %s", self.step, self.stopped)
        self.folder.close()
        if self.agree is False:
            raise TrainingError("the replicas do not agree: the ranks hold different parameters, which must not be")
        return self.summary

    def __enter__(self):
        self.threads = threadpool_limits(threads(self.own.mpi))
        self.warnings = np.seterr(all="ignore")  # what is not finite is found by the run, and said once
        return self

    def __exit__(self, kind, value, trace):
        self.threads.restore_original_limits()
        np.seterr(**self.warnings)
        self.display.stop()
        if kind is None:
            self.finish()
        elif self.folder is not None:
            self.folder.close()
        if kind is None or issubclass(kind, TrainingError):  # what all ranks know; to free is a collective call
            for group in [*self.groups, self.own]:
                group.free()


def fingerprint(vector: np.ndarray) -> int:
    """A number that two vectors share only if they are the same bits."""
    return int.from_bytes(hashlib.blake2b(np.ascontiguousarray(vector), digest_size=7).digest(), "little")


class Done(NamedTuple):
    """A step that other ranks have done, as `record` knows it: `total` examples."""

    total: int


class Elsewhere:
    """A vector that a checkpoint holds as a whole and that lies in parts elsewhere: read() -> vector, write(vector)."""

    def __init__(self, read: Callable[[], np.ndarray], write: Callable[[np.ndarray], None]):
        self.read, self.write = read, write


def on_host(vector) -> np.ndarray:
    """The whole vector in the memory of this rank."""
    return vector.read() if isinstance(vector, Elsewhere) else device_of(vector).host(vector)


def stored(name: str) -> str:
    """Where a checkpoint holds what each rank has of its own."""
    return f"ranks/{name}"
