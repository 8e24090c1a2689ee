"""Any `nn.Module` as a model, under every strategy, without a copy in a step.

The module's parameters are views of the run's flat vector, and PyTorch adds into views of its flat gradient. The loss
is summed over the rows of a batch, as in all of hpcdl: a module's mean is multiplied by the number of rows, so that
unequal or empty shares of a batch still give the mean gradient of all its examples."""

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hpcdl.data import Batch
from hpcdl.errors import UsageError, reason, unknown
from hpcdl.kernels.device import CPU, Array
from hpcdl.models import HALF
from hpcdl.models.model import Abilities
from hpcdl.random import Random
from hpcdl.torch import state
from hpcdl.torch.buffers import ModuleBuffers, statistics_of
from hpcdl.torch.dropout_rng import ModuleRandom
from hpcdl.torch.stages import Chain
from hpcdl.torch.tensors import TYPES, FlatBinding, as_array, as_tensor, layout_of, place_of, prepare

Loss = Callable[[Tensor, Tensor], Tensor]
BUFFERS = ("average", "local")


class TorchModel(Chain):
    """A module as a model. Raises UsageError for a module that cannot be trained, after evaluating two rows of zeros.
    loss(output, target): one number, the mean over the rows, or the sum if its member `reduction` is "sum"; None:
    cross-entropy for classes, else half the squared error. features: shape of an example, as the module takes it.
    classes: 0 for regression. make: makes the module again, with new initial values; None: it starts with its present
    values. dtype: float32, float64, or bfloat16 for `torch.autocast` with float32 parameters. buffers, before a score
    or a checkpoint: average (over the ranks), or local (each rank keeps its own, and rank 0's are saved). class_weights
    (classes,): of the losses of rows in training, by their class; None: all 1."""

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
        class_weights: Any = None,
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
        self.training_loss: Loss | None = None  # None: `loss`
        if class_weights is not None:
            if loss is not None:
                told = "let its function take class_weights"
                raise UsageError(f"--class-weight: the module has a loss of its own; {told}")
            weights = torch.tensor(class_weights, dtype=TYPES[self.dtype], device=place_of(device))
            self.training_loss = nn.CrossEntropyLoss(weights, reduction="sum")
        prepare(module, self.dtype)
        self.layout = layout_of(module, self.dtype)
        self.size = self.layout.size
        self.draws = ModuleRandom(module, device)
        self._check_forward()
        self.start = {} if make else values_of(module)
        module.to(place_of(device))
        self.bound = FlatBinding(module, self.layout)
        self.module_buffers = ModuleBuffers(module, device)
        self.abilities = Abilities(device, evaluate=True, layers=True, pool=True, buffers=True, module=True)
        self.rows_at_once = self.abilities.rows_at_once
        self.averaged = self.module_buffers.changing if buffers == "average" else []

    @property
    def extra(self) -> dict[str, Array]:
        """Buffers and frozen parameters by their keys in `state_dict`: arrays that share memory with the module."""
        return self.module_buffers.settle()

    def of_run(self, random: Random) -> None:
        self.draws.of_run(random)

    def initialize(self, random: Random) -> Array:
        """Return new parameters, and set buffers: drawn by `make` with the run's seed, or the module's first values."""
        parameters = CPU.empty(self.size, self.dtype)
        for name, value in self.initial_values(random).items():
            self.layout.view(parameters, name)[...] = value
        return self.device.array(parameters)

    def starting(self) -> list[np.ndarray]:
        """Return the initial values that do not come from the seed, on which ranks must agree; [] with `make`."""
        return [self.start[name].numpy() for name in self.layout.tensors if self.start]

    def initial_values(self, random: Random) -> dict[str, np.ndarray]:
        """Return the initial values by tensor, on the host; set the buffers and frozen parameters."""
        values = self.start
        if self.make is not None:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(int(random("initialize", "module").integers(2**63)))
                module = self.make()
            prepare(module, self.dtype)
            values = values_of(module)
        for name, array in self.extra.items():
            self.device.copy_in(array, values[name].reshape(array.shape).numpy())
        return {name: values[name].numpy() for name in self.layout.tensors}

    def loss_and_gradient(
        self, parameters: Array, batch: Batch, gradient: Array, on_ready: Callable[[slice], None] | None = None
    ) -> float:
        """Do as in layered.py, but call on_ready(slice) when a tensor's gradient is final; on a GPU at the end."""
        total, bound = 0.0, self.bound
        if len(batch.y):
            bound.bind(parameters, gradient)
            bound.tell(on_ready if self.device is CPU else None)
            self.turn(training=True)
            self.draws.at(batch.epoch, batch.step, batch.index)
            loss = self.sum_of_losses(self.output(batch.x), as_tensor(batch.y), self.training_loss)
            bound.check()
            if loss.requires_grad:  # else it depends on no parameter
                loss.backward()  # type: ignore[no-untyped-call]
            total = loss.item()
        if on_ready is not None:
            bound.report_rest(on_ready)
        return total

    def evaluate(self, parameters: Array, batch: Batch) -> tuple[float, float]:
        if not len(batch.y):
            return 0.0, 0.0
        with self.scoring(parameters):
            output, y = self.output(batch.x), as_tensor(batch.y)
            return self.sum_of_losses(output, y).item(), self.score(output, y)

    def predict(self, parameters: Array, x: Array) -> Array:
        with self.scoring(parameters):
            return as_array(self.prediction(self.output(x)), self.device)

    def release(self, parameters: Array) -> nn.Module:
        """Return the module with these values in its own memory, for plain PyTorch after the training.
        Nothing of hpcdl is left in it: it can be pickled, and runs without hpcdl."""
        self.bound.bind(parameters)
        self.bound.release()
        self.draws.release()
        return self.module

    # -- state_dict

    @property
    def aliases(self) -> dict[str, str]:
        """The other names of tied tensors in a state_dict: name -> name in the layout."""
        return state.aliases_of(self.module)

    def named(self, parameters: Array) -> dict[str, Any]:
        """Return the arrays of the module's state_dict with these parameters."""
        tensors = self.layout.views(parameters)
        for name, array in self.extra.items():
            tensors[name] = np.asarray(self.device.host(array))
        return state.by_key(tensors, self.module)

    state_dict = staticmethod(state.state_dict)

    # -- shared parts

    def output(self, x: Array) -> Tensor:
        """Return the module's output for rows, in the run's type. Raises UsageError if its shape is wrong."""
        with self.autocasting(), statistics_of([self.module], len(x)):
            output: Tensor = self.module(as_tensor(x).view(-1, *self.features))
        self.check_output(output, len(x))
        return output.float() if self.autocast else output

    def autocasting(self) -> AbstractContextManager[Any]:
        """Return the context that sets the type the module computes in."""
        return torch.autocast(place_of(self.device).type, self.autocast) if self.autocast else contextlib.nullcontext()

    def score(self, output: Tensor, y: Tensor) -> float:
        if self.classes:
            return float((output.argmax(1) == y).sum().item())
        return float((output.view(y.shape) - y).double().square().sum().item())

    def prediction(self, output: Tensor) -> Tensor:
        return output.softmax(1) if self.classes else output.view(-1, *self.outputs)

    def check_output(self, output: Any, rows: int) -> None:
        """Raise UsageError unless the output is (rows, classes), or (rows, values)."""
        expected = (rows, self.classes) if self.classes else (rows, *self.outputs)
        if not isinstance(output, Tensor):
            raise UsageError(f"the module returns a {type(output).__name__}, and should return a tensor of {expected}")
        fits = output.shape == expected if self.classes else output.numel() == np.prod(expected) and len(output) == rows
        if not fits:
            what = "(rows, classes)" if self.classes else "(rows, values)"
            raise UsageError(f"for {rows} rows the module returns {tuple(output.shape)}, not {expected}: {what}")

    def sum_of_losses(self, output: Tensor, y: Tensor, loss_of: Loss | None = None) -> Tensor:
        """Return the sum of losses over the rows. loss_of: the loss in training; None: the loss without class weights.
        Raises UsageError if the loss is not one number."""
        loss = (loss_of or self.loss)(output if self.classes else output.view(y.shape), y)
        if not isinstance(loss, Tensor):
            raise UsageError(f"the loss is a {type(loss).__name__}, and should be a tensor of one number")
        if loss.numel() != 1:
            raise UsageError(f"the loss is a tensor of shape {tuple(loss.shape)}, and should be one number")
        loss = loss.reshape(())
        return loss if self.summed else loss * len(y)

    def scoring(self, parameters: Array) -> Any:
        """Return a context without gradients, in which the module evaluates these parameters."""
        self.turn(training=False)
        self.bound.bind(parameters)
        return torch.no_grad()

    def _check_forward(self) -> None:
        x = np.zeros((2, *self.features), self.dtype)
        y = torch.zeros(2, dtype=torch.int64) if self.classes else torch.zeros(2, *self.outputs)
        was_training, device, self.device = self.module.training, self.device, CPU
        shape = " x ".join(map(str, self.features))
        self.module.eval()
        try:
            with torch.random.fork_rng(devices=[]), torch.no_grad():
                self.sum_of_losses(self.output(x), y.to(torch.int64 if self.classes else as_tensor(x).dtype))
        except UsageError:
            raise
        except Exception as error:
            problem = f"{type(error).__name__}: {reason(error)}"
            raise UsageError(f"the module cannot evaluate two rows of {shape or 'one'} value(s): {problem}") from error
        finally:
            self.module.train(was_training)
            self.device = device


def values_of(module: nn.Module) -> dict[str, Tensor]:
    """Return copies of all parameters and buffers of a module by name."""
    named = [*module.named_parameters(), *module.named_buffers()]
    return {name: each.detach().cpu().clone() for name, each in named}


def check_loss(loss: Any) -> None:
    """Raise UsageError for a loss that is neither a sum nor an unweighted mean over rows."""
    reduction = getattr(loss, "reduction", "mean")
    if reduction not in ("mean", "sum"):
        raise UsageError(f"the loss has reduction={reduction!r}; take reduction='sum'")
    if reduction == "mean" and getattr(loss, "weight", None) is not None:
        raise UsageError("the loss has weights, so the means of a batch's shares do not add up; take reduction='sum'")


def half_squared(output: Tensor, target: Tensor) -> Tensor:
    """Return half the squared error, summed over rows and outputs."""
    return (output - target).square().sum() / 2


half_squared.reduction = "sum"  # type: ignore[attr-defined]
