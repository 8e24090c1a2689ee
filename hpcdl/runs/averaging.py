"""The mean of the iterates as the model of a run: `--average from=5`, Polyak and Ruppert's averaging.

    from epoch E on, after each update:    average <- average + (w - average) / k,   k = 1, 2, 3, ...

The last iterate of SGD at a constant rate wanders about the optimum; the mean of its iterates gets there, at the rate
of the best estimator there can be, without a schedule that has to be tuned. (Polyak and Juditsky, "Acceleration of
stochastic approximation by averaging", SIAM J. Control and Optimization 1992; Ruppert, 1988)

The optimizer keeps the mean, of what it updates and where that lies (hpcdl/optim/optimizer.py), so that it costs no
message under any strategy. Training goes on from the iterates. What is scored and saved is the mean: for that time the
two change places in memory, and so they do in a checkpoint, whose `parameters` are the mean and whose
`optimizer/average` are the iterates.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from hpcdl.errors import UsageError, parse_finite
from hpcdl.kernels.device import Array, device_of

if TYPE_CHECKING:
    from hpcdl.runs.ownership import Ownership


def first_update(text: str, per_epoch: int = 1, steps: int = 1) -> int | None:
    """The update, of `steps`, with which the mean begins, from a text as from=5 (epochs); "": None. UsageError."""
    if not text:
        return None
    name, _, number = text.partition("=")
    with contextlib.suppress(ValueError):
        if name == "from" and parse_finite(number) >= 0:
            return round(min(parse_finite(number) * per_epoch, steps))
    raise UsageError(f"--average {text}: say with which epoch the mean of the parameters begins, as from=5")


def exchange(a: Array, b: Array) -> None:
    """Let two vectors have each other's values."""
    kept = device_of(a).empty(a.shape, a.dtype)
    kept[:] = a
    a[:] = b
    b[:] = kept


@contextlib.contextmanager
def averaged(held: "Ownership", over: Callable[[], bool]) -> Iterator[None]:
    """Meanwhile what is held is the mean, where there is one; so it stays when the run is over."""
    if held.optimizer.averaged and not held.average_shown:
        held.show_average()
        held.average_shown = True
    yield
    if held.average_shown and not over():
        held.hide_average()
        held.average_shown = False
