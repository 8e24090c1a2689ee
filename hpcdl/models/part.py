"""A part of a model: some of its layers, each complete or cut over the ranks that share it.

    by layers       dense1 | dense2 dense3 | dense4 loss        Part(model, [range(1, 3)]) has dense2 and dense3
    within layers   each layer's weights cut                    Part(model, share=(1, 4)) has the second quarter of each
    both                                                        Part(model, [range(1, 3)], (1, 4), group)

Its vectors hold its own tensors only, in their own layout. `pieces` maps them to the vector of the full model, and
`initialize` returns the full model's initial values there, creating one layer at a time. Tied weights of a layer that
the part lacks are a copy, which must be kept equal (`copies`).
"""

import contextlib
import itertools
import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from hpcdl.chunks import chunk
from hpcdl.errors import UsageError
from hpcdl.kernels.device import CPU, Array
from hpcdl.models.group import LayerGroup
from hpcdl.models.layered import Layered, initial
from hpcdl.models.layout import Hyperslab, piece
from hpcdl.models.losses import Loss
from hpcdl.models.model import layers_of
from hpcdl.random import Random


class ModelPart(Layered):
    """Layers `chunks` (ranges of numbers; default: all) of `model`, each as part share[0] of share[1].

    group: the operators between the parts of a layer. Raises UsageError if the model is not layered, or its layers
    cannot be cut so.
    """

    def __init__(
        self,
        model: Layered,
        chunks: list[range] | None = None,
        share: tuple[int, int] = (0, 1),
        group: LayerGroup | None = None,
    ):
        require_layers(model)
        chunks = [range(len(model.layers))] if chunks is None else chunks
        self.model, self.share, layers = model, share, []
        for i in itertools.chain(*chunks):
            layer = model.layers[i]
            more = (model.layers[i - 1].divided,) if isinstance(layer, Loss) else ()
            layers.append(layer.cut(*share, *more))
        if group is not None and group.sequence:
            if not model.sequences:
                raise UsageError("sequence parallelism shares the tokens of sequences: it needs a model gpt")
            if model.features % share[1]:
                raise UsageError(f"{share[1]} ranks cannot share sequences of {model.features} tokens evenly")
        width = model.features if isinstance(model.features, int) else math.prod(model.features)
        super().__init__(width, layers, model.pool, group)
        self.numbers, start = [], 0
        for each in chunks:  # the chunks of this part
            self.numbers.append(range(start, start + len(each)))
            start += len(each)
        self.chunks, self.rows_at_once, self.sequences = chunks, model.rows_at_once, model.sequences
        self.target = model.target
        of_model = {
            f"{layer.name}.{name}": layer.cuts.get(name) for layer in model.layers for name in layer.full_shapes
        }
        self.axes = {name: of_model[name] if share[1] > 1 else None for name in self.layout.tensors}
        own = {f"{layer.name}.{name}" for layer in layers for name in layer.full_shapes}
        self.copies = [tensor for name, tensor in self.layout.tensors.items() if name not in own]

    def initial(self, random: Random) -> Iterator[tuple[slice, np.ndarray]]:
        """Yield the full model's initial values of this part, tensor by tensor: (slice, flat values)."""
        drawn = self.model.initial_values and self.model.initial_values(random)
        for layer in self.model.layers:
            names = [f"{layer.name}.{name}" for name in layer.full_shapes]
            if any(name in self.layout.tensors for name in names):
                made = {name: drawn[name] for name in names} if drawn else initial(layer, random, self.dtype)
                for name, values in made.items():
                    if name in self.layout.tensors:
                        tensor, axis = self.layout.tensors[name], self.axes[name]
                        if axis is not None:
                            values = values[(slice(None),) * axis + (chunk(values.shape[axis], *self.share[::-1]),)]
                        yield tensor.slice, np.ascontiguousarray(values).reshape(-1)

    def initialize(self, random: Random) -> Array:
        """Return the initial values as a vector."""
        parameters = CPU.empty(self.size, self.dtype)
        for where, values in self.initial(random):
            parameters[where] = values
        return self.device.array(parameters)

    @property
    def extra(self) -> list[str]:
        """Return the names of these layers' buffers (`extra` of the model)."""
        return [name for layer in self.layers for name in layer.extra]

    @contextlib.contextmanager
    def unchanged(self) -> Iterator[None]:
        """Context that restores the layers' buffers."""
        before = [[array.copy() for array in layer.state()] for layer in self.layers]
        yield
        for layer, arrays in zip(self.layers, before, strict=True):
            for array, old in zip(layer.state(), arrays, strict=True):
                array[...] = old

    def pieces(self) -> list[tuple[Hyperslab, bool]]:
        """Return the place of each tensor in the full model's vector, and True if this part represents it.

        One of the parts with equal copies of a tensor represents it: part 0 of those that share the layer, and never
        the copy of a tied tensor.
        """
        copies = {tensor.name for tensor in self.copies}
        found = []
        for name, tensor in self.layout.tensors.items():
            axis = self.axes[name]
            speaks = name not in copies and (axis is not None or self.share[0] == 0)
            found.append((piece(tensor, self.model.layout.tensors[name], axis, *self.share), speaks))
        return found

    def units(self) -> list[slice]:
        """Cut this part's vector into units that are used together: the tensors of a layer.

        Tied tensors are separate units, so that copies are cut like the tensor itself. Tensors that are cut unevenly
        are separate, too, so that the other units have the same size in all parts.
        """
        whole, parts = self.model.layout.tensors, self.share[1]
        alone = {name for layer in self.model.layers for name in layer.tied}
        alone |= {name for name, axis in self.axes.items() if axis is not None and whole[name].shape[axis] % parts}
        cut = []
        for layer in self.layers:
            own = [tensor for tensor in self.layout.tensors.values() if tensor.layer == layer.name]
            for apart, run in itertools.groupby(own, lambda tensor: tensor.name in alone):
                slices = [tensor.slice for tensor in run]
                cut += slices if apart else [slice(slices[0].start, slices[-1].stop)]
        return cut

    def replicated(self) -> list[slice]:
        """Return the tensors that are replicated on all ranks that share the layers, as slices of this vector."""
        return [tensor.slice for name, tensor in self.layout.tensors.items() if self.axes[name] is None]

    def tied(self) -> dict[str, slice]:
        """Return the tensors that layers of other parts may also use, by name, as slices of this vector."""
        tied = {name for layer in self.model.layers for name in layer.tied}
        return {name: tensor.slice for name, tensor in self.layout.tensors.items() if name in tied}

    def input_shape(self, chunk: int, rows: int) -> tuple[int, int]:
        """Return the input shape of a chunk for so many examples: the output shape of the layer before."""
        before = self.model.layers[self.chunks[chunk].start - 1]
        return before.cut(*self.share).output_shape(rows, self.group)

    def targets(self, batch: Any) -> Array:
        """Return the targets of the loss."""
        return self.model.targets(batch)

    def last_rows(self, z: Array) -> Array:
        """Return the rows of the loss's input that predictions use."""
        return self.model.last_rows(z)


def require_layers(model: Any) -> None:
    """Raise UsageError unless the model is layered."""
    if layers_of(model) is None:
        raise UsageError(
            "this strategy cuts the model by its layers: it needs one that is made of them, as "
            "hpcdl.models.layered.Layered is, or a module of PyTorch's that is an nn.Sequential, or has a method "
            "stages() that lists its parts; train-allreduce takes any model"
        )
