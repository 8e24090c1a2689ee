"""The feed-forward layers, the second sublayer of a transformer's block, which it chooses by name (gpt.py).

    gelu      y = x + gelu(norm(x) Wu + bu) Wd + bd                                     Hendrycks and Gimpel, 2016
    swiglu    y = x + (silu(norm(x) Wg + bg) * (norm(x) Wv + bv)) Wd + bd               Shazeer, "GLU variants improve
                                                                                        transformer", 2020

Wu, Wg, Wv are (width, units), Wd (units, width). By default gelu has 4 width units. swiglu has a third matrix, so 8 / 3
width units, rounded up to a multiple of 256, cost as many parameters as gelu's (Touvron et al., "LLaMA", 2023). Wg and
Wv are one tensor (width, 2, units), and their products one product."""

from collections.abc import Mapping, Sequence

from hpcdl.kernels import activation, swiglu
from hpcdl.kernels.device import Array
from hpcdl.models.layers import Gelu, check_width
from hpcdl.models.pool import Pool
from hpcdl.models.transformer import Architecture, Sublayer

MULTIPLE = 256  # of swiglu's units


class FeedForward(Sublayer):
    """Two dense layers with a gelu between them."""

    cuts: Mapping[str, int] = {"up.weight": 1, "up.bias": 0, "down.weight": 0}
    in_place = True  # activate_backward writes dz over z

    @staticmethod
    def default_units(width: int) -> int:
        return 4 * width

    @staticmethod
    def up(units: int) -> tuple[int, ...]:
        """Return the shape of the outputs of the first product."""
        return (units,)

    def __init__(self, name: str, pool: Pool, architecture: Architecture):
        width, self.units = architecture.width, architecture.units
        up = self.up(self.units)
        shapes = {"up.weight": (width, *up), "up.bias": up, "down.weight": (self.units, width), "down.bias": (width,)}
        super().__init__(name, pool, architecture, shapes)

    def check_cut(self, parts: int) -> None:
        check_width("the feed-forward layers' units", self.units, parts)

    def zeros_like(self, b: Array | None, size: int) -> Array:
        """Return b, or zeros from the pool if the layer has no biases."""
        if b is not None:
            return b
        zeros = self.pool.take(size)
        zeros[...] = 0
        return zeros

    def activate(self, z: Array, b: Array | None, u: Array) -> None:
        """Write u, the input of the second product, from z, the output of the first one, and its bias."""
        bias = self.zeros_like(b, z.shape[1])
        Gelu.add_bias(z, bias, u)
        self.give(bias, unless=b)

    def activate_backward(self, z: Array, b: Array | None, du: Array, gb: Array | None, dz: Array) -> None:
        """Write dz, which is z itself if `in_place`, and add the gradient of the bias to gb."""
        bias, bias_gradient = (self.zeros_like(each, du.shape[1]) for each in (b, gb))
        Gelu.slope(z, bias, du, bias_gradient)
        self.give(bias, unless=b)
        self.give(bias_gradient, unless=gb)

    def inner(self, z: Array, b: Array | None) -> tuple[Array, tuple[Array, ...]]:
        u = self.pool.take(len(z), self.units // self.parts)
        self.activate(z, b, u)
        return u, (z,)

    def inner_backward(
        self, inner_saved: Sequence[Array], u: Array, b: Array | None, du: Array, gb: Array | None
    ) -> Array:
        (z,) = inner_saved
        dz = z if self.in_place else self.pool.take(*z.shape)
        self.activate_backward(z, b, du, gb, dz)
        return dz


class SwiGLU(FeedForward):
    """A dense layer whose outputs are multiplied by a gate, the silu of other outputs, and a second dense layer."""

    cuts: Mapping[str, int] = {"up.weight": 2, "up.bias": 1, "down.weight": 0}
    in_place = False

    @staticmethod
    def default_units(width: int) -> int:
        return -(-8 * width // (3 * MULTIPLE)) * MULTIPLE

    @staticmethod
    def up(units: int) -> tuple[int, ...]:
        return 2, units

    def activate(self, z: Array, b: Array | None, u: Array) -> None:
        if b is not None:
            activation.add_bias(z, b)
        swiglu.swiglu(u, z)

    def activate_backward(self, z: Array, b: Array | None, du: Array, gb: Array | None, dz: Array) -> None:
        swiglu.swiglu_backward(du, z, dz)
        if gb is not None:
            activation.add_rows(dz, gb)


FEED_FORWARDS: dict[str, type[FeedForward]] = {"gelu": FeedForward, "swiglu": SwiGLU}
