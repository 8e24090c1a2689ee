"""What a module draws at random in training: by the seed, the step and the row, never by who computes it.

    nn.Dropout and its kin      a row's mask follows (seed, name of the layer, epoch, step, the row's number): it is the
                                same on any number of ranks, and however a batch is cut into micro-batches
    any other draw              PyTorch's generator begins, in each forward, with (seed, epoch, step, number of the
                                first row)

The second is what a function as torch.rand in `forward` gets, or an LSTM's own dropout: a run repeats itself to the
bit, but the draws are others where the batch is cut otherwise. Rows are the first axis of what a layer is given, or it
has so many entries for each row, one after the other. Evaluation draws nothing.
"""

import functools
import hashlib
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hpcdl.kernels.device import CPU, Array, Device
from hpcdl.kernels.dropout import STEPS, dropout_mask, row_keys
from hpcdl.random import Random
from hpcdl.torch.tensors import as_array, place_of

ELEMENTS = (nn.Dropout, nn.AlphaDropout)  # each element by itself
CHANNELS = (nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.FeatureAlphaDropout)  # whole channels, the second axis
ALPHA = (nn.AlphaDropout, nn.FeatureAlphaDropout)
SATURATED = -1.7580993408473766  # what SELU comes to far below 0: -scale * alpha (Klambauer et al., NeurIPS 2017)


class Draws:
    """The random draws of a module. `of_run` says of which run, `at` of which rows the next forward is."""

    def __init__(self, module: nn.Module, device: Device = CPU, seed: int = 0):
        self.device, self.seed = device, seed
        self.key, self.rows = "", np.empty(0, np.int64)
        self.calls: dict[str, int] = {}  # of each layer in this forward
        self.layers = {name: layer for name, layer in module.named_modules() if type(layer) in ELEMENTS + CHANNELS}
        self.before: dict[str, Any] = {}  # while they draw here: the `forward` that each had of its own, or None
        self.attach()

    def attach(self) -> None:
        """Let the layers of dropout draw here."""
        for name, layer in self.layers.items():
            self.before[name] = vars(layer).get("forward")
            layer.forward = functools.partial(self.drop, layer, name)  # type: ignore[method-assign]

    def release(self) -> None:
        """Let the layers of dropout draw as before `attach`: the module holds nothing of ours, until its next step."""
        for name, forward in self.before.items():
            del self.layers[name].forward
            if forward is not None:
                self.layers[name].forward = forward  # type: ignore[method-assign]
        self.before.clear()

    def of_run(self, random: Random) -> None:
        """From now on draws follow this seed."""
        self.seed = random.seed

    def at(self, epoch: int, step: int, rows: np.ndarray, *layer: str) -> None:
        """The next forward is of the rows with these numbers; layer: through that one alone, where a model is cut."""
        if not self.before:  # the module was released
            self.attach()
        self.key, self.rows = f"{self.seed} {epoch} {step}", rows
        self.calls.clear()
        first = int(rows[0]) if len(rows) else -1
        seed = self.number("any", first, *layer)
        if self.device is CPU:
            torch.default_generator.manual_seed(seed)
        else:
            torch.manual_seed(seed)

    def number(self, *what: Any) -> int:
        """64 bits for this purpose in this step."""
        text = " ".join(map(str, (self.key, *what)))
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")

    def drop(self, layer: Any, name: str, x: Tensor) -> Tensor:
        """What a layer of dropout makes of x."""
        if not layer.training or layer.p == 0:
            return x
        if not len(self.rows) or x.ndim == 0 or len(x) % len(self.rows):
            return self.others(layer, x)
        shape = x.shape if type(layer) in ELEMENTS else (*x.shape[:2], *(1 for _ in x.shape[2:]))
        alpha = type(layer) in ALPHA
        value = 1.0 if alpha or layer.p == 1 else 1 / (1 - layer.p)
        mask = self.mask(name, tuple(shape), x.dtype, layer.p, value)
        if not alpha:
            return x * mask
        spread = ((1 - layer.p) * (1 + layer.p * SATURATED**2)) ** -0.5 if layer.p < 1 else 0.0
        return (x * mask + SATURATED * (1 - mask)) * spread - spread * SATURATED * layer.p

    def others(self, layer: Any, x: Tensor) -> Tensor:
        """As the layer's class has it, by PyTorch's generator: its input does not say which row is which."""
        found: Tensor = type(layer).forward(layer, x)
        return found

    def mask(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, p: float, value: float) -> Tensor:
        """`value`, or 0 with probability p, for each row by its number; the layer's next one."""
        call = self.calls[name] = self.calls.get(name, -1) + 1
        kind = dtype if dtype is torch.float64 else torch.float32
        mask = torch.empty(shape, dtype=kind, device=place_of(self.device))
        keys: Array = self.device.array(row_keys(self.number("dropout", name, call), self.rows))
        flat = as_array(mask, self.device).reshape(len(self.rows), -1)
        dropout_mask(flat, keys, round(p * STEPS), value)
        return mask.to(dtype)
