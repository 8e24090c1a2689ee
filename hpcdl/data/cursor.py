"""Batches one by one, at any step of any epoch: for those who draw their steps from a shared counter, or serve others.

ahead       steps in sequence come from one chain of batches through all epochs, made one ahead by a thread; a jump
            begins a new chain
not ahead   a batch is made when it is taken, at no cost for a jump within an epoch: the epoch's order is drawn once,
            and a block of a streamed file is read when a row of another one is needed
"""

from collections.abc import Generator, Iterable, Iterator

from hpcdl.data.batch import Batch, DeviceBuffers
from hpcdl.data.prefetch import prefetch
from hpcdl.data.readers import Reader
from hpcdl.errors import UsageError


class Cursor:
    """`cursor.take(epoch, step)` is the batch that `data.batches(epoch, batch_size, share)` yields at that step.

    A batch is valid until the next but one is taken. Made by `data.cursor`.
    """

    def __init__(
        self, reader: Reader, steps: int, batch_size: int, share: tuple[int, int], ahead: bool, buffers: DeviceBuffers
    ):
        """steps: of an epoch. buffers: 2 pairs on the host, or 4 with `ahead`: one batch is being made, another one may
        have been made before a jump for nothing."""
        self.reader, self.steps, self.what = reader, steps, (batch_size, share)
        self.ahead, self.buffers, self.step = ahead, buffers, 0
        self.made: Generator[Batch, None, None] | None = None
        self.at: tuple[int, int] | int | None = None  # what `made` gives next, (epoch, step) or an epoch's any step

    def take(self, epoch: int, step: int) -> Batch:
        """That batch; UsageError for a step that an epoch does not have."""
        if not 0 <= step < self.steps:
            raise UsageError(f"an epoch of {self.steps} steps has no step {step}")
        made = self.made
        if made is None or self.at != ((epoch, step) if self.ahead else epoch):
            self.close()
            made = prefetch(self._chain(epoch, step)) if self.ahead else self._batches(epoch, self._asked(), False)
        self.made, self.at, self.step = made, None, step  # None: what fails is begun anew
        batch = next(made)
        self.at = following(epoch, step, self.steps) if self.ahead else epoch
        return self.buffers.hand_out(batch)

    def _batches(self, epoch: int, steps: Iterable[int], ahead: bool) -> Generator[Batch, None, None]:
        return self.reader.batches(epoch, *self.what, steps, self.buffers.host, ahead)

    def _chain(self, epoch: int, start: int) -> Iterator[Batch]:
        while True:
            yield from self._batches(epoch, range(start, self.steps), True)
            epoch, start = epoch + 1, 0

    def _asked(self) -> Iterator[int]:
        while True:
            yield self.step

    def close(self) -> None:
        """End the thread, where there is one."""
        if self.made is not None:
            self.made.close()
        self.made = self.at = None


def following(epoch: int, step: int, steps: int) -> tuple[int, int]:
    """The next step, as (epoch, step), where an epoch has so many."""
    return epoch + (step + 1) // steps, (step + 1) % steps
