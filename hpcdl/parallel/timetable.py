"""Actions of a pipeline stage, their times, and the placement of a model's chunks on stages.

F    forward of a micro-batch through a chunk of layers
B    backward: the gradient by the input; also those by the weights, unless the stage's actions have a W for them
W    the gradients by the weights, if they are computed apart

in turn, 2 chunks of 3 stages          in a V
stage    0  1  2                       stage    0  1  2
chunk 0  0  1  2                       chunk 0  0  1  2        virtual stages: the chunks in the order in which
chunk 1  3  4  5                       chunk 1  5  4  3        a micro-batch goes through them"""

from collections.abc import Iterable
from typing import NamedTuple


class Action(NamedTuple):
    """The forward ("F"), backward ("B") or weight gradients ("W") of one micro-batch through one chunk of a stage."""

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


class Placement(NamedTuple):
    """Which of a model's `stages` x `chunks` consecutive parts, the virtual stages, each stage holds.
    v_shaped: True if the odd chunks go round the stages backwards, so that consecutive chunks meet on one stage."""

    stages: int
    chunks: int = 1
    v_shaped: bool = False

    def virtual(self, stage: int, chunk: int) -> int:
        """Return the virtual stage that is chunk `chunk` of stage `stage`."""
        return chunk * self.stages + (self.stages - 1 - stage if self.v_shaped and chunk % 2 else stage)

    def place(self, virtual: int) -> tuple[int, int]:
        """Return (stage, chunk) of a virtual stage: the inverse of `virtual`."""
        chunk, at = divmod(virtual, self.stages)
        return (self.stages - 1 - at if self.v_shaped and chunk % 2 else at), chunk

    def of(self, stage: int) -> list[int]:
        """Return the virtual stages of a stage, by chunk."""
        return [self.virtual(stage, chunk) for chunk in range(self.chunks)]

    @property
    def last(self) -> int:
        """The last virtual stage, which has the loss."""
        return self.stages * self.chunks - 1


def split_backwards(actions: Iterable[Action]) -> set[tuple[int, int]]:
    """Return (micro-batch, chunk) of the backwards whose weight gradients are computed apart."""
    return {(microbatch, chunk) for kind, microbatch, chunk in actions if kind == "W"}
