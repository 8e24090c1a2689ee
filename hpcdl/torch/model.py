"""Any `nn.Module` as a model: under every strategy, without a copy in a step.

    forward      the module's parameters are views of the flat vector of the run
    backward     PyTorch adds into views of its flat gradient
    reduce, update, save, resume: as of every model, on the vectors

The loss is summed over the rows of a batch, as hpcdl has it: a module's mean is multiplied by their number, so that a
batch that is cut unevenly, or whose share is empty, gives the mean gradient of all its examples.

    tensors.py   what lies where     buffers.py   what a module holds beside     dropout_rng.py   dropout and its kin
    stages.py    a module that is a chain, as layers that ranks can share (layers.py)
"""

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hpcdl.data import Batch
from hpcdl.errors import UsageError, unknown
from hpcdl.kernels.device import CPU, Array
from hpcdl.models import HALF
from hpcdl.random import Random
from hpcdl.torch import state
from hpcdl.torch.buffers import ModuleBuffers, statistics_of
from hpcdl.torch.dropout_rng import Draws
from hpcdl.torch.stages import Chain
from hpcdl.torch.tensors import Bound, as_array, as_tensor, layout_of, place_of, prepare

Loss = Callable[[Tensor, Tensor], Tensor]
BUFFERS = ("average", "local")


class TorchModel(Chain):
    """A module as a model (`layout`, `size`, `dtype`); what it holds beside its parameters is in `extra`.

    loss(output, target): one number, the mean over the rows unless it has a member `reduction` that is "sum", as those
    of PyTorch have; without, cross-entropy where there are classes, else half the squared error. features: the shape of
    an example, as the module takes it. classes: 0 in a regression. make: makes the module anew, with other initial
    values (`initialize` calls it); without, they are those that the module has now. dtype: float32, float64, or
    bfloat16, to compute in that by `torch.autocast` with parameters of float32. buffers: before a score or a checkpoint
    those of all ranks become their mean (average), or each rank keeps its own, and rank 0's are saved (local).

    Raises UsageError for a module that cannot be trained so. It is tried out, evaluating two rows of zeros.
    """

    rows_at_once = 1024

    def __init__(
        self,
        module: nn.Module,
        loss: Loss | None = None,
        *,
        features: tuple[int, ...],
        classes: int = 0,
        outputs: tuple[int, ...] = (),
        make: Callable[[], nn.Module] | None = None,
        dtype: Any = "float32",
        device: Any = CPU,
        buffers: str = "average",
    ):
        if buffers not in BUFFERS:
            raise unknown("way with buffers", buffers, BUFFERS)
        self.computing = HALF if str(dtype) == HALF else None
        self.autocast = torch.bfloat16 if self.computing else None
        self.module, self.make, self.device = module, make, device
        self.dtype = np.dtype("float32" if self.autocast else dtype)
        self.features, self.classes, self.outputs = tuple(features), classes, tuple(outputs)
        self.loss: Loss = loss or (nn.CrossEntropyLoss(reduction="sum") if classes else half_squared)
        self.summed = getattr(self.loss, "reduction", "mean") == "sum"
        check_loss(self.loss)
        prepare(module, self.dtype)
        self.layout = layout_of(module, self.dtype)
        self.size = self.layout.size
        self.draws = Draws(module, device)
        self._try_out()
        self.start = {} if make else values_of(module)
        module.to(place_of(device))
        self.bound = Bound(module, self.layout)
        self.beside = ModuleBuffers(module, device)
        self.averaged = self.beside.changing if buffers == "average" else []

    @property
    def extra(self) -> dict[str, Array]:
        """Buffers and frozen parameters by their keys in `state_dict`: arrays that share memory with the module."""
        return self.beside.settle()

    def of_run(self, random: Random) -> None:
        """A run begins, whose seed dropout follows from now on."""
        self.draws.of_run(random)

    def initialize(self, random: Random) -> Array:
        """A new parameter vector: what `make` draws with the run's seed, or what the module had at the beginning.

        What the module holds beside begins likewise.
        """
        parameters = CPU.empty(self.size, self.dtype)
        for name, value in self.initial_values(random).items():
            self.layout.view(parameters, name)[...] = value
        return self.device.array(parameters)

    def starting(self) -> list[np.ndarray]:
        """What that takes from this process alone, and not from the seed: all ranks need the same."""
        return [self.start[name].numpy() for name in self.layout.tensors if self.start]

    def initial_values(self, random: Random) -> dict[str, np.ndarray]:
        """The same tensor by tensor, on the host."""
        values = self.start
        if self.make is not None:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(int(random("initialize", "module").integers(2**63)))
                made = self.make()
            prepare(made, self.dtype)
            values = values_of(made)
        for name, array in self.extra.items():
            self.device.copy_in(array, values[name].reshape(array.shape).numpy())
        return {name: values[name].numpy() for name in self.layout.tensors}

    def loss_and_gradient(
        self,
        parameters: Array,
        batch: Batch,
        gradient: Array,
        on_ready: Callable[[slice], None] | None = None,
    ) -> float:
        """Add the gradient of the batch's losses, summed over its rows, to `gradient`; return the sum of the losses.

        on_ready(slice): called as soon as that tensor's gradient is final; on a GPU when all are.
        """
        total, bound = 0.0, self.bound
        if len(batch.y):
            bound.bind(parameters, gradient)
            bound.tell(on_ready if self.device is CPU else None)
            if not self.module.training:
                self.module.train()
            self.draws.at(batch.epoch, batch.step, batch.index)
            loss = self.sum_of_losses(self.output(batch.x), as_tensor(batch.y))
            bound.check()
            if loss.requires_grad:  # else no parameter has a part in it
                loss.backward()  # type: ignore[no-untyped-call]
            total = loss.item()
        if on_ready is not None:
            bound.tell_the_rest(on_ready)
        return total

    def evaluate(self, parameters: Array, batch: Batch) -> tuple[float, float]:
        """(sum of losses, number of rows predicted correctly); of a regression, sum of squared errors instead."""
        if not len(batch.y):
            return 0.0, 0.0
        with self.scoring(parameters):
            output, y = self.output(batch.x), as_tensor(batch.y)
            return self.sum_of_losses(output, y).item(), self.score(output, y)

    def predict(self, parameters: Array, x: Array) -> Array:
        """Class probabilities (rows, classes), or values, as the module has them."""
        with self.scoring(parameters):
            return as_array(self.prediction(self.output(x)), self.device)

    def release(self, parameters: Array) -> nn.Module:
        """The module with these values, in memory of its own: for plain PyTorch, when the training is over.

        Nothing of hpcdl is left in it: it can be pickled, and computes where hpcdl is not installed.
        """
        self.bound.bind(parameters)
        self.bound.release()
        self.draws.release()
        return self.module

    # -- a state_dict

    @property
    def aliases(self) -> dict[str, str]:
        """The further names of tied tensors in a state_dict: name -> the one in the layout."""
        return state.aliases_of(self.module)

    def named(self, parameters: Array) -> dict[str, Any]:
        """All that the module's state_dict holds with these parameters, as arrays by its keys."""
        return state.named(self, parameters)

    state_dict = staticmethod(state.state_dict)

    # -- what these share

    def output(self, x: Array) -> Tensor:
        """What the module makes of rows, in the run's type. UsageError where it is no tensor of their results."""
        with self.autocasting(), statistics_of([self.module], len(x)):
            found: Tensor = self.module(as_tensor(x).view(-1, *self.features))
        self.check_output(found, len(x))
        return found.float() if self.autocast else found

    def autocasting(self) -> AbstractContextManager[Any]:
        """The type that the module computes in."""
        return torch.autocast(self.place.type, self.autocast) if self.autocast else contextlib.nullcontext()

    def score(self, output: Tensor, y: Tensor) -> float:
        """The number of rows predicted correctly; of a regression, the sum of squared errors."""
        if self.classes:
            return float((output.argmax(1) == y).sum().item())
        return float((output.view(y.shape) - y).double().square().sum().item())

    def prediction(self, output: Tensor) -> Tensor:
        """Class probabilities, or values."""
        return output.softmax(1) if self.classes else output.view(-1, *self.outputs)

    @property
    def place(self) -> torch.device:
        """Where it computes."""
        return place_of(self.device)

    def check_output(self, output: Any, rows: int) -> None:
        """Raise UsageError where that is not (rows, classes), or (rows, values)."""
        wanted = (rows, self.classes) if self.classes else (rows, *self.outputs)
        if not isinstance(output, Tensor):
            raise UsageError(f"the module returns a {type(output).__name__}, and should return a tensor {wanted}")
        fits = output.shape == wanted if self.classes else output.numel() == np.prod(wanted) and len(output) == rows
        if not fits:
            what = "(rows, classes)" if self.classes else "(rows, values)"
            raise UsageError(f"the module returns {tuple(output.shape)} for {rows} rows, and should {wanted}: {what}")

    def sum_of_losses(self, output: Tensor, y: Tensor) -> Tensor:
        """Over the rows. UsageError where the loss is not one number."""
        loss = self.loss(output if self.classes else output.view(y.shape), y)
        if not isinstance(loss, Tensor):
            raise UsageError(f"the loss is a {type(loss).__name__}, and should be a tensor of one number")
        if loss.numel() != 1:
            raise UsageError(f"the loss is a tensor of shape {tuple(loss.shape)}, and should be one number")
        loss = loss.reshape(())
        return loss if self.summed else loss * len(y)

    def scoring(self, parameters: Array) -> Any:
        """Without gradients, as the module evaluates."""
        if self.module.training:
            self.module.eval()
        self.bound.bind(parameters)
        return torch.no_grad()

    def _try_out(self) -> None:
        """Evaluate two rows of zeros: what does not fit is said at once, and not in the first step. UsageError."""
        x = np.zeros((2, *self.features), self.dtype)
        y = torch.zeros(2, dtype=torch.int64) if self.classes else torch.zeros(2, *self.outputs)
        before, device, self.device = self.module.training, self.device, CPU
        shape = " x ".join(map(str, self.features))
        self.module.eval()
        try:
            with torch.random.fork_rng(devices=[]), torch.no_grad():
                self.sum_of_losses(self.output(x), y.to(torch.int64 if self.classes else as_tensor(x).dtype))
        except UsageError:
            raise
        except Exception as error:
            raise UsageError(f"it cannot evaluate two rows of {shape or 'one'} value(s): {told(error)}") from error
        finally:
            self.module.train(before)
            self.device = device


def told(error: Exception) -> str:
    """An error of a module's in one line."""
    first = str(error).strip().splitlines()[:1] or [""]
    return f"{type(error).__name__}: {first[0]}"


def values_of(module: nn.Module) -> dict[str, Tensor]:
    """Copies of all tensors of a module by name, those of `trained` among them."""
    named = [*module.named_parameters(), *module.named_buffers()]
    return {name: each.detach().cpu().clone() for name, each in named}


def check_loss(loss: Any) -> None:
    """Raise UsageError for a loss that is no sum and no mean over rows that count alike."""
    reduction = getattr(loss, "reduction", "mean")
    if reduction not in ("mean", "sum"):
        raise UsageError(f"the loss has reduction={reduction!r}; take reduction='sum'")
    if reduction == "mean" and getattr(loss, "weight", None) is not None:
        raise UsageError("the loss weighs its rows, and a mean of a share would weigh them anew; take reduction='sum'")


def half_squared(output: Tensor, target: Tensor) -> Tensor:
    """Half the squared error, summed over rows and outputs."""
    return (output - target).square().sum() / 2


half_squared.reduction = "sum"  # type: ignore[attr-defined]
