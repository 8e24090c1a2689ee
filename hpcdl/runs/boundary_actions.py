"""What is due at the end of a step: an evaluation, a checkpoint; and what of it is then done.

the end of an epoch (of every so many, --evaluate-every)    evaluate; where that is the best so far, save best.h5
every --checkpoint-every steps                              save checkpoint.h5
the last step, or the one after which the run is stopped    both, but no evaluation where a signal has stopped it
"""

import math
from typing import TYPE_CHECKING, NamedTuple

from hpcdl.comm.progress import activity
from hpcdl.errors import TrainingError
from hpcdl.runs.advice import advice
from hpcdl.runs.averaging import averaged
from hpcdl.runs.saving import BEST, LAST

if TYPE_CHECKING:
    from hpcdl.runs.run import Run


class Due(NamedTuple):
    """Whether a step is the last one of an epoch, one after which is saved, the last one of the run."""

    epoch_ends: bool
    saving: bool
    ends: bool

    @classmethod
    def of(cls, run: "Run") -> "Due":
        """Of the run's last step."""
        every = run.options.checkpoint_every // (run.options.per_step or 1)
        return cls(run.step % run.per_epoch == 0, bool(every) and run.step % every == 0, run.step >= run.steps)


def evaluate_and_save(run: "Run", due: Due) -> None:
    """What of it is due; collective over the ranks that agree.

    A checkpoint that has been written in the background is known from here on.
    """
    run.saver.settle(wait=False)
    epochs = 1 if run.options.per_step else run.options.evaluate_every  # who acts has an epoch between two
    scored = due.epoch_ends and run.step // run.per_epoch % epochs == 0
    if not (scored or due.ends or due.saving or run.stopped is not None):
        return
    with run.memory.paused(), activity.known(), averaged(run):
        names = []
        if scored or due.ends or run.stopped in ("time limit", "budget"):
            run.held.refresh()
            with run.comm.timeline.span("evaluate"), run.comm.traffic.uncounted():
                evaluate(run)
            names += [BEST] if run.stopping.improved else []
            run.stopping.extend(run.step, run.held.horizon(run.step))
        names += [LAST] if due.saving or due.ends or run.stopped is not None else []
        run.saver.save(names)


def evaluate(run: "Run") -> None:
    """Score the model on the test part and the validation part, all ranks together."""
    found = run.metrics.with_largest(run.held.scores(run.data))
    for name, value in found.items():
        if not math.isfinite(value):  # on all ranks alike: the sums are the same
            what = f"the {name.replace('_', ' ')} after step {run.step} is not finite"
            raise TrainingError(f"{what}; {run.folder.kept()}; {advice(run)}")
    judged = run.held.judged(found, run.metrics.train_loss)
    run.stopping.judge(judged, found.get("test_accuracy"), found.get("duality_gap"))
    run.metrics.scores = found | (run.held.last_scores(run.data) if run.over else {})
    run.metrics.evaluated(run.step, run.steps, found, run.seconds, run.rate, run.legs.sent_so_far)
