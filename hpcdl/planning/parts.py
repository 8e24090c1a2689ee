"""The parts of a step's predicted time (step_time.py)."""

from typing import NamedTuple


class StepParts(NamedTuple):
    """Seconds of a step by part. hidden: of messages that overlap with computing; not in the sum."""

    compute: float
    messages: float
    bubble: float
    queue: float
    start: float
    hidden: float
    examples: int

    @property
    def seconds(self) -> float:
        """Seconds of a step."""
        return self.compute + self.messages + self.bubble + self.queue + self.start

    @property
    def rate(self) -> float:
        """Examples per second."""
        return self.examples / self.seconds if self.seconds > 0 else float("inf")

    def per_worker(self, workers: int) -> "StepParts":
        """Return the parts per step of any worker, where `workers` workers take steps of their own at once."""
        c, m, b, q, s, h = (each / workers for each in self[:-1])
        return StepParts(c, m, b, q, s, h, self.examples)
