"""What may help a run whose loss is no number any more; said at the start, too, where it can be seen coming."""

from typing import TYPE_CHECKING

from hpcdl.data.scale_warning import scale_warning
from hpcdl.errors import TrainingError

if TYPE_CHECKING:
    from hpcdl.runs.run import Run


def advice(run: "Run") -> str:
    """What may help: first what the data suggest, then what the options do."""
    return "; ".join(filter(None, (scale_warning(run.data.scales), run.options.advice)))


def not_finite(run: "Run", step: int, rank: int) -> TrainingError:
    """The error for a loss that is not a finite number; rank: in `run.comm`, which follows the ranks that serve it."""
    what = f"the loss of step {step} is not finite on rank {rank + run.everyone.size - run.comm.size}"
    return TrainingError(f"{what}; {run.folder.kept()}; {advice(run)}")
