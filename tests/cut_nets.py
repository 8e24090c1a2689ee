"""Modules that tests cut, as torch:cut_nets:NAME, for the data of tests/strategies/conftest.py."""

import functools

import torch
import torch.utils.checkpoint
from torch import nn

import hpcdl.torch


def cnn(dropout=0.0):
    """8 layers, as an nn.Sequential: 2 chunks on each of 4 ranks."""
    return nn.Sequential(
        nn.Unflatten(1, (1, 2, 3)), nn.Conv2d(1, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.ReLU(), nn.Dropout(dropout),
        nn.Conv2d(4, 4, 1), nn.ReLU(inplace=True), nn.MaxPool2d((1, 2)), nn.Flatten(),
        nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 5), nn.Tanh(), nn.Dropout(dropout),
        nn.Linear(5, 6), nn.LayerNorm(6), nn.Linear(6, 3),
    )  # fmt: skip


class tied(nn.Module):
    """A weight that stages in the middle share: layers 0, 2 and 4; the first is registered last."""

    def __init__(self):
        super().__init__()
        names = "last", "middle", "first"
        made = [nn.Linear(6, 6) for _ in names]
        for name, each in zip(names, made, strict=True):
            each.weight = made[0].weight
            self.add_module(name, each)
        self.inner, self.outer, self.head = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3)
        self.bend = nn.Tanh()

    def stages(self):
        return [self.first, self.bend, self.inner, self.middle, self.bend, self.outer, self.last, self.bend, self.head]

    def forward(self, x):
        x = self.middle(self.inner(self.bend(self.first(x))))
        return self.head(self.bend(self.last(self.outer(self.bend(x)))))


class Block(nn.Module):
    """A residual block, with an activation that works in place."""

    def __init__(self, width):
        super().__init__()
        self.bend, self.conv, self.norm = nn.ReLU(inplace=True), nn.Conv2d(width, width, 1), nn.GroupNorm(2, width)

    def forward(self, x):
        x = self.bend(x)
        return x + self.norm(self.conv(x))


def residual():
    """A small ResNet, whose blocks begin with what changes its input in place."""
    stem = nn.Sequential(nn.Unflatten(1, (1, 2, 3)), nn.Conv2d(1, 4, 1))
    blocks = [Block(4) for _ in range(4)]
    return nn.Sequential(stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3))


class Shift(nn.Module):
    """Adds a bias to rows that it reshapes: the gradient by its input is that by its output, seen otherwise."""

    def __init__(self):
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(()))

    def forward(self, x):
        return (x + self.bias).view(-1, 2, 3) if x.ndim == 2 else (x + self.bias).view(-1, 6)


def shifts():
    """Stages whose gradients are views of what they are given."""
    return nn.Sequential(nn.Linear(6, 6), Shift(), Shift(), nn.Linear(6, 6), Shift(), Shift(), nn.Linear(6, 3))


class whole(nn.Module):
    """No chain, or none that its forward is: as `kind` says."""

    def __init__(self, kind="none"):
        super().__init__()
        self.kind, self.one, self.two = kind, nn.Linear(6, 6), nn.Linear(6, 3)
        if kind != "none":
            self.stages = getattr(self, f"{kind}_stages")

    def other_stages(self):
        return [self.one, nn.Tanh(), self.two]

    def few_stages(self):
        return [self.two]

    def text_stages(self):
        return ["one", "two"]

    def raising_stages(self):
        raise KeyError("where")

    def forward(self, x):
        return self.two(self.one(x).relu())


def normed(p=0.0):
    """Batch norms, whose statistics follow the rows that are together, dropout used twice, and a frozen layer."""
    drop = nn.Dropout(p)
    frozen = nn.Linear(6, 6).requires_grad_(False)
    first = [nn.Linear(6, 8), nn.BatchNorm1d(8), drop, nn.Linear(8, 6), nn.ReLU(), drop, frozen]
    return nn.Sequential(*first, nn.BatchNorm1d(6, affine=False), nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 3))


class skip(nn.Module):
    """No chain: a connection across children, a child used twice, one without parameters, blocks in a ModuleList, and
    a parameter of the module itself."""

    def __init__(self, p=0.0, norm="LayerNorm"):
        super().__init__()
        self.first, self.twice, self.drop = nn.Linear(6, 6), nn.Linear(6, 6), nn.Dropout(p)
        self.blocks = nn.ModuleList([nn.Sequential(getattr(nn, norm)(6), nn.Linear(6, 6)) for _ in range(2)])
        self.scale, self.head = nn.Parameter(torch.ones(())), nn.Linear(12, 3)

    def forward(self, x):
        x = early = self.first(x)
        for block in self.blocks:
            x = x + self.drop(block(self.twice(x).tanh()))
        return self.head(torch.cat([self.scale * early, x], 1))


class shared(nn.Module):
    """No chain: a weight of two children, one of which adds a row of the other's table; `how` says what is tied how."""

    def __init__(self, how="tied"):
        super().__init__()
        self.how, self.rest, self.first, self.last = how, nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6, bias=False)
        if how == "tied":
            self.last.weight = self.first.weight
        self.head, self.unused = nn.Linear(6, 3), nn.Linear(2, 2)

    def forward(self, x):
        y = self.rest(self.first(x).tanh()).tanh()
        y = self.last(y) if self.how == "tied" else nn.functional.linear(y, self.first.weight)
        return self.head(y + x)


class checkpointed(nn.Module):
    """No chain: two children whose activations are computed anew for backward, together, or each for its own."""

    def __init__(self, together=True):
        super().__init__()
        self.together = together
        self.one, self.two, self.head = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3)
        self.stem = nn.Linear(6, 6)

    def forward(self, x):
        x = self.stem(x)
        again = functools.partial(torch.utils.checkpoint.checkpoint, use_reentrant=False)
        one, two = (lambda x: self.one(x).tanh()), (lambda x: self.two(x).tanh())
        y = again(lambda x: two(one(x)), x) if self.together else again(two, again(one, x))
        return self.head(y + x)


class routed(nn.Module):
    """No chain: the values of `gate` decide which of the experts run; all is in a module that wraps it."""

    class Inner(nn.Module):
        def __init__(self):
            super().__init__()
            self.gate, self.head = nn.Linear(6, 4), nn.Linear(6, 3)
            self.experts = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))

        def forward(self, x):
            share, y = self.gate(x).softmax(1), x
            for number, expert in enumerate(self.experts):
                rows = (share.argmax(1) == number).nonzero().flatten()
                if len(rows):
                    y = y.index_add(0, rows, expert(x[rows]) * share[rows, number : number + 1])
            return self.head(y)

    def __init__(self):
        super().__init__()
        self.wrapped = self.Inner()

    def forward(self, x):
        return self.wrapped(x)


class restless(nn.Module):
    """No chain: its children run in an order that depends on the rows."""

    def __init__(self):
        super().__init__()
        self.one, self.two, self.head = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x):
        order = (self.one, self.two) if (x >= 0).all() else (self.two, self.one)
        return self.head(x + order[1](order[0](x).tanh()))


class Embedded(nn.Module):
    """Tokens, numbers as floats, with their places; (rows, tokens, width)."""

    def __init__(self, length, kinds, width):
        super().__init__()
        self.token, self.place = nn.Embedding(kinds, width), nn.Embedding(length, width)

    def forward(self, x):
        return self.token(x.long()) + self.place(hpcdl.torch.positions(x.shape[1]))


class Read(nn.Module):
    """Attention of 24 heads of queries and 12 heads of keys; (rows, tokens, 48). mixed: tokens also meet elsewhere."""

    def __init__(self, mixed=False):
        super().__init__()
        self.norm, self.qkv, self.out, self.mixed = nn.LayerNorm(48), nn.Linear(48, 96), nn.Linear(48, 48), mixed

    def forward(self, x):
        qkv = self.qkv(self.norm(x)).unflatten(2, (48, 2)).transpose(1, 2)
        a = hpcdl.torch.attention(*qkv.split([24, 12, 12], 1)).transpose(1, 2).flatten(2)
        return x + self.out(a).tanh() + (x.mean(1, keepdim=True) if self.mixed else 0)


class Last(nn.Module):
    def forward(self, x):
        return x[:, -1]


def reader(features, classes, context=24, mixed=False, dropout=0.0):
    """The next token after `context` tokens; the tokens of a sequence may lie on 2, 3 or 4 ranks."""
    blocks = Read(), nn.Sequential(nn.Linear(48, 48), nn.Dropout(dropout), nn.GELU()), Read(mixed)
    net = nn.Sequential(Embedded(*features, classes, 48), *blocks, Last(), nn.Linear(48, classes))
    net.sequence_axis = 1
    return net
