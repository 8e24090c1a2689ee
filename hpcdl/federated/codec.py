"""Client messages: the weighted change of the parameters, and the weight, as fixed-point numbers.

    message = [ n_k (w_k - w) in multiples of 2^-F | n_k ]         d + 1 values of int64 for d parameters

Integer sums do not depend on their order, and masks cancel exactly modulo 2^64. A change must have a 2-norm below 2^R.
With late answers of the round before, a round's sum is at most 2 n 2^R for n examples in all:

    2 n 2^R 2^F <= 2^63      F = 62 - R - bits of n      error of each w: at most |S| 2^-F / (2 sum n_k)"""

import math

import numpy as np

from hpcdl.comm import Communicator
from hpcdl.errors import TrainingError
from hpcdl.kernels import fixed_point
from hpcdl.kernels.device import device_of
from hpcdl.kernels.norm import sum_of_squares

RANGE_BITS = 10  # R


def fraction_bits(examples: int) -> int:
    """Return F, the number of bits after the binary point."""
    return 62 - RANGE_BITS - examples.bit_length()


class Codec:
    """Makes messages of changes like `like`. examples: of all clients together. length: values of a message. far: 1 +
    the last client of this rank whose change was too large; 0: none."""

    def __init__(self, like: np.ndarray, examples: int):
        device, self.size, self.length, self.far = device_of(like), like.size, like.size + 1, 0
        self.one = 2.0 ** fraction_bits(examples)
        self.message = device.zeros(self.length, np.int64)
        one, fixed = device.zeros(1, like.dtype), device.zeros(1, np.int64)  # compile kernels before any clock runs
        sum_of_squares(one)
        fixed_point.encode(one, 0.0, fixed)
        fixed_point.decode(one, 0.0, fixed)

    def encode(self, client: int, change: np.ndarray, weight: int) -> np.ndarray:
        """Return the client's message, which the next call overwrites.
        A change that is too large or not finite is only noted; `refuse_far_changes` then ends the run."""
        if math.sqrt(sum_of_squares(change)) < 2.0**RANGE_BITS:
            fixed_point.encode(change, weight * self.one, self.message[: self.size])
            self.message[self.size] = weight
        else:
            self.far = client + 1
        return self.message

    def refuse_far_changes(self, comm: Communicator, turn: int) -> None:
        """Raise TrainingError, on all ranks, if any client's change was too large in round `turn`; collective."""
        farthest = np.array([self.far])
        comm.all_reduce(farthest, op="max")
        if farthest[0]:
            raise TrainingError(
                f"the change of client {farthest[0] - 1} has a 2-norm of {2**RANGE_BITS} or more, or is not finite, in "
                f"round {turn + 1}; a smaller --lr may help"
            )

    def decode(self, total: np.ndarray, descent: np.ndarray) -> int:
        """Set descent to - sum n_k (w_k - w), from the sum of the messages; return sum n_k."""
        fixed_point.decode(descent, -1 / self.one, total[: self.size])
        return int(device_of(total).host(total[self.size :])[0])
