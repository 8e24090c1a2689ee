"""Update rules: one pass over parameters w, gradient g and state, each element read once and written once.

With d = scale g + decay w (the mean gradient, and the L2 penalty's own):

    sgd         w <- w - rate d
    momentum    v <- beta v + d        w <- w - rate v                   (Polyak, 1964)
    nesterov    v <- beta v + d        w <- w - rate (d + beta v)        (Sutskever et al., ICML 2013)
    adam        m <- beta1 m + (1 - beta1) d        s <- beta2 s + (1 - beta2) d^2
                w <- shrink w - rate m / (root sqrt(s) + eps)            (Kingma and Ba, ICLR 2015)

Adam's caller puts the bias corrections of step t (from 1) into rate = lr / (1 - beta1^t), root = 1 / sqrt(1 - beta2^t).
AdamW (Loshchilov and Hutter, ICLR 2019) is adam with shrink = 1 - lr weight_decay and decay = 0; Adam has shrink = 1.
g is only read.
"""

import math

from hpcdl.kernels.bind import cpu


@cpu("T[::1], T[::1], float64, float64, float64")
def sgd(w, g, rate, scale, decay):
    """Gradient descent."""
    cast = w.dtype.type
    a, c, k = cast(rate), cast(scale), cast(decay)
    for i in range(w.size):
        w[i] -= a * (c * g[i] + k * w[i])


@cpu("T[::1], T[::1], T[::1], float64, float64, float64, float64")
def momentum(w, g, v, rate, scale, decay, beta):
    """Gradient descent with momentum."""
    cast = w.dtype.type
    a, c, k, b = cast(rate), cast(scale), cast(decay), cast(beta)
    for i in range(w.size):
        step = b * v[i] + (c * g[i] + k * w[i])
        v[i] = step
        w[i] -= a * step


@cpu("T[::1], T[::1], T[::1], float64, float64, float64, float64")
def nesterov(w, g, v, rate, scale, decay, beta):
    """Gradient descent with Nesterov's momentum."""
    cast = w.dtype.type
    a, c, k, b = cast(rate), cast(scale), cast(decay), cast(beta)
    for i in range(w.size):
        d = c * g[i] + k * w[i]
        step = b * v[i] + d
        v[i] = step
        w[i] -= a * (d + b * step)


@cpu("T[::1], T[::1], T[::1], T[::1], float64, float64, float64, float64, float64, float64, float64, float64")
def adam(w, g, m, s, rate, scale, decay, shrink, beta1, beta2, root, eps):
    """Adam and, through `shrink`, AdamW."""
    cast = w.dtype.type
    a, c, k, h = cast(rate), cast(scale), cast(decay), cast(shrink)
    b1, b2, o1, o2 = cast(beta1), cast(beta2), cast(1.0 - beta1), cast(1.0 - beta2)
    q, e = cast(root), cast(eps)
    for i in range(w.size):
        d = c * g[i] + k * w[i]
        first = b1 * m[i] + o1 * d
        second = b2 * s[i] + o2 * (d * d)
        m[i] = first
        s[i] = second
        w[i] = h * w[i] - a * (first / (q * math.sqrt(second) + e))
