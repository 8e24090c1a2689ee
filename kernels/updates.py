"""Update rules: one pass over parameters w, gradient g and state, each element read once and written once.

With d = scale g + decay w (the mean gradient plus the gradient of the L2 penalty):

    sgd         w <- w - rate d
    momentum    v <- beta v + d        w <- w - rate v                   (Polyak, 1964)
    nesterov    v <- beta v + d        w <- w - rate (d + beta v)        (Sutskever et al., ICML 2013)
    adam        m <- beta1 m + (1 - beta1) d        s <- beta2 s + (1 - beta2) d^2
                w <- shrink w - rate m / (root sqrt(s) + eps)            (Kingma and Ba, ICLR 2015)
    yogi        m as adam's            s <- s - (1 - beta2) d^2 sign(s - d^2)
                w <- w - rate m / (sqrt(s) + eps)                        (Zaheer et al., NeurIPS 2018)
    adagrad     s <- s + d^2           w <- w - rate d / (sqrt(s) + eps) (Duchi, Hazan and Singer, JMLR 2011)
    nesterov_direction
                v <- beta v + (1 - beta) d       u <- (1 - beta) d + beta v     (Muon's direction: Jordan et al., 2024)
    average     a <- a + share (w - a) the mean of k iterates, share = 1 / k (Polyak and Juditsky, 1992; Ruppert, 1988)
    proximal    g <- g + b mu (w - center)  adds to the sum of b gradients those of b penalties mu/2 |w - center|^2
                                                                         (FedProx: Li et al., MLSys 2020)

adam's caller passes the bias corrections of step t (from 1), rate = lr / (1 - beta1^t), root = 1 / sqrt(1 - beta2^t);
rest = 1 - beta (adam, yogi, nesterov_direction) is computed in float64. AdamW (Loshchilov and Hutter, ICLR 2019) is
adam with shrink = 1 - lr weight_decay and decay = 0; Adam has shrink = 1. nesterov_direction has decay = 0, and leaves
w to its caller. Only proximal writes g.

Memory bandwidth bounds all; in the caches, float64's roots and quotients bound adam and adagrad. Per element of b bytes
sgd and average move 3b bytes (w, g read, w written), proximal and nesterov_direction 4b, momentum, nesterov and adagrad
5b, adam and yogi 7b."""

import math

from hpcdl.kernels.bind import elementwise, exact

# The steps of sgd and adagrad; exact, so that kernels for some elements only (hogwild.py) get the same bits.


@exact
def mean_gradient(w, g, scale, decay):
    """Return d = scale g + decay w."""
    return scale * g + decay * w


@exact
def add_square(s, d):
    """Return s + d^2, adagrad's sum of squares after d."""
    return s + d * d


@exact
def sgd_step(w, d, rate):
    """Return w after a step of sgd."""
    return w - rate * d


@exact
def adagrad_step(w, d, total, rate, eps):
    """Return w after a step of adagrad; total: the sum of squares after d."""
    return w - rate * (d / (math.sqrt(total) + eps))


@elementwise("T[::1], T[::1], T, T, T")
def sgd(i, w, g, rate, scale, decay):
    """w <- w - rate d, with d = scale g + decay w."""
    w[i] = sgd_step(w[i], mean_gradient(w[i], g[i], scale, decay), rate)


@elementwise("T[::1], T[::1], T[::1], T, T, T, T")
def momentum(i, w, g, v, rate, scale, decay, beta):
    """v <- beta v + d, w <- w - rate v, with d = scale g + decay w."""
    step = beta * v[i] + (scale * g[i] + decay * w[i])
    v[i] = step
    w[i] -= rate * step


@elementwise("T[::1], T[::1], T[::1], T, T, T, T")
def nesterov(i, w, g, v, rate, scale, decay, beta):
    """v <- beta v + d, w <- w - rate (d + beta v), with d = scale g + decay w."""
    d = scale * g[i] + decay * w[i]
    step = beta * v[i] + d
    v[i] = step
    w[i] -= rate * (d + beta * step)


@elementwise("T[::1], T[::1], T[::1], T, T, T")
def nesterov_direction(i, u, g, v, scale, beta, rest):
    """v <- beta v + rest d, u <- rest d + beta v, with d = scale g."""
    d = rest * (scale * g[i])
    step = beta * v[i] + d
    v[i] = step
    u[i] = d + beta * step


@elementwise("T[::1], T[::1], T[::1], T[::1], T, T, T, T, T, T, T, T, T, T")
def adam(i, w, g, m, s, rate, scale, decay, shrink, beta1, rest1, beta2, rest2, root, eps):
    """m <- beta1 m + rest1 d, s <- beta2 s + rest2 d^2, w <- shrink w - rate m / (root sqrt(s) + eps); d: see `sgd`."""
    d = scale * g[i] + decay * w[i]
    first = beta1 * m[i] + rest1 * d
    second = beta2 * s[i] + rest2 * (d * d)
    m[i] = first
    s[i] = second
    w[i] = shrink * w[i] - rate * (first / (root * math.sqrt(second) + eps))


@elementwise("T[::1], T[::1], T[::1], T[::1], T, T, T, T, T, T, T")
def yogi(i, w, g, m, s, rate, scale, decay, beta1, rest1, rest2, eps):
    """m <- beta1 m + rest1 d, s <- s - rest2 d^2 sign(s - d^2), w <- w - rate m / (sqrt(s) + eps); d: see `sgd`."""
    d = scale * g[i] + decay * w[i]
    first = beta1 * m[i] + rest1 * d
    square = d * d
    second = s[i] - rest2 * square * (int(s[i] > square) - int(s[i] < square))
    m[i] = first
    s[i] = second
    w[i] -= rate * (first / (math.sqrt(second) + eps))


@elementwise("T[::1], T[::1], T[::1], T, T, T, T")
def adagrad(i, w, g, s, rate, scale, decay, eps):
    """s <- s + d^2, w <- w - rate d / (sqrt(s) + eps), with d = scale g + decay w."""
    d = mean_gradient(w[i], g[i], scale, decay)
    total = add_square(s[i], d)
    s[i] = total
    w[i] = adagrad_step(w[i], d, total, rate, eps)


@elementwise("T[::1], T[::1], T[::1], T")
def proximal(i, g, w, center, factor):
    """g <- g + factor (w - center)."""
    g[i] += factor * (w[i] - center[i])


@elementwise("T[::1], T[::1], T")
def average(i, a, w, share):
    """a <- a + share (w - a)."""
    a[i] += share * (w[i] - a[i])
