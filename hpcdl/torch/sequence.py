"""Sequences whose tokens lie on several ranks, in a module: attention and positions, all else is token by token.

    module.sequence_axis = 1      axis 1 of x, of (rows, tokens, ...), is the sequence
    attention(q, k, v)            causal attention, the only place where tokens meet: on one rank PyTorch's own, on
                                  several a ring or Ulysses (hpcdl/parallel/context.py)
    positions(count)              the places in their sequence of the `count` tokens that the module has

The axis stays where it is from stage to stage. The module's output is that of the first rank, which has the first and
the last chunk, so that `x[:, -1]` is the last token there. Outputs of the other ranks get the gradient 0; the gradient
of all parameters is the sum over the ranks. A trial on a random row (`check_tokens`) finds modules whose tokens meet
elsewhere. Messages and bytes are those of hpcdl's own models."""

import contextlib
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hpcdl.errors import UsageError
from hpcdl.kernels.device import Array, Device
from hpcdl.models.group import ContextGroup, IdentityGroup
from hpcdl.random import Random
from hpcdl.torch.dropout_rng import CHANNELS, ELEMENTS
from hpcdl.torch.tensors import as_array, as_tensor

CONTEXT: ContextVar[ContextGroup] = ContextVar("context", default=ContextGroup())  # noqa: B039 - it has no state


@contextlib.contextmanager
def shared_by(context: ContextGroup) -> Iterator[None]:
    """Context in which the tokens of a module's sequences lie on these ranks."""
    before = CONTEXT.set(context)
    try:
        yield
    finally:
        CONTEXT.reset(before)


def positions(count: int) -> Tensor:
    """Return the positions of the `count` tokens of each sequence that the module has, int64 (count,), from 0 on.
    On one rank these are 0 to count - 1."""
    context = CONTEXT.get()
    return torch.cat([torch.arange(part.start, part.stop) for part in context.tokens(count * context.size)])


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return a_i = sum_j<=i p_ij v_j, p_i = softmax(q_i k_j / sqrt(size)) over the tokens j up to i of the sequence.

    q: (rows, heads, tokens, size). k, v: (rows, kv_heads, tokens, size); kv_heads divides heads, and query head h reads
    the head h div (heads / kv_heads) of keys. That is `scaled_dot_product_attention(q, k, v, is_causal=True,
    enable_gqa=True)`, also where ranks share the tokens; each has its own in q, k, v and the result. Collective there.
    UsageError for shapes that do not fit. (Liu et al., 2023; Jacobs et al., 2023)"""
    fits = q.ndim == k.ndim == 4 and k.shape == v.shape == (q.shape[0], k.shape[1], *q.shape[2:])
    if not fits or q.shape[1] % k.shape[1]:
        shapes = ", ".join(str(tuple(each.shape)) for each in (q, k, v))
        raise UsageError(f"attention wants q, k, v of shape (rows, heads, tokens, size), not {shapes}")
    context, (rows, heads, length, size), shared = CONTEXT.get(), q.shape, k.shape[1]
    groups = heads // shared
    if context.size == 1:
        k, v = (each.repeat_interleave(groups, 1) if groups > 1 else each for each in (k, v))
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    context.check_heads(shared)
    by_key = q.unflatten(1, (shared, groups)).transpose(1, 2).flatten(1, 2)  # the kernels' head h has key h mod shared
    qkv = torch.cat([each.transpose(1, 2).flatten(2) for each in (by_key, k, v)], 2).flatten(0, 1)
    qkv = qkv if q.dtype is torch.float64 else qkv.float()
    a = SharedAttention.apply(qkv, context, length, heads, size)  # type: ignore[no-untyped-call]
    a = a.view(rows, length, groups, shared, size).permute(0, 3, 2, 1, 4).flatten(1, 2)
    return a.to(q.dtype)  # type: ignore[no-any-return]


class Fresh:
    """A pool of new arrays; PyTorch's graph keeps those that backward needs, and counts them."""

    def __init__(self, tensor: Tensor, device: Device):
        self.dtype, self.device = as_array(tensor[:0], device).dtype, device

    def take(self, *shape: int) -> Array:
        return self.device.empty(shape, self.dtype)

    def give(self, buffer: Array) -> None:
        """No effect."""


class SharedAttention(torch.autograd.Function):
    """The attention of a ContextGroup in PyTorch's graph. qkv: as in hpcdl/models/group.py."""

    @staticmethod
    def forward(ctx: Any, qkv: Tensor, context: Any, length: int, heads: int, size: int) -> Tensor:  # type: ignore[override]
        ctx.context, ctx.length, ctx.size = context, length, size
        ctx.pool = Fresh(qkv, context.comm.device)
        a, saved = context.attention(as_array(qkv, ctx.pool.device), length, heads, size, ctx.pool)
        output = as_tensor(a)
        ctx.save_for_backward(*map(as_tensor, saved), output)
        return output

    @staticmethod
    def backward(ctx: Any, da: Tensor) -> Any:  # type: ignore[override]
        *saved, a, da = (as_array(each.contiguous(), ctx.pool.device) for each in (*ctx.saved_tensors, da))
        return as_tensor(ctx.context.attention_backward(tuple(saved), a, da, ctx.length, ctx.size, ctx.pool)), *(
            None,
        ) * 4


def axis_of(model: Any) -> int:
    """Return the axis of x that is the sequence, from 1 on; 0: the module names none. UsageError for another value."""
    axis = getattr(model.module, "sequence_axis", 0)
    if type(axis) is not int or not 0 <= axis <= len(model.features):
        raise UsageError(
            f"the module's sequence_axis is {axis!r}; take the axis of x (rows, features) that is the sequence, "
            f"from 1 to {len(model.features)}"
        )
    return axis


def check_layers(model: Any) -> None:
    """Raise UsageError if layers of the module are known not to work token by token in training."""
    for name, each in model.module.named_modules():
        if isinstance(each, nn.modules.batchnorm._BatchNorm):
            raise UsageError(f"context parallelism: tokens meet in the batch norm {name}; take nn.LayerNorm")
        if type(each) in ELEMENTS + CHANNELS and each.p:
            raise UsageError(f"context parallelism: the masks of {name} are drawn for whole sequences; take p=0")


def check_tokens(model: Any, context: Any) -> None:
    """Raise UsageError on all ranks if the module's output for a random row changes when the ranks of `context` share
    its tokens; collective. The parameters are initial values."""
    vector, random = model.initialize(Random(0)), np.random.default_rng(0)
    row = (1, *model.features)
    x = random.integers(0, model.classes, row) if model.classes else random.standard_normal(row)
    w = [[tensor.view(vector) for tensor in tensors] for tensors in model.tensors]

    def output(layers: Sequence[Any], x: Array) -> Array:
        for layer, own in zip(layers, w, strict=False):
            x, _ = layer.forward(own, x, IdentityGroup(), None, keep=False)
        return x

    layers, apart = model.layers[:-1], np.zeros(1)
    with context.comm.traffic.uncounted():
        context.comm.broadcast(vector)  # a module of one's own may start with other values on each rank
        x = model.device.array(x.astype(model.dtype))
        own = context.own_tokens(x, model.sequence_axis, model.device)
        found = output([layer.within(context) for layer in layers], own)
        if context.rank == 0:
            whole = output(layers, x)
            one, several = (model.device.host(each) for each in (whole, found))
            apart[0] = one.shape != several.shape or not np.allclose(one, several, 1e-3, 1e-5)
        context.comm.all_reduce(apart)
    if apart[0]:
        raise UsageError(
            f"the module's output is another one if {context.size} ranks share its tokens: they may meet in "
            "hpcdl.torch.attention alone, their places are hpcdl.torch.positions, and the last is x[:, -1]"
        )
