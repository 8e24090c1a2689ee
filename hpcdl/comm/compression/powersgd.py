"""PowerSGD: the sum of a matrix of gradients as a product of two thin factors, by one step of a power iteration.

    M_w (n, m): gradient of rank w plus its residual        Q (m, r): from the step before, the same on all ranks

    P <- all-reduce sum of M_w Q          (n, r)            P <- orthonormal columns of P (kernels/low_rank.py)
    Q <- all-reduce sum of M_w^T P        (m, r)
    sum of the gradients <- P Q^T                           residual of rank w <- M_w - P Q^T / N

With M the sum of the M_w, P Q^T = P P^T M: the best approximation of M by columns in the span of P. The step before
gives Q, so the span approaches that of the r largest singular vectors (warm start). Its columns are first made
orthonormal, which leaves their span and helps precision. Tensors with two or more dimensions are matrices of shape
(first dimension, rest); biases and norms travel as they are, with P.

    cost, N ranks, matrices of (n_i, m_i), b other values       values all-reduced                  all-reduces
    each step, by the communicator's algorithm                  sum r_i (n_i + m_i) + b             2

r_i = min(r, n_i, m_i). A matrix whose factors are not shorter by `ratio` travels as it is, too. A column of Q that is
zero, as after a gradient of zeros or of lower rank, is drawn anew. The invariant is

    sum over ranks of (vector + residual before) = result + sum over ranks of residual after

to the rounding of the subtraction. All ranks compute P Q^T from the same bits. (Vogels, Karimireddy and Jaggi,
"PowerSGD: practical low-rank gradient compression for distributed optimization", NeurIPS 2019, algorithms 1 and 2)"""

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI
from numpy.typing import DTypeLike

from hpcdl.comm.collective_schedule import Step
from hpcdl.comm.compression.codec import RandomKey
from hpcdl.comm.compression.method import CompressionMethod
from hpcdl.comm.compression.state import Compressed, Steps
from hpcdl.errors import UsageError
from hpcdl.kernels.low_rank import expand, orthogonalize
from hpcdl.kernels.reduce import add_into
from hpcdl.random import Random


class Matrix(NamedTuple):
    """A compressed matrix: its place in the vector, and its factors' places in the vectors of all P and of all Q."""

    start: int
    rows: int
    columns: int
    rank: int
    left: int
    right: int

    def of(self, vector: np.ndarray) -> np.ndarray:
        return vector[self.start :][: self.rows * self.columns].reshape(self.rows, self.columns)

    def p(self, factors: np.ndarray) -> np.ndarray:
        return factors[self.left :][: self.rows * self.rank].reshape(self.rows, self.rank)

    def q(self, factors: np.ndarray) -> np.ndarray:
        return factors[self.right :][: self.columns * self.rank].reshape(self.columns, self.rank)


def matrices(layout: Any, rank: int, ratio: float) -> list[Matrix]:
    """Return the matrices that are compressed, in order."""
    found: list[Matrix] = []
    left = right = 0
    for tensor in layout.tensors.values():
        if len(tensor.shape) < 2 or 0 in tensor.shape:
            continue
        n, m = tensor.shape[0], math.prod(tensor.shape[1:])
        r = min(rank, n, m)
        if ratio * r * (n + m) < n * m:
            found.append(Matrix(tensor.offset, n, m, r, left, right))
            left, right = left + n * r, right + m * r
    return found


class PowerSGD(Compressed):
    """State of all-reduces by factors. layout: of the tensors. rank: of the factors. residual: what the results
    have left out of this rank's gradients. factors: each matrix's Q, one after the other."""

    def __init__(
        self, size: int, dtype: DTypeLike, key: RandomKey, layout: Any, feedback: bool, rank: int, ratio: float
    ):
        super().__init__(size, dtype, key)
        if layout is None:
            raise UsageError("powersgd compresses matrices; give the layout of the vector's tensors")
        self.keep, self.matrices = feedback, matrices(layout, rank, ratio)
        self.residual = np.zeros(size if feedback else 0, self.dtype)
        self.factors = np.zeros(sum(each.columns * each.rank for each in self.matrices), self.dtype)
        nothing = np.zeros((1, 1), self.dtype)  # compile before any timed call
        orthogonalize(nothing)
        expand(nothing, nothing, nothing, nothing, 1.0)

    @property
    def tracked(self) -> dict[str, np.ndarray]:
        return {"residual": self.residual} if self.keep else {}

    @property
    def common(self) -> dict[str, np.ndarray]:
        return {"factors": self.factors}

    def cut_vectors(self, cut: slice) -> None:
        own = [each for each in self.matrices if cut.start <= each.start < cut.stop]
        self.residual = self.residual[cut]
        if not own:
            self.matrices, self.factors = [], self.factors[:0]
            return
        left, right, last = own[0].left, own[0].right, own[-1]
        self.factors = self.factors[right : last.right + last.columns * last.rank]
        self.matrices = [
            each._replace(start=each.start - cut.start, left=each.left - left, right=each.right - right) for each in own
        ]

    def prepare_factors(self) -> None:
        """Make the columns of Q orthonormal; draw those that are zero, as all are at the start, on all ranks alike."""
        for each in self.matrices:
            q = each.q(self.factors)
            orthogonalize(q)
            zero = ~q.any(axis=0)
            if zero.any():
                random = Random(self.key.seed)("powersgd", self.key.step, self.key.first + each.start)
                q[:, zero] = random.standard_normal(q.shape)[:, zero]

    @property
    def plain(self) -> list[slice]:
        """The slices of the vector between the matrices."""
        stops = [each.start for each in self.matrices] + [self.size]
        starts = [0] + [each.start + each.rows * each.columns for each in self.matrices]
        return [slice(start, stop) for start, stop in zip(starts, stops, strict=True) if start < stop]

    def reduce(self, comm: MPI.Intracomm, vector: np.ndarray, all_reduce: Steps) -> Iterator[Step]:
        residual = self.residual if self.keep else np.zeros_like(vector)
        left = sum(each.rows * each.rank for each in self.matrices)
        plain = sum(part.stop - part.start for part in self.plain)
        sent, at = np.empty(left + plain, self.dtype), left  # all P, then what is not compressed
        for part in self.plain:
            sent[at : at + part.stop - part.start] = vector[part]
            at += part.stop - part.start
        self.prepare_factors()
        for each in self.matrices:
            m = each.of(residual)
            add_into(m.reshape(-1), each.of(vector).reshape(-1))
            np.matmul(m, each.q(self.factors), out=each.p(sent))
        yield from all_reduce(comm, sent)
        at = left
        for part in self.plain:
            vector[part] = sent[at : at + part.stop - part.start]
            at += part.stop - part.start
        if not self.matrices:
            return
        for each in self.matrices:
            orthogonalize(each.p(sent))
            np.matmul(each.of(residual).T, each.p(sent), out=each.q(self.factors))
        yield from all_reduce(comm, self.factors)
        for each in self.matrices:
            p, q = each.p(sent), each.q(self.factors)
            expand(each.of(vector), each.of(residual), p, q, 1 / comm.Get_size())


def lengths(layout: Any, cut: slice, rank: int, ratio: float) -> tuple[int, int]:
    """Return the values of the two all-reduces for slice `cut` of the vector, of whole tensors."""
    own = [each for each in matrices(layout, rank, ratio) if cut.start <= each.start < cut.stop]
    plain = cut.stop - cut.start - sum(each.rows * each.columns for each in own)
    return plain + sum(each.rows * each.rank for each in own), sum(each.columns * each.rank for each in own)


def check(rank: int, ratio: float) -> None:
    """Raise UsageError if the settings are out of range."""
    if rank < 1:
        raise UsageError(f"rank is 1 or more, not {rank}")
    if not 0 <= ratio < math.inf:
        raise UsageError(f"ratio is 0 or more, not {ratio}")


def fits(layout: Any, rank: int, ratio: float) -> None:
    """Raise UsageError if no matrix of the model has this rank, or none gets shorter."""
    largest = max((each.rank for each in matrices(layout, layout.size, 0.0)), default=0)
    if rank > largest:
        raise UsageError(f"rank is at most {largest}, that of the model's largest matrix, not {rank}")
    if not matrices(layout, rank, ratio):
        raise UsageError(f"no matrix of the model gets shorter by factors of rank {rank}; take a lower rank")


METHODS = [
    CompressionMethod(
        "powersgd",
        state=PowerSGD,
        settings={"rank": 2, "ratio": 1.0},
        first="rank",
        check=check,
        fits=fits,
        lengths=lengths,
    )
]
