"""Random numbers of a module in training: keyed by the seed, the step and the row, independent of ranks.

    nn.Dropout and its kin      a row's mask is keyed by (seed, name of the layer, epoch, step, the row's number): the
                                same on any number of ranks, and for any cut of a batch into micro-batches
    any other random numbers    PyTorch's generator is seeded in each forward with (seed, epoch, step, number of the
                                first row): a run repeats itself to the bit, but not with another cut of the batch

Layers within torch.utils.checkpoint have the same masks when it recomputes them, also after the forward of another
micro-batch: it restores PyTorch's generator (preserve_rng_state, its default), whose next number names the call.
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
        self.calls: dict[str, int] = {}  # by layer: the number of its last call in this forward
        self.keys: dict[int, dict[int, Array]] = {}  # of this step: by a forward's seed, then by call: keys of the rows
        self.forward: dict[int, Array] = {}  # that of the current forward
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
        self.keys.clear()

    def of_run(self, random: Random) -> None:
        """Use this run's seed from now on."""
        self.seed = random.seed

    def at(self, epoch: int, step: int, rows: np.ndarray, *layer: str) -> None:
        """Set the rows of the next forward by their numbers. layer: name of the layer to run, if the model is cut."""
        if not self.before:  # the module was released
            self.attach()
        before, self.key, self.rows = self.key, f"{self.seed} {epoch} {step}", rows
        if self.key != before:
            self.keys.clear()
        self.calls.clear()
        first = int(rows[0]) if len(rows) else -1
        seed = self.number("any", first, *layer)
        self.keys[seed] = self.forward = {}
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
        keys = self.keys_of_call(name)
        if not len(keys) or x.ndim == 0 or len(x) % len(keys):
            return type(layer).forward(layer, x)  # by PyTorch's generator: the input does not tell which row is which
        shape = x.shape if type(layer) in ELEMENTS else (*x.shape[:2], *(1 for _ in x.shape[2:]))
        alpha = type(layer) in ALPHA
        value = 1.0 if alpha or layer.p == 1 else 1 / (1 - layer.p)
        mask = self.mask(keys, tuple(shape), x.dtype, layer.p, value)
        if not alpha:
            return x * mask
        spread = ((1 - layer.p) * (1 + layer.p * SATURATED**2)) ** -0.5 if layer.p < 1 else 0.0
        return (x * mask + SATURATED * (1 - mask)) * spread - spread * SATURATED * layer.p

    def keys_of_call(self, name: str) -> Array:
        """Return a key for each row, by its number and the layer's call in this step; those of the first time again
        where torch.utils.checkpoint recomputes a call."""
        drawn = int(torch.randint(1 << 62, ()))
        for keys in self.keys.values():
            if drawn in keys:
                return keys[drawn]
        call = self.calls[name] = self.calls.get(name, -1) + 1
        self.forward[drawn] = self.device.array(row_keys(self.number("dropout", name, call), self.rows))
        return self.forward[drawn]

    def mask(self, keys: Array, shape: tuple[int, ...], dtype: torch.dtype, p: float, value: float) -> Tensor:
        """Return a mask of `value`, or 0 with probability p, from the rows' keys."""
        kind = dtype if dtype is torch.float64 else torch.float32
        mask = torch.empty(shape, dtype=kind, device=place_of(self.device))
        dropout_mask(as_array(mask, self.device).reshape(len(keys), -1), keys, round(p * STEPS), value)
        return mask.to(dtype)
