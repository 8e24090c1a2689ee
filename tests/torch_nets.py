"""Small modules for the tests, as functions that --model torch:torch_nets:NAME names."""

import torch
from torch import nn


def mlp(features, classes, width=5, dropout=0.0):
    return nn.Sequential(
        nn.Linear(features[0], width), nn.Tanh(), nn.Dropout(dropout), nn.Linear(width, width), nn.GELU(),
        nn.Dropout(dropout), nn.Linear(width, classes),
    )  # fmt: skip


class Frozen(nn.BatchNorm1d):
    """Batch norm in evaluation mode, always."""

    def train(self, mode=True):
        return super().train(False)


def normed(features, classes, norm="batch", width=6):
    """Several norms over the same layers."""
    kinds = {"batch": nn.BatchNorm1d, "frozen": Frozen, "group": lambda n: nn.GroupNorm(2, n)}
    module = nn.Sequential(nn.Linear(features[0], width), kinds[norm](width), nn.ReLU(), nn.Linear(width, classes))
    if norm == "frozen":
        with torch.no_grad():
            module[1].running_mean.uniform_(-1, 1)
            module[1].running_var.uniform_(0.5, 2)
    return module


class Tied(nn.Module):
    """One weight used twice, one that is frozen, one that nobody uses, a mask of -inf, a buffer that is replaced."""

    def __init__(self, features, classes):
        super().__init__()
        self.first, self.second = nn.Linear(features, features), nn.Linear(features, features)
        self.second.weight = self.first.weight
        self.frozen = nn.Linear(features, features).requires_grad_(False)
        self.unused = nn.Linear(3, 2)
        self.head = nn.Linear(features, classes)
        self.register_buffer("mask", torch.full((2, 2), float("-inf")).triu(1))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("scratch", torch.zeros(3), persistent=False)

    def forward(self, x):
        if self.training:
            self.count = self.count + 1
        return self.head(self.frozen(torch.tanh(self.second(torch.tanh(self.first(x))))))


class Branches(nn.Module):
    """Which branch computes depends on the rows at hand."""

    def __init__(self, features, classes):
        super().__init__()
        self.left, self.right, self.head = (nn.Linear(features, n) for n in (features, features, classes))

    def forward(self, x):
        return self.head(torch.stack([(self.left if row.sum() > 1 else self.right)(row) for row in x]))


def values(features, outputs, width=4):
    count = outputs[0] if outputs else 1
    return nn.Sequential(nn.Linear(features[0], width), nn.Tanh(), nn.Linear(width, count)), nn.MSELoss()


class Growing(nn.Module):
    """It replaces a parameter while it trains."""

    def __init__(self, features, classes):
        super().__init__()
        self.head = nn.Linear(features, classes)

    def forward(self, x):
        if self.training:
            self.head.weight.data = torch.zeros_like(self.head.weight)
        return self.head(x)


def complex_buffer(features, classes):
    module = nn.Linear(features[0], classes)
    module.register_buffer("phase", torch.zeros(2, dtype=torch.complex64))
    return module


def raising(features):
    raise ValueError("no such width")


def of(module, *loss, **about):
    """A function that makes the module of the number of features and of classes, and the loss beside it."""

    def make(features, classes):
        made = module(features[0], classes, **about)
        return (made, *loss) if loss else made

    return make


tied, branches, growing, linear = map(of, (Tied, Branches, Growing, nn.Linear))

# What is refused, most of it when the module is made.
no_module, lazy = (lambda: 3), (lambda classes: nn.Sequential(nn.LazyLinear(4), nn.Linear(4, classes)))
narrow, wide = of(nn.Linear, dtype=torch.bfloat16), of(nn.Linear, dtype=torch.float64)
elsewhere = of(nn.Linear, device="meta")
untrained = of(lambda *about: nn.Linear(*about).requires_grad_(False))
narrow_output, unfitting = of(lambda n, classes: nn.Linear(n, classes - 1)), of(lambda n, k: nn.Linear(n + 1, k))
vector_loss = of(nn.Linear, lambda output, y: output[:, 0])
unreduced = of(nn.Linear, nn.CrossEntropyLoss(reduction="none"))
weighted = of(nn.Linear, nn.CrossEntropyLoss(weight=torch.ones(3)))
