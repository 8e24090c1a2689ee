"""Normalizations of a row of a layer's input, which a transformer chooses by name (gpt.py).

    layer    y = gain (x - mean) / sqrt(variance + 1e-5) + bias        Ba, Kiros and Hinton, "Layer normalization", 2016
    rms      y = gain x / sqrt(mean of x^2 + 1e-5)                     Zhang and Sennrich, "Root mean square layer
                                                                       normalization", NeurIPS 2019

The classes hold no data: w and g are tensors of a layer and their gradients, one (width,) for each of `names`. The
statistics of the rows, which backward needs, are one vector (rows,) for each of `statistics`, from the pool."""

from collections.abc import Sequence
from typing import Any

from hpcdl.kernels import layer_norm, rms_norm
from hpcdl.kernels.device import Array
from hpcdl.models.pool import Pool


class LayerNormalization:
    """Each row to mean 0 and variance 1."""

    names: Sequence[str] = ("gain", "bias")
    statistics: Sequence[str] = ("mean", "1 / deviation")
    kernel: Any = layer_norm.layer_norm
    backward_kernel: Any = layer_norm.layer_norm_backward

    @classmethod
    def initialize(cls, w: Sequence[Array]) -> None:
        """Set the gain to 1, and the bias, if any, to 0."""
        for tensor, value in zip(w, (1, 0), strict=False):
            tensor[...] = value

    @classmethod
    def forward(cls, x: Array, w: Sequence[Array], pool: Pool) -> tuple[Array, list[Array]]:
        """Return y, from the pool, and the statistics of the rows of x."""
        y, statistics = pool.take(*x.shape), [pool.take(len(x)) for _ in cls.statistics]
        cls.kernel(x, *w, y, *statistics)
        return y, statistics

    @classmethod
    def backward(
        cls, dy: Array, x: Array, w: Sequence[Array], statistics: Sequence[Array], dx: Array, g: Sequence[Array]
    ) -> None:
        """Write dx, which may be dy itself, and add the gradient of w to g."""
        cls.backward_kernel(dy, x, w[0], *statistics, dx, *g)


class RMSNormalization(LayerNormalization):
    """Each row to mean square 1."""

    names = ("gain",)
    statistics = ("1 / root mean square",)
    kernel = rms_norm.rms_norm
    backward_kernel = rms_norm.rms_norm_backward


NORMALIZATIONS: dict[str, type[LayerNormalization]] = {"layer": LayerNormalization, "rms": RMSNormalization}
