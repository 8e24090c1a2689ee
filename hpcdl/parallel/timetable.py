"""Actions of a pipeline stage and their times: forwards (F) and backwards (B) of micro-batches."""

from typing import NamedTuple


class Action(NamedTuple):
    """The forward ("F") or backward ("B") of one micro-batch through one chunk of a stage."""

    kind: str
    microbatch: int
    chunk: int = 0

    def __str__(self) -> str:
        return f"{self.kind}{self.microbatch}" + (f".{self.chunk}" if self.chunk else "")


class Span(NamedTuple):
    """An action with its start and stop, in any unit of time."""

    action: Action
    start: float
    stop: float

    def moved(self, by: float) -> "Span":
        """Return the span on a clock that is ahead by `by`."""
        return self._replace(start=self.start + by, stop=self.stop + by)
