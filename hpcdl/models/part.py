"""A part of a model: some of its layers, each complete or cut over the ranks that share it.

    by layers       dense1 | dense2 dense3 | dense4 loss        ModelPart(model, [range(1, 3)]): dense2 and dense3
    within layers   each layer's weights cut                    ModelPart(model, share=(1, 4)): second quarter of each
    both                                                        ModelPart(model, [range(1, 3)], (1, 4), group)

A part's vectors hold only the part's tensors, in its own layout; `pieces` maps them to the full model's vector. If the
part lacks the layer of a tied weight, the part has a copy of the weight, which must be kept equal (`copies`)."""

import contextlib
import itertools
import math
from collections.abc import Iterator, Set
from typing import Any

import numpy as np

from hpcdl.chunks import chunk
from hpcdl.errors import UsageError
from hpcdl.kernels.device import Array
from hpcdl.models.group import ContextGroup, ExpertGroup
from hpcdl.models.layered import Layered, initial
from hpcdl.models.layout import Hyperslab, piece
from hpcdl.models.losses import Loss
from hpcdl.models.mixture import MixtureOfExperts
from hpcdl.models.model import abilities_of, layers_of, unwrapped
from hpcdl.random import Random


class ModelPart(Layered):
    """The layers `chunks` (ranges of numbers; None: all) of `model`, each cut to part share[0] of share[1].
    group: the operators between the parts of a layer (group.py). context: ranks that share the tokens of sequences;
    experts: ranks that share the experts of mixtures; None: this rank has all of them. UsageError if the model cannot
    be cut so."""

    context: ContextGroup = ContextGroup()
    experts: ExpertGroup = ExpertGroup()
    stacked: Set[str] = frozenset()  # tensors of which each of these ranks has its experts' part

    def __init__(
        self,
        model: Layered,
        chunks: Any = None,
        share: tuple[int, int] = (0, 1),
        group: Any = None,
        context: ContextGroup | None = None,
        experts: ExpertGroup | None = None,
    ):
        require_layers(model)
        chunks = [range(len(model.layers))] if chunks is None else chunks
        self.model, self.share = model, share
        self.context, self.experts = context or self.context, experts or self.experts
        layers = [self.own(i) for i in itertools.chain(*chunks)]
        if group is not None and group.sequence:
            if not model.sequences:
                raise UsageError("sequence parallelism shares the tokens of sequences: take --model gpt")
            if model.features % share[1]:
                uneven = f"{share[1]} ranks cannot share sequences of {model.features} tokens evenly"
                raise UsageError(f"{uneven}; take a length that is a multiple of {share[1]}")
        width = model.features if isinstance(model.features, int) else math.prod(model.features)
        super().__init__(width, layers, model.pool, group)
        self.numbers, start = [], 0
        for each in chunks:  # the chunks of this part
            self.numbers.append(range(start, start + len(each)))
            start += len(each)
        self.chunks, self.rows_at_once, self.sequences = chunks, model.rows_at_once, model.sequences
        self.target = model.target
        of_model = {f"{each.name}.{name}": each.cuts.get(name) for each in model.layers for name in each.full_shapes}
        self.axes = {name: of_model[name] if share[1] > 1 else None for name in self.layout.tensors}
        cut = {name: axis for name, axis in self.axes.items() if axis is not None}
        self.uneven = {name for name, axis in cut.items() if model.layout.tensors[name].shape[axis] % share[1]}
        stacked = {f"{each.name}.{name}" for each in model.layers for name in getattr(each, "stacked", ())}
        self.stacked = stacked if self.experts.size > 1 else self.stacked
        own = {f"{layer.name}.{name}" for layer in layers for name in layer.full_shapes}
        self.copies = [tensor for name, tensor in self.layout.tensors.items() if name not in own]

    def own(self, i: int) -> Any:
        """Return layer i of the model as this rank has it."""
        layer = self.model.layers[i]
        if isinstance(layer, Loss):
            return layer.cut(*self.share, self.model.layers[i - 1].divided)
        layer = layer.cut(*self.share)
        if self.experts.size > 1 and isinstance(layer, MixtureOfExperts):
            return layer.among(self.experts)
        return layer if self.context.size == 1 else layer.within(self.context)

    def initial(self, random: Random) -> Iterator[tuple[slice, np.ndarray]]:
        """Yield, for each tensor, (its slice, this part of the full model's initial values, flat), layer by layer."""
        drawn = self.model.initial_values and self.model.initial_values(random)
        for layer in self.model.layers:
            names = [f"{layer.name}.{name}" for name in layer.full_shapes]
            if any(name in self.layout.tensors for name in names):
                made = {name: drawn[name] for name in names} if drawn else initial(layer, random, self.dtype)
                for name, values in made.items():
                    if name in self.layout.tensors:
                        tensor, axis = self.layout.tensors[name], self.axes[name]
                        if name in self.stacked:
                            values = values[self.experts.own(len(values))]
                        if axis is not None:
                            values = values[(slice(None),) * axis + (chunk(values.shape[axis], *self.share[::-1]),)]
                        yield tensor.slice, np.ascontiguousarray(values).reshape(-1)

    @property
    def extra(self) -> list[str]:
        return [name for layer in self.layers for name in layer.extra]

    @property
    def order(self) -> Any:
        """The order of computing, if a trial has found it (hpcdl/torch/module_units.py); else None."""
        return None

    @contextlib.contextmanager
    def unchanged(self) -> Iterator[None]:
        before = [[array.copy() for array in layer.state()] for layer in self.layers]
        yield
        for layer, arrays in zip(self.layers, before, strict=True):
            for array, old in zip(layer.state(), arrays, strict=True):
                array[...] = old

    def pieces(self) -> list[tuple[Hyperslab, bool]]:
        """Return, for each tensor, (its place in the full model's vector, True if this part represents that place).
        Of a tensor that all ranks of a layer have, part 0's represents all; the copy of a tied tensor never does."""
        found, whole = [], self.model.layout.tensors
        for name, tensor in self.layout.tensors.items():
            axis = self.axes[name]
            speaks = tensor not in self.copies and (axis is not None or self.share[0] == 0)
            speaks = speaks and (name in self.stacked or self.experts.rank == 0)
            first = self.experts.own(whole[name].shape[0]).start if name in self.stacked else 0
            found.append((piece(tensor, whole[name], axis, *self.share, first), speaks))
        return found

    def units(self) -> list[slice]:
        """Return the units of this part's vector, as slices: the tensors of a layer, used together, are one unit.
        Tied tensors are separate units, so that copies are cut like the tensor itself. Tensors that are cut unevenly
        are separate units, so that all other units have the same size in all parts."""
        alone = {name for layer in self.model.layers for name in layer.tied} | self.uneven
        cut = []
        for layer in self.layers:
            own = [tensor for tensor in self.layout.tensors.values() if tensor.layer == layer.name]
            for apart, run in itertools.groupby(own, lambda tensor: tensor.name in alone):
                slices = [tensor.slice for tensor in run]
                cut += slices if apart else [slice(slices[0].start, slices[-1].stop)]
        return cut

    def replicated(self) -> list[slice]:
        """Return the tensors that all ranks that share the layers have in full, as slices of this part's vector."""
        return [tensor.slice for name, tensor in self.layout.tensors.items() if self.axes[name] is None]

    def common(self) -> list[list[slice]]:
        """Return the tensors that all ranks that share the experts have, as slices of this part's vector: a list for
        each message, as in `messages`."""
        shared = [tensor for name, tensor in self.layout.tensors.items() if name not in self.stacked]
        by_cut = [[each.slice for each in shared if (each.name in self.uneven) == cut] for cut in (False, True)]
        return [slices for slices in by_cut if slices]

    def messages(self) -> list[slice]:
        """Return this part's vector as slices, each for a sum over copies of its own. A place in a message decides the
        order of additions. Tensors that are cut unevenly are apart, so that all parts get the same bits of others."""
        by_cut = itertools.groupby(self.layout.tensors.values(), lambda tensor: tensor.name in self.uneven)
        runs = [list(run) for _, run in by_cut]
        return [slice(run[0].slice.start, run[-1].slice.stop) for run in runs]

    def tied(self) -> dict[str, slice]:
        """Return the tensors that layers of other parts may also use, by name, as slices of this part's vector."""
        tied = {name for layer in self.model.layers for name in layer.tied}
        return {name: tensor.slice for name, tensor in self.layout.tensors.items() if name in tied}

    def input_shape(self, chunk: int, rows: int) -> tuple[int, int]:
        """Return the input shape of a chunk for `rows` examples: the output shape of the layer before the chunk."""
        return self.own(self.chunks[chunk].start - 1).output_shape(rows, self.group)

    def inputs(self, batch: Any) -> Any:
        return self.own_tokens(batch.x)

    def targets(self, batch: Any) -> Array:
        targets = self.model.targets(batch)
        if self.context.size == 1:
            return targets
        return self.own_tokens(targets.reshape(len(batch.y), self.model.features)).reshape(-1)

    def own_tokens(self, x: Any) -> Any:
        """Return this rank's columns of x (rows, tokens), contiguous."""
        if self.context.size == 1:
            return x
        tokens = self.context.tokens(x.shape[1])
        return self.device.xp.concatenate([x[:, part] for part in tokens], axis=1)

    def last_rows(self, z: Array) -> Array:
        return self.model.last_rows(z)


def whole_part(model: Any) -> ModelPart:
    """Return the whole model as a part, to be sharded. A PyTorch module of any form has one (hpcdl/torch/stages.py)."""
    own = unwrapped(model)
    return own.whole_part if abilities_of(model).module else ModelPart(own)  # type: ignore[no-any-return]


def require_layers(model: Any) -> None:
    """Raise UsageError unless the model lists its layers."""
    if layers_of(model) is None:
        raise UsageError(
            "this strategy cuts the model by its layers, and this model lists none; take a built-in model, a "
            "hpcdl.models.layered.Layered, or a PyTorch module that is an nn.Sequential or has a method stages() that "
            "lists its parts; train-fully-sharded takes any PyTorch module, train-allreduce any model"
        )
