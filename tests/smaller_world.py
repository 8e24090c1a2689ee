"""Local SGD and gossip in a world that becomes smaller, in one process: one rank after the other, by their formulas.

What ranks do that have outlived others is compared with this. It knows the model, the batches, the rule of the
optimizer and the mixing matrices of hpcdl, and nothing of messages, checkpoints or anchors."""

import copy

import numpy as np

from hpcdl.comm.gossip.mixing import matrices
from hpcdl.comm.gossip.topology import topology, without
from hpcdl.errors import UsageError
from hpcdl.random import Random


class World:
    """Replicas of a model with an optimizer each. make: makes an optimizer. batch: examples of a step."""

    def __init__(self, size, model, data, make, batch, seed=0):
        self.model, self.data, self.batch, self.step = model, data, batch, 0
        self.w = [model.initialize(Random(seed)).astype(model.layout.dtype) for _ in range(size)]
        self.optimizers = [make() for _ in range(size)]
        self.cursors = {}

    @property
    def size(self):
        return len(self.w)

    def lose(self, ranks):
        """These are gone; a list of vectors by rank is as long as there are ranks."""
        for each in [mine for mine in vars(self).values() if isinstance(mine, list)]:
            for rank in sorted(ranks, reverse=True):
                del each[rank]

    def join(self, number):
        """So many new ones come last, each with what its neighbour on the ring of those that are left has."""
        for each in [mine for mine in vars(self).values() if isinstance(mine, list)]:
            old = list(each)
            each += [copy.deepcopy(old[(len(old) + i - 1) % len(old)]) for i in range(number)]

    def gradient(self, rank):
        """(size / b) times the sum over this rank's share of the batch."""
        share = rank, self.size
        if share not in self.cursors:
            self.cursors[share] = self.data.cursor(self.batch, share, False)
        batch = self.cursors[share].take(*divmod(self.step, self.data.steps_per_epoch(self.batch)))
        gradient = np.zeros_like(self.w[rank])
        self.model.loss_and_gradient(self.w[rank], batch, gradient)
        return gradient * (self.size / batch.total)

    def until(self, step):
        while self.step < step:
            self.one()
            self.step += 1
        return self

    @property
    def mean(self):
        return np.mean(self.w, axis=0)


class LocalSGD(World):
    """local_from in steps; outer: a rule of the mean, or None."""

    def __init__(self, *about, sync_every=1, first=0, momentum="keep", outer=None, **more):
        super().__init__(*about, **more)
        self.sync_every, self.first, self.momentum, self.outer, self.start = sync_every, first, momentum, outer, None

    def one(self):
        gradients = [self.gradient(rank) for rank in range(self.size)]
        if self.step < self.first:
            gradients = [np.mean(gradients, axis=0)] * self.size
        if self.step == self.first:
            self.start = self.w[0].copy()
        for w, optimizer, gradient in zip(self.w, self.optimizers, gradients, strict=True):
            optimizer.update(w, gradient.copy())
        if self.step >= self.first and (self.step + 1 - self.first) % self.sync_every == 0:
            self.synchronize()

    def synchronize(self):
        mean = self.mean
        if self.outer is not None:
            self.outer.update(self.start, self.start - mean)
            mean = self.start
        for w in self.w:
            w[:] = mean
        for name in self.optimizers[0].vectors:
            vectors = [optimizer.state[name] for optimizer in self.optimizers]
            common = {"average": np.mean(vectors, axis=0), "reset": 0.0}.get(self.momentum)
            for vector in vectors if common is not None else []:
                vector[:] = common


class Gossip(World):
    """method: as in hpcdl/strategies/gossip.py; of another size, the graph is that of its name, or a mended one."""

    def __init__(self, *about, spec="ring", method="adapt-then-combine", seed=0):
        super().__init__(*about, seed=seed)
        self.spec, self.method, self.seed, self.graph = spec, method, seed, topology(spec, self.size, seed)
        self.y, self.last = ([np.zeros_like(w) for w in self.w] for _ in range(2))

    def lose(self, ranks):
        super().lose(ranks)
        self.y = [last.copy() for last in self.last]
        try:
            self.graph = topology(self.spec, self.size, self.seed)
        except UsageError:
            self.graph = without(self.graph, ranks)

    def join(self, number):
        super().join(number)
        self.graph = topology(self.spec, self.size, self.seed)

    def mixed(self, vectors):
        w = matrices(self.graph, "metropolis-hastings")(self.step)
        return list(w @ np.array(vectors))

    def one(self):
        gradients = [self.gradient(rank) for rank in range(self.size)]
        directions = gradients
        if self.method == "gradient-tracking":
            self.y = [y + g - last for y, g, last in zip(self.mixed(self.y), gradients, self.last, strict=True)]
            self.last, directions = gradients, self.y
        if self.method != "adapt-then-combine":
            self.w = self.mixed(self.w)
        for w, optimizer, direction in zip(self.w, self.optimizers, directions, strict=True):
            optimizer.update(w, direction.copy())
        if self.method == "adapt-then-combine":
            self.w = self.mixed(self.w)
