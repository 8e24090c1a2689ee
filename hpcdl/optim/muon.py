"""Muon: momentum for the matrices of hidden layers, orthogonalized by a Newton-Schulz iteration; AdamW for the rest.

With G = mean gradient of a matrix W (outputs, inputs), learning rate a and momentum V:

    V <- beta V + (1 - beta) G          U = (1 - beta) G + beta V                 (Nesterov's form)
    X <- U / |U|,  5 times:             A = X X^T,  X <- p X + (q A + r A^2) X    p, q, r = 3.4445, -4.7750, 2.0315
    W <- (1 - a weight_decay) W - a f X

    scale=shape    f = sqrt(max(1, outputs / inputs))        adam_rate 0.015      (Jordan et al., 2024)
    scale=rms      f = 0.2 sqrt(max(outputs, inputs))        adam_rate 1          (Liu et al., 2025)

For U = L S R^T (singular value decomposition) the iteration approximates L R^T: it maps a singular value s of U / |U|
to p s + q s^3 + r s^5, five times, which leads all but tiny ones into about [0.7, 1.2]. X is transposed if it has more
rows than columns, so that A is the smaller Gram matrix. With scale=rms the root mean square of an update is that of
AdamW, about 0.2, so that one rate and one weight decay suit both.

Matrices are the weights of hidden layers (`Layout.hidden`); embeddings, output layers, gains and biases are updated by
AdamW (adam.py) at the rate adam_rate a. A tensor (inputs, n, outputs), as q, k and v in one, has n matrices. State:
momentum is V, and AdamW's first moment of the rest; second_moment is AdamW's, and stays 0 for matrices: the same memory
as AdamW's. Cost: 2 steps (2 m^2 n + m^3) flops beyond AdamW's for m x n, m <= n.

(Jordan et al., "Muon: an optimizer for hidden layers in neural networks", 2024; Liu et al., "Muon is scalable for LLM
training", 2025, for weight decay and scale=rms)"""

import itertools
import math
from collections.abc import Sequence
from typing import Any

from hpcdl.errors import UsageError, unknown
from hpcdl.kernels import updates
from hpcdl.kernels.device import Array, device_of
from hpcdl.kernels.norm import sum_of_squares
from hpcdl.optim.adam import AdamW
from hpcdl.optim.optimizer import check_decay_rate

P, Q, R = 3.4445, -4.7750, 2.0315  # p + q s^2 + r s^4 has a large slope at 0, for few iterations: Jordan et al., 2024
EPS = 1e-7  # least norm by which a matrix is divided
MUON = {"beta": 0.95, "steps": 5, "scale": "shape", "adam_rate": 0.0, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8}
ADAM_RATES = {"shape": 0.015, "rms": 1.0}


class Muon(AdamW):
    """Muon; state: momentum, second_moment. weights: the model's hidden weights. On a vector with all of them, `update`
    updates `whole`, these weights, and `rest`, the slices between them; on any other vector the slices `rest` alone."""

    vectors = ("momentum", "second_moment")

    def __init__(
        self,
        *args: Any,
        weights: Sequence[Any] = (),
        beta: float = 0.95,
        steps: int = 5,
        scale: str = "shape",
        adam_rate: float = 0.0,
        **kwargs: Any,
    ):
        check_decay_rate("Muon's beta", beta)
        if scale not in ADAM_RATES:
            raise unknown("scale of muon", scale, ADAM_RATES)
        if not 1 <= steps <= 100:
            raise UsageError(f"Muon's steps are Newton-Schulz iterations, 1 to 100, not {steps}")
        if not 0 <= adam_rate < math.inf:
            raise UsageError(f"Muon's adam_rate is a positive factor, or 0 for that of the scale, not {adam_rate}")
        if not weights:
            raise UsageError("muon updates the weights of hidden layers, and there are none here; take adamw")
        super().__init__(*args, **kwargs)
        self.beta, self.steps, self.scale, self.weights = beta, steps, scale, weights
        self.adam_rate = adam_rate or ADAM_RATES[scale]
        self.whole: Sequence[Any] = weights if self.size >= weights[-1].slice.stop else ()
        self.rest = complement([each.slice for each in self.whole], self.size)
        if self.whole:
            self.workspace = self.device.empty(workspace_size(weights), self.dtype)

    def of_size(self, size: int) -> "Muon":
        return self._elementwise(super().of_size(size))

    def over(self, part: slice) -> "Muon":
        return self._elementwise(super().over(part))

    def _elementwise(self, other: Any) -> "Muon":
        """Return `other` as the rule of a slice, which updates all its elements by AdamW."""
        other.whole, other.rest, other.workspace = (), [slice(0, other.size)], None
        return other  # type: ignore[no-any-return]

    def apply(self, w: Array, g: Array, rate: float, scale: float) -> None:
        if self.whole:
            assert self.workspace is not None
            most, v = largest(self.whole), self.state["momentum"]
            for tensor in self.whole:
                at = tensor.slice
                u = self.workspace[: at.stop - at.start]
                self.accumulate(u, g[at], v[at], scale)
                self.orthogonalize(tensor, u, self.workspace[most:])
                self.move(tensor, w[at], u, rate)
        elif self.step == self.since:  # other code updates the matrices: compile now, before a clock runs
            u, none, v = self.device.zeros((3, 1), self.dtype)
            self.accumulate(u, none, v, scale)
        m, s = self.state["momentum"], self.state["second_moment"]
        for part in self.rest:
            self.adam(w[part], g[part], m[part], s[part], rate * self.adam_rate, scale)

    def accumulate(self, u: Array, g: Array, v: Array, scale: float) -> None:
        """Update the momentum v by the gradient scale * g, and write U, the direction before Newton-Schulz, to u."""
        updates.nesterov_direction(u, g, v, scale, self.beta, 1 - self.beta)

    def orthogonalize(self, tensor: Any, u: Array, workspace: Array) -> None:
        """Replace each matrix in u, the values of a hidden weight, by X; workspace: see `newton_schulz`."""
        for matrix in tensor.matrices(u):
            newton_schulz(matrix, workspace, self.steps)

    def move(self, tensor: Any, w: Array, x: Array, rate: float) -> None:
        """Step from w along x, the same elements of a hidden weight and of its X."""
        updates.sgd(w, x, rate, factor(self.scale, *tensor.matrix_shape[1:]), self.weight_decay)


def factor(scale: str, outputs: int, inputs: int) -> float:
    """Return f, the factor of the learning rate for a matrix of this shape."""
    return math.sqrt(max(1, outputs / inputs)) if scale == "shape" else 0.2 * math.sqrt(max(outputs, inputs))


def newton_schulz(matrix: Array, workspace: Array, steps: int = 5) -> None:
    """Replace a matrix (m, n) by X after so many iterations, in place; a matrix of zeros stays 0.
    workspace: a vector of 2 m n + 2 min(m, n)^2 elements or more, of the matrix's type, which is overwritten."""
    upright = matrix.T if matrix.shape[0] > matrix.shape[1] else matrix
    m, n = upright.shape
    ends = list(itertools.accumulate((m * n, m * n, m * m, m * m), initial=0))
    pieces = [workspace[start:stop] for start, stop in itertools.pairwise(ends)]
    x, y, gram, square = (each.reshape(m, -1) for each in pieces)
    x[...] = upright
    norm = math.sqrt(sum_of_squares(pieces[0]))
    x /= EPS if norm < EPS else norm  # a norm that is not finite makes all elements NaN, or 0
    matmul = device_of(matrix).xp.matmul
    for _ in range(steps):
        matmul(x, x.T, out=gram)
        matmul(gram, gram, out=square)
        gram *= Q
        square *= R
        square += gram
        matmul(square, x, out=y)
        x *= P
        x += y
    upright[...] = x


def largest(weights: Sequence[Any]) -> int:
    """Return the elements of the largest of these tensors."""
    return max(math.prod(each.shape) for each in weights)


def workspace_size(weights: Sequence[Any]) -> int:
    """Return the elements of memory for U of the largest tensor, and for the workspace of `newton_schulz`."""
    shapes = [each.matrix_shape for each in weights]
    return largest(weights) + max(2 * m * n + 2 * min(m, n) ** 2 for _, m, n in shapes)


def matrix_flops(tensor: Any, steps: int = 5) -> float:
    """Return the flops of the products for the matrices of a hidden weight."""
    count, outputs, inputs = tensor.matrix_shape
    m, n = sorted((outputs, inputs))
    return float(count * steps * 2 * (2 * m * m * n + m**3))


def complement(parts: Sequence[slice], size: int) -> list[slice]:
    """Return the slices of range(size) between the `parts`, which are sorted."""
    edges = [0, *itertools.chain.from_iterable((part.start, part.stop) for part in parts), size]
    return [slice(start, stop) for start, stop in zip(edges[::2], edges[1::2], strict=True) if start < stop]
