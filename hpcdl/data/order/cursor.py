"""A cursor takes batches at any step of any epoch: for ranks that draw steps from a shared counter, and data servers.

ahead       a thread makes the next batch of one sequence through all epochs; a jump begins a new sequence
not ahead   a batch is made when it is taken; a jump within an epoch is free: the epoch's order is drawn once, and a
            block of a streamed file is read when one of its rows is needed"""

import itertools
from collections.abc import Generator, Iterable

from hpcdl.data.batch import Batch, DeviceBuffers
from hpcdl.data.order.prefetch import prefetch
from hpcdl.data.order.readers import Reader
from hpcdl.data.order.sampler import Share
from hpcdl.errors import UsageError


class Cursor:
    """Gives the batches of `data.batches` in any order; a batch is valid until the second next one is taken.
    steps: per epoch. buffers: 2 pairs on the host, 4 with `ahead` (also one in the making, one made before a jump)."""

    def __init__(self, reader: Reader, steps: int, batch_size: int, share: Share, ahead: bool, buffers: DeviceBuffers):
        self.reader, self.steps, self.batch_arguments = reader, steps, (batch_size, share)
        self.ahead, self.buffers, self.step = ahead, buffers, 0
        self.batches: Generator[Batch, None, None] | None = None
        # The next batch of `batches`: (epoch, step) with `ahead`, else any step of this epoch.
        self.position: tuple[int, int] | int | None = None

    def take(self, epoch: int, step: int) -> Batch:
        """Return the batch of this step; UsageError for a step that an epoch does not have."""
        if not 0 <= step < self.steps:
            raise UsageError(f"an epoch of {self.steps} steps has no step {step}")
        made = self.batches
        if made is None or self.position != ((epoch, step) if self.ahead else epoch):
            self.close()
            if self.ahead:
                epochs = itertools.chain([(epoch, step)], ((later, 0) for later in itertools.count(epoch + 1)))
                made = prefetch(each for at, start in epochs for each in self._batches(at, range(start, self.steps)))
            else:
                made = self._batches(epoch, iter(lambda: self.step, None), False)
        self.batches, self.position, self.step = made, None, step  # None: after an error, begin anew
        batch = next(made)
        self.position = next_position(epoch, step, self.steps) if self.ahead else epoch
        return self.buffers.hand_out(batch)

    def _batches(self, epoch: int, steps: Iterable[int], ahead: bool = True) -> Generator[Batch, None, None]:
        return self.reader.batches(epoch, *self.batch_arguments, steps, self.buffers.host, ahead)

    def close(self) -> None:
        if self.batches is not None:
            self.batches.close()
        self.batches = self.position = None


def next_position(epoch: int, step: int, steps: int) -> tuple[int, int]:
    """Return the (epoch, step) that follows, with `steps` steps per epoch."""
    return epoch + (step + 1) // steps, (step + 1) % steps
