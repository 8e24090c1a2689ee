"""The parts of a step's seconds, as they are foretold (step_time.py)."""

from typing import NamedTuple


class Parts(NamedTuple):
    """Seconds of a step; their sum is what it takes. hidden: of messages, beside computing, and no part of the sum.

    examples: of a step.
    """

    compute: float
    messages: float
    bubble: float
    queue: float
    start: float
    hidden: float
    examples: int

    @property
    def seconds(self) -> float:
        """Of a step."""
        return self.compute + self.messages + self.bubble + self.queue + self.start

    @property
    def rate(self) -> float:
        """Examples a second."""
        return self.examples / self.seconds if self.seconds > 0 else float("inf")

    def of(self, workers: int) -> "Parts":
        """Of a step that is one worker's, where so many work at once."""
        c, m, b, q, s, h = (each / workers for each in self[:-1])
        return Parts(c, m, b, q, s, h, self.examples)
