"""All-reduce with 16-bit messages and error feedback: half of the bytes, and rounding errors do not accumulate.

A reduce-scatter and an all-gather, each in one step. On 3 ranks, with vectors a, b, c of 3 chunks, and ' for 16 bits:

                     rank 0                rank 1                rank 2
    holds            a0 a1 a2              b0 b1 b2              c0 c1 c2
    sends            a1' -> 1, a2' -> 2    b2' -> 2, b0' -> 0    c0' -> 0, c1' -> 1
    adds in float32  S0 = a0 + b0' + c0'   S1 = b1 + a1' + c1'   S2 = c2 + a2' + b2'
    sends to all     S0'                   S1'                   S2'                    all then hold S0' S1' S2'

    cost, N ranks    messages      bytes sent; k(r): length of chunk r of the K     steps
    rank r           2 (N - 1)     2 [K - k(r) + (N - 1) k(r)]  (4 (N-1) K / N)     2

That is half of what the ring sends in float32. Error feedback at both ends: the rank that rounds a chunk keeps the
error in `residual`, and adds it to that chunk in the next call. Rank r rounds the other ranks' chunks when it sends
them, and the sum of chunk r: one residual of K values serves both. The invariant is

    sum over ranks of (vector + residual before) = result + sum over ranks of residual after

up to the rounding of the additions: the results of T calls add up to the T exact sums, within the residuals. Each chunk
is added on one rank, in one order, and all ranks decode the same codes, so all get the same bits. A single rank sends
and rounds nothing. (Tang et al., "DoubleSqueeze: parallel stochastic gradient descent with double-pass
error-compensated compression", ICML 2019; the exchange: Tang et al., "1-bit Adam", ICML 2021)"""

import copy
from collections.abc import Iterator

import numpy as np
from mpi4py import MPI
from numpy.typing import DTypeLike

from hpcdl.chunks import chunks
from hpcdl.comm.collective_schedule import Step, collective
from hpcdl.errors import UsageError, unknown
from hpcdl.kernels import convert
from hpcdl.kernels.device import CPU

KINDS = {  # encode with error feedback, decode, decode and add
    "float16": (convert.encode_float16, convert.decode_float16, convert.add_float16),
    "bfloat16": (convert.encode_bfloat16, convert.decode_bfloat16, convert.add_bfloat16),
}


class Compressed:
    """State of one vector's compressed all-reduces: buffers, and `residual`, this rank's rounding errors, valid for
    this number of ranks. size, dtype: of the vector (float32, float64). kind: float16 or bfloat16. Else UsageError."""

    def __init__(self, size: int, dtype: DTypeLike, kind: str):
        if kind not in KINDS:
            raise unknown("compression", kind, KINDS)
        if np.dtype(dtype) not in (np.float32, np.float64):
            raise UsageError(f"compressed messages are made of float32 or float64 values, not {np.dtype(dtype)}")
        self.kind, self.in_flight = kind, False
        self.encode, self.decode, self.add = KINDS[kind]
        self.residual, self.code = CPU.zeros(size, dtype), CPU.empty(size, np.uint16)
        self.inbox = np.empty((0, 0), np.uint16)
        nothing, no_code = self.residual[:0], self.code[:0]
        self.encode(nothing, nothing, no_code)  # compile before any timed call
        self.decode(nothing, no_code)
        self.add(nothing, no_code)

    def part(self, cut: slice) -> "Compressed":
        """Return the state of slice `cut` of the vector, reduced by itself. Its residual is a view of the whole one."""
        part = copy.copy(self)
        part.residual, part.code, part.inbox = self.residual[cut], self.code[cut], np.empty((0, 0), np.uint16)
        return part

    def check_vector(self, vector: np.ndarray, op: str) -> None:
        """Raise UsageError, before any message leaves, if vector or op do not fit this state, or it is in use."""
        if vector.size != self.residual.size or vector.dtype != self.residual.dtype:
            wanted = f"{self.residual.size} elements of {self.residual.dtype}"
            raise UsageError(f"this compression state is for {wanted}, not for {vector.size} of {vector.dtype}")
        if op not in ("sum", "mean"):
            raise UsageError(f"compressed messages are for sum and mean, not {op}, whose errors do not add up")
        if self.in_flight:
            raise UsageError("an all-reduce in flight uses this compression state; wait for it, or make another state")


@collective
def compressed_all_reduce(comm: MPI.Intracomm, vector: np.ndarray, state: Compressed) -> Iterator[Step]:
    """Sum `vector` (flat, contiguous) over all ranks of `comm`, in place; state: this rank's `Compressed`."""
    rank, size = comm.Get_rank(), comm.Get_size()
    cut, code, others = chunks(vector.size, size), state.code, [other for other in range(size) if other != rank]
    own, state.in_flight = cut[rank], True
    if size > 1:
        if state.inbox.shape != (size - 1, code[own].size):  # reused, as new memory costs more
            state.inbox = np.empty((size - 1, code[own].size), np.uint16)
        inbox = state.inbox  # a row of codes from each other rank
        requests = [comm.Irecv(row, other) for row, other in zip(inbox, others, strict=True)]
        for to in others[rank:] + others[:rank]:  # the right neighbour first, so that all links are busy
            part = cut[to]
            state.encode(vector[part], state.residual[part], code[part])
            requests.append(comm.Isend(code[part], to))
        yield requests
        for row in inbox:
            state.add(vector[own], row)
        state.encode(vector[own], state.residual[own], code[own])
        yield [comm.Irecv(code[cut[other]], other) for other in others] + [comm.Isend(code[own], to) for to in others]
        state.decode(vector, code)
    state.in_flight = False
