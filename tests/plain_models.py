"""Losses and gradients of the models, and outputs of a GPT, in plain numpy from the formulas: no code of hpcdl.

`loss_and_gradient(kind, activation, tensors, x, y)` gives (sum of losses, gradient by name) for tensors
{"dense1.weight": (inputs, outputs), "dense1.bias": (outputs,), ...}, in the type of its input."""

from types import SimpleNamespace

import numpy as np


def make_batch(rows, features, classes, dtype, seed=0, tokens=False):
    """Return a batch of random x with labels (classes 0: values). tokens: True if x holds class numbers, too."""
    random = np.random.default_rng(seed)
    x = random.integers(0, classes, (rows, features)) if tokens else random.standard_normal((rows, features))
    y = random.integers(0, classes, rows) if classes else random.standard_normal(rows).astype(dtype)
    return SimpleNamespace(x=x.astype(dtype), y=y)


def gelu(z):
    """Return gelu(z) in the tanh form, and its slope."""
    c = np.sqrt(2 / np.pi)
    t = np.tanh(c * (z + 0.044715 * z**3))
    return z * (1 + t) / 2, (1 + t) / 2 + z * (1 - t**2) / 2 * c * (1 + 3 * 0.044715 * z**2)


SLOPES = {
    "none": lambda z: np.ones_like(z),
    "relu": lambda z: np.heaviside(z, 0),
    "tanh": lambda z: 1 / np.cosh(z) ** 2,
    "gelu": lambda z: gelu(z)[1],
}
VALUES = {"none": lambda z: z, "relu": lambda z: np.clip(z, 0, None), "tanh": np.tanh, "gelu": lambda z: gelu(z)[0]}


def outputs(activation, tensors, x):
    """Return (z of the last layer, [x and the activations of all layers], z of all layers)."""
    count = len(tensors) // 2
    inputs, zs = [x], []
    for i in range(1, count + 1):
        zs.append(np.einsum("ni,io->no", inputs[-1], tensors[f"dense{i}.weight"]) + tensors[f"dense{i}.bias"])
        inputs.append(VALUES[activation](zs[-1]))
    return zs[-1], inputs, zs


def loss_of(kind, z, y):
    """Return (sum of losses, its derivative by z)."""
    if kind == "softmax":
        p = np.exp(z) / np.einsum("nc->n", np.exp(z))[:, None]
        onehot = np.equal.outer(y, np.arange(z.shape[1])).astype(z.dtype)
        return -np.einsum("nc,nc->", onehot, np.log(p)), p - onehot
    if kind == "logistic":
        p = 1 / (1 + np.exp(-z[:, 0]))
        return -np.einsum("n->", np.log(np.where(y == 1, p, 1 - p))), (p - y)[:, None]
    if kind == "hinge":
        sign = 2 * y - 1
        margins = sign * z[:, 0]
        return np.maximum(0, 1 - margins).sum(), (-sign * (margins < 1))[:, None].astype(z.dtype)
    error = z - y.reshape(z.shape)
    return np.einsum("nk,nk->", error, error) / 2, error


def loss_and_gradient(kind, activation, tensors, x, y):
    """Return (sum of losses over the rows, gradient of every tensor by name)."""
    z, inputs, zs = outputs(activation, tensors, x)
    loss, delta = loss_of(kind, z, y)
    gradient = {}
    for i in range(len(zs), 0, -1):
        gradient[f"dense{i}.weight"] = np.einsum("ni,no->io", inputs[i - 1], delta)
        gradient[f"dense{i}.bias"] = np.einsum("no->o", delta)
        if i > 1:
            delta = np.einsum("no,io->ni", delta, tensors[f"dense{i}.weight"]) * SLOPES[activation](zs[i - 2])
    return loss, gradient


def normalized(x, gain, bias):
    """Return x after layer normalization."""
    centered = x - x.mean(axis=-1, keepdims=True)
    return centered / np.sqrt((centered**2).mean(axis=-1, keepdims=True) + 1e-5) * gain + bias


def llama_outputs(tensors, tokens, heads, kv_heads, base):
    """Return the z of a Llama, (rows, length, vocabulary), for whole numbers `tokens` (rows, length).
    A pair of a head's elements is a complex number, which a rotation multiplies (Su et al., 2021, equation 12)."""

    def scaled(x, gain):
        return x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + 1e-5) * gain

    def turned(x):
        size, (length, pairs) = x.shape[3], (x.shape[1], x.shape[3] // 2)
        angles = np.arange(length)[:, None] / base ** (2 * np.arange(pairs) / size)
        z = (x[..., ::2] + 1j * x[..., 1::2]) * np.exp(1j * angles)[:, None]
        return np.stack([z.real, z.imag], axis=-1).reshape(x.shape)

    (rows, length), width = tokens.shape, tensors["embedding.token"].shape[1]
    h, size = tensors["embedding.token"][tokens], width // heads
    future = np.arange(length)[None, :] > np.arange(length)[:, None]
    for i in range(1, sum(name.endswith("qkv.weight") for name in tensors) + 1):
        w = {name.split(".", 1)[1]: t for name, t in tensors.items() if name.startswith(f"block{i}.")}
        qkv = scaled(h, w["attention.norm.gain"]) @ w["attention.qkv.weight"].reshape(width, -1)
        q, k, v = np.split(qkv.reshape(rows, length, -1, size), [heads, heads + kv_heads], axis=2)
        q, k, a = turned(q), turned(k), np.empty((rows, length, heads, size))
        for head in range(heads):
            keys, values = k[:, :, head % kv_heads], v[:, :, head % kv_heads]
            s = np.where(future, -np.inf, np.einsum("rtd,rsd->rts", q[:, :, head], keys) / np.sqrt(size))
            p = np.exp(s - s.max(axis=-1, keepdims=True))
            a[:, :, head] = np.einsum("rts,rsd->rtd", p / p.sum(axis=-1, keepdims=True), values)
        h = h + a.reshape(rows, length, width) @ w["attention.out.weight"].reshape(width, width)
        gate, up = np.moveaxis(np.tensordot(scaled(h, w["mlp.norm.gain"]), w["mlp.up.weight"], 1), 2, 0)
        h = h + gate / (1 + np.exp(-gate)) * up @ w["mlp.down.weight"]
    return scaled(h, tensors["norm.gain"]) @ tensors["head.weight"].T


def gpt_outputs(tensors, tokens, heads):
    """Return the z of a GPT, (rows, length, vocabulary), for whole numbers `tokens` (rows, length)."""
    (rows, length), width = tokens.shape, tensors["embedding.token"].shape[1]
    h = tensors["embedding.token"][tokens] + tensors["embedding.position"][:length]
    future = np.arange(length)[None, :] > np.arange(length)[:, None]
    for i in range(1, sum(name.endswith("qkv.weight") for name in tensors) + 1):
        w = {name.split(".", 1)[1]: t for name, t in tensors.items() if name.startswith(f"block{i}.")}
        n = normalized(h, w["attention.norm.gain"], w["attention.norm.bias"])
        qkv = np.einsum("rtw,wko->krto", n, w["attention.qkv.weight"]) + w["attention.qkv.bias"][:, None, None]
        q, k, v = qkv.reshape(3, rows, length, heads, width // heads)
        s = np.where(future, -np.inf, np.einsum("rthd,rshd->rhts", q, k) / np.sqrt(width // heads))
        p = np.exp(s - s.max(axis=-1, keepdims=True))
        p /= p.sum(axis=-1, keepdims=True)
        a = np.einsum("rhts,rshd->rthd", p, v).reshape(rows, length, width)
        h = h + a @ w["attention.out.weight"] + w["attention.out.bias"]
        n = normalized(h, w["mlp.norm.gain"], w["mlp.norm.bias"])
        h = h + gelu(n @ w["mlp.up.weight"] + w["mlp.up.bias"])[0] @ w["mlp.down.weight"] + w["mlp.down.bias"]
    head = tensors.get("head.weight", tensors["embedding.token"])
    return np.einsum("rtw,vw->rtv", normalized(h, tensors["norm.gain"], tensors["norm.bias"]), head)
