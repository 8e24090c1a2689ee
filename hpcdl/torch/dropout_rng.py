"""Random numbers of a module in training: keyed by the seed, the step and the row, independent of ranks.

    nn.Dropout and its kin      a row's mask is keyed by (seed, name of the layer, epoch, step, the row's number): the
                                same on any number of ranks, and for any cut of a batch into micro-batches
    any other random numbers    PyTorch's generator is seeded in each forward with (seed, epoch, step, number of the
                                first row): a run repeats itself to the bit, but not with another cut of the batch

Layers within torch.utils.checkpoint draw the same masks when it recomputes them (preserve_rng_state, its default).
The second kind is drawn by torch.rand in `forward`, or by an LSTM's own dropout. Rows are the first axis of a layer's
input, or consecutive groups of it. Evaluation draws nothing."""

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

ELEMENTS = (nn.Dropout, nn.AlphaDropout)  # drop single elements
CHANNELS = (nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.FeatureAlphaDropout)  # drop whole channels, the second axis
ALPHA = (nn.AlphaDropout, nn.FeatureAlphaDropout)
SATURATED = -1.7580993408473766  # SELU's limit for x -> -inf: -scale * alpha (Klambauer et al., NeurIPS 2017)


class ModuleRandom:
    """The random numbers of a module. `of_run` sets the seed, `at` the rows of the next forward."""

    def __init__(self, module: nn.Module, device: Device = CPU, seed: int = 0):
        self.device, self.seed = device, seed
        self.key, self.rows = "", np.empty(0, np.int64)
        self.calls: dict[str, dict[int, int]] = {}  # by layer: numbers of its calls in this forward, by `drawn`
        self.layers = {name: layer for name, layer in module.named_modules() if type(layer) in ELEMENTS + CHANNELS}
        self.before: dict[str, Any] = {}  # while attached: each layer's own `forward`, or None
        self.attach()

    def attach(self) -> None:
        """Replace the forward of the dropout layers by `drop`."""
        for name, layer in self.layers.items():
            self.before[name] = vars(layer).get("forward")
            layer.forward = functools.partial(self.drop, layer, name)  # type: ignore[method-assign]

    def release(self) -> None:
        """Restore the dropout layers until the module's next step, so that the module holds nothing of hpcdl."""
        for name, forward in self.before.items():
            del self.layers[name].forward
            if forward is not None:
                self.layers[name].forward = forward  # type: ignore[method-assign]
        self.before.clear()

    def of_run(self, random: Random) -> None:
        """Use this run's seed from now on."""
        self.seed = random.seed

    def at(self, epoch: int, step: int, rows: np.ndarray, *layer: str) -> None:
        """Set the rows of the next forward by their numbers. layer: name of the layer to run, if the model is cut."""
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
        """Return 64 random bits for this purpose in this step."""
        text = " ".join(map(str, (self.key, *what)))
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")

    def drop(self, layer: Any, name: str, x: Tensor) -> Tensor:
        """Return the output of a dropout layer for x."""
        if not layer.training or layer.p == 0:
            return x
        if not len(self.rows) or x.ndim == 0 or len(x) % len(self.rows):
            return type(layer).forward(layer, x)  # by PyTorch's generator: the input does not tell which row is which
        shape = x.shape if type(layer) in ELEMENTS else (*x.shape[:2], *(1 for _ in x.shape[2:]))
        alpha = type(layer) in ALPHA
        value = 1.0 if alpha or layer.p == 1 else 1 / (1 - layer.p)
        mask = self.mask(name, tuple(shape), x.dtype, layer.p, value)
        if not alpha:
            return x * mask
        spread = ((1 - layer.p) * (1 + layer.p * SATURATED**2)) ** -0.5 if layer.p < 1 else 0.0
        return (x * mask + SATURATED * (1 - mask)) * spread - spread * SATURATED * layer.p

    def mask(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, p: float, value: float) -> Tensor:
        """Return a mask of `value`, or 0 with probability p, keyed by row numbers and the layer's call in this step."""
        drawn = int(torch.randint(1 << 62, ()))  # torch.utils.checkpoint draws it again where it recomputes a call
        calls = self.calls.setdefault(name, {})
        call = calls.setdefault(drawn, len(calls))
        kind = dtype if dtype is torch.float64 else torch.float32
        mask = torch.empty(shape, dtype=kind, device=place_of(self.device))
        keys: Array = self.device.array(row_keys(self.number("dropout", name, call), self.rows))
        flat = as_array(mask, self.device).reshape(len(self.rows), -1)
        dropout_mask(flat, keys, round(p * STEPS), value)
        return mask.to(dtype)
