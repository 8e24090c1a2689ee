"""Arithmetic intensity of kernels: flops and bytes moved, counted from their formulas.

    flops = per_element * elements + per_row * rows       bytes = passes * elements * bytes of an element

One flop: an addition, subtraction, multiplication, division, comparison, square root or logarithm in the kernel's text;
changes of sign, conversions and integer arithmetic count nothing. An exponential counts 26 flops, a hyperbolic tangent
21, as in elementary.py for float32. passes: how often an element is read or written, without vectors of a row's or a
column's length."""

from typing import NamedTuple

EXP, TANH = 26, 21  # flops, float32


class Cost(NamedTuple):
    """Flops and passes of a kernel. formula: its operations, in order."""

    formula: str
    per_element: float
    passes: float
    per_row: float = 0.0

    def flops(self, rows: int, columns: int = 1) -> float:
        """Return the flops for a matrix (rows, columns), or for a vector of `rows` elements."""
        return self.per_element * rows * columns + self.per_row * rows

    def moved(self, rows: int, columns: int = 1, itemsize: int = 4) -> float:
        """Return the bytes moved for a matrix (rows, columns) of elements of `itemsize` bytes."""
        return self.passes * rows * columns * itemsize


COSTS = {
    "add_into": Cost("x + y", 1, 3),
    "max_into": Cost("y > x, y != y", 2, 3),
    "min_into": Cost("y < x, y != y", 2, 3),
    "add_scaled": Cost("x + a y", 2, 3),
    "scale": Cost("a x", 1, 2),
    "sum_of_squares": Cost("total + x x", 2, 1),
    "sgd": Cost("d = s g + c w; w - r d", 3 + 2, 3),
    "momentum": Cost("d; v = b v + d; w - r v", 3 + 2 + 2, 5),
    "nesterov": Cost("d; v = b v + d; w - r (d + b v)", 3 + 2 + 4, 5),
    "nesterov_direction": Cost("d = c (s g); v = b v + d; u = d + b v", 2 + 2 + 2, 4),
    "adam": Cost("d; m = b m + c d; s = e s + f (d d); h w - r (m / (q sqrt(s) + eps))", 3 + 3 + 4 + 7, 7),
    "yogi": Cost(
        "d; m = b m + c d; q = d d; s - f q ((s > q) - (s < q)); w - r (m / (sqrt(s) + eps))", 3 + 3 + 1 + 5 + 5, 7
    ),
    "adagrad": Cost("d; s + d d; w - r (d / (sqrt(s) + eps))", 3 + 2 + 5, 5),
    "proximal": Cost("g + f (w - c)", 3, 4),
    "average": Cost("a + f (w - a)", 3, 3),
    "add_bias": Cost("z + b", 1, 2),
    "add_bias_residual": Cost("z + b + x", 2, 3),
    "add_bias_relu": Cost("y = z + b; y < 0", 2, 2),
    "add_bias_tanh": Cost("tanh(z + b)", 1 + TANH, 2),
    "add_bias_gelu": Cost("x = z + b; x / (1 + exp(-x (l + c (x x))))", 1 + 4 + EXP + 2, 2),
    "add_rows": Cost("total + dy", 1, 1),
    "relu_backward": Cost("y <= 0; dz = dy k; total + dz", 3, 3),
    "tanh_backward": Cost("dz = dy (1 - y y); total + dz", 4, 3),
    "gelu_backward": Cost(
        "x = z + b; q = x x; s = 1 / (1 + exp(-x (l + c q))); dz = dy s (1 + x (1 - s) (l + k q)); total + dz",
        2 + 3 + EXP + 2 + 8 + 1,
        3,
    ),
    "layer_norm": Cost(
        "total + x; squares + (x - m) (x - m); (x - m) f g + b; a row: m, f = 1 / sqrt(v / n + eps)", 1 + 4 + 4, 2, 5
    ),
    "layer_norm_backward": Cost(
        "h = (x - m) f; d = dx g; a + d h; c + d; dg + dx h; db + dx; f (dx g - c - h a); a row: a / n, c / n",
        6 + 5 + 7,
        3,
        2,
    ),
    "rms_norm": Cost("squares + x x; x f g; a row: f = 1 / sqrt(v / n + eps)", 2 + 2, 2, 4),
    "rms_norm_backward": Cost("h = x f; a + dx g h; dg + dx h; f (dx g - h a); a row: a / n", 4 + 3 + 5, 3, 1),
    "swiglu": Cost("g / (1 + exp(-g)) v", EXP + 3, 3),  # passes and flops for an element of u
    "swiglu_backward": Cost("s = 1 / (1 + exp(-g)); d v s (1 + g (1 - s)); d (g s)", EXP + 2 + 6 + 2, 5),
    "softmax_cross_entropy": Cost(
        "z > top; e = exp(z - top); total + e; e / total; a row: 1 / total, dz - 1, log(total) + (top - z), loss",
        1 + 1 + EXP + 2,
        2,
        6 - 1,  # no comparison for the first element
    ),
    "rotate": Cost("a c - b s; a s + b c; a pair: s = sign s", 3 + 0.5, 2),  # of the columns that are rotated
    "squared": Cost("d = z - y; total + d d", 3, 3),
    "add_float16": Cost("x + y", 1, 2.5),
    "add_bfloat16": Cost("x + y", 1, 2.5),
    # Kernels of layers, with at most one addition.
    "embed": Cost("copied", 0, 2),
    "embed_backward": Cost("g + dy", 1, 3),
    "add_positions": Cost("y + p", 1, 2),
    "add_positions_backward": Cost("g + dy", 1, 1),
    # Kernels of mixtures, of choices that have a row.
    "gather_choices": Cost("copied", 0, 2),
    "add_placed": Cost("y + f r", 2, 3),
    "scale_choices": Cost("f r", 1, 2),
}
