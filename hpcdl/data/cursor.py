"""A cursor takes batches at any step of any epoch: for ranks that draw steps from a shared counter, and data servers.

ahead       consecutive steps come from one sequence of batches through all epochs, which a thread makes one ahead; a
            jump begins a new sequence
not ahead   a batch is made when it is taken. A jump within an epoch is free: the epoch's order is drawn once, and a
            block of a streamed file is read when one of its rows is needed
"""

from collections.abc import Generator, Iterable, Iterator

from hpcdl.data.batch import Batch, DeviceBuffers
from hpcdl.data.prefetch import prefetch
from hpcdl.data.readers import Reader
from hpcdl.errors import UsageError


class Cursor:
    """`cursor.take(epoch, step)` is the batch that `data.batches(epoch, batch_size, share)` yields at that step.

    A batch is valid until the second next one is taken. Made by `data.cursor`.
    """

    def __init__(
        self, reader: Reader, steps: int, batch_size: int, share: tuple[int, int], ahead: bool, buffers: DeviceBuffers
    ):
        """steps: of an epoch. buffers: 2 pairs on the host, or 4 with `ahead`: one batch in the making, and one that a
        jump may have made useless."""
        self.reader, self.steps, self.batch_arguments = reader, steps, (batch_size, share)
        self.ahead, self.buffers, self.step = ahead, buffers, 0
        self.batches: Generator[Batch, None, None] | None = None
        self.position: tuple[int, int] | int | None = (
            None  # what `made` gives next, (epoch, step) or an epoch's any step
        )

    def take(self, epoch: int, step: int) -> Batch:
        """Return the batch of this step; UsageError for a step that an epoch does not have."""
        if not 0 <= step < self.steps:
            raise UsageError(f"an epoch of {self.steps} steps has no step {step}")
        made = self.batches
        if made is None or self.position != ((epoch, step) if self.ahead else epoch):
            self.close()
            made = (
                prefetch(self._chain(epoch, step))
                if self.ahead
                else self._batches(epoch, self._requested_steps(), False)
            )
        self.batches, self.position, self.step = made, None, step  # None: after an error, begin anew
        batch = next(made)
        self.position = next_position(epoch, step, self.steps) if self.ahead else epoch
        return self.buffers.hand_out(batch)

    def _batches(self, epoch: int, steps: Iterable[int], ahead: bool) -> Generator[Batch, None, None]:
        return self.reader.batches(epoch, *self.batch_arguments, steps, self.buffers.host, ahead)

    def _chain(self, epoch: int, start: int) -> Iterator[Batch]:
        while True:
            yield from self._batches(epoch, range(start, self.steps), True)
            epoch, start = epoch + 1, 0

    def _requested_steps(self) -> Iterator[int]:
        while True:
            yield self.step

    def close(self) -> None:
        """End the thread, if there is one."""
        if self.batches is not None:
            self.batches.close()
        self.batches = self.position = None


def next_position(epoch: int, step: int, steps: int) -> tuple[int, int]:
    """Return the (epoch, step) that follows, with `steps` steps per epoch."""
    return epoch + (step + 1) // steps, (step + 1) % steps
