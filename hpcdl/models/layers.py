"""Layers: each computes its output and, from the gradient by its output, the gradients by its weights and its input.

    y, saved = layer.forward(w, x, group)               saved: what backward needs, from the pool
    dx = layer.backward(w, saved, dy, g, group)         adds to g; uses saved up
    layer.release(saved)                                in place of backward, when only y is wanted

w and g are tuples of views, one for each of `layer.shapes`, of the layer's own tensors in the parameters and the
gradient; x, y, dx, dy are (rows, width). A layer holds no state between calls, so several micro-batches can be in
flight. dx is from the pool and belongs to the caller, and so does dy.

The last layer of a model is its loss (losses.py).

    Dense      y = activation(x W + b)      dz = dy * activation'       dW += x^T dz      db += sum dz      dx = dz W^T
"""

import math
from collections.abc import Sequence

from hpcdl.kernels import activation as kernels
from hpcdl.models.pool import Pool


class Identity:
    """y = z + b."""

    gain = 1.0

    @staticmethod
    def forward(z, b, pool):
        """y, which takes z's place, and what backward needs: here y itself."""
        kernels.add_bias(z, b)
        return z, z

    @staticmethod
    def backward(y, b, dy, gb):
        """Return dz; add the bias gradient to gb."""
        kernels.add_rows(dy, gb)
        return dy


class Relu:
    """y = max(z + b, 0)."""

    gain = 2.0  # half of the units are at zero: He et al., "Delving deep into rectifiers", 2015

    @staticmethod
    def forward(z, b, pool):
        """y, which takes z's place, twice."""
        kernels.add_bias_relu(z, b)
        return z, z

    @staticmethod
    def backward(y, b, dy, gb):
        """Return dz, which takes y's place; add the bias gradient to gb."""
        kernels.relu_backward(y, dy, gb)
        return y


class Tanh:
    """y = tanh(z + b)."""

    gain = 1.0

    @staticmethod
    def forward(z, b, pool):
        """y, which takes z's place, twice."""
        kernels.add_bias_tanh(z, b)
        return z, z

    @staticmethod
    def backward(y, b, dy, gb):
        """Return dz, which takes y's place; add the bias gradient to gb."""
        kernels.tanh_backward(y, dy, gb)
        return y


class Gelu:
    """y = gelu(z + b), in the tanh form of Hendrycks and Gimpel, "Gaussian error linear units", 2016."""

    gain = 2.0  # about half of what comes in is let through, as with relu

    @staticmethod
    def forward(z, b, pool):
        """y, a new array, and z, from which backward finds the slope: y does not tell it."""
        y = pool.take(*z.shape)
        kernels.add_bias_gelu(z, b, y)
        return y, z

    @staticmethod
    def backward(z, b, dy, gb):
        """Return dz, which takes z's place; add the bias gradient to gb."""
        kernels.gelu_backward(z, b, dy, gb)
        return z


ACTIVATIONS = {"none": Identity, "relu": Relu, "tanh": Tanh, "gelu": Gelu}


class Dense:
    """A fully connected layer, y = activation(x W + b), with W (inputs, outputs) and b (outputs,).

    The `first` layer of a model computes no gradient by its input: its dx is None.
    """

    def __init__(self, name: str, inputs: int, outputs: int, activation: str, pool: Pool, first: bool = False):
        self.name, self.pool, self.first, self.matmul = name, pool, first, pool.device.xp.matmul
        self.activation = ACTIVATIONS[activation]
        self.shapes = {"weight": (inputs, outputs), "bias": (outputs,)}

    def initialize(self, w, generators):
        """Draw W with variance gain / inputs (gain 2 before a relu, else 1); set b to zero."""
        weight, bias = w
        deviation = math.sqrt(self.activation.gain / weight.shape[0])
        weight[...] = deviation * generators[0].standard_normal(weight.shape)
        bias[...] = 0

    def forward(self, w, x, group):
        """y and what backward needs."""
        weight, bias = w
        y = group.g(self.matmul(x, weight, out=self.pool.take(x.shape[0], weight.shape[1])))
        y, kept = self.activation.forward(y, bias, self.pool)
        return y, (x, y, kept)

    def backward(self, w, saved, dy, g, group):
        """dx; the gradients by W and b are added to g."""
        (weight, bias), (x, _, kept), (weight_gradient, bias_gradient) = w, saved, g
        dz = self.activation.backward(kept, bias, dy, bias_gradient)
        product = self.pool.take(*weight.shape)
        self.matmul(x.T, dz, out=product)
        weight_gradient += product
        self.pool.give(product)
        dx = None if self.first else group.f(self.matmul(dz, weight.T, out=self.pool.take(*x.shape)))
        self.release(saved)
        return dx

    def release(self, saved):
        """Give back what forward took."""
        _, y, kept = saved
        self.pool.give(y)
        if kept is not y:
            self.pool.give(kept)


def dense_layers(widths: Sequence[int], activation: str, pool: Pool) -> list[Dense]:
    """Dense layers from widths[0] inputs to widths[-1] outputs, the activation between them and none at the end."""
    last = len(widths) - 1
    return [
        Dense(f"dense{i}", widths[i - 1], widths[i], activation if i < last else "none", pool, first=i == 1)
        for i in range(1, last + 1)
    ]
