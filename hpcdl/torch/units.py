"""Units of a PyTorch module that ranks shard: its children, as PyTorch's `fully_shard` wraps them.

    forward     | gather a | child a | child b | child c |           a hook runs before each child's forward,
                           | gather b| gather c|                     and the next unit is gathered meanwhile
    backward                         | child c | child b | child a   autograd asks for a saved parameter, by a hook;
                                     | gather b| gather a|           c is reduced when its last gradient has come

The module's other parameters are one more unit, the rest, which is there for the whole pass (module_units.py).

All ranks gather and reduce in one order, the plan, also a rank without rows, and one whose rows do not run some child:
so collective calls meet. A rank whose rows run the children in another order fails with one line.
(Rajbhandari et al., "ZeRO", SC 2020; Zhao et al., "PyTorch FSDP", VLDB 2023)"""

import contextlib
import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hpcdl.data import Batch
from hpcdl.errors import UsageError
from hpcdl.kernels.device import Array
from hpcdl.models.layered import Weights
from hpcdl.torch.layers import without_memory
from hpcdl.torch.tensors import TYPES, as_tensor

OPEN, FINAL = "open", "final"  # events of a plan: a unit's parameters are gathered, a unit's gradient is final
Event = tuple[str, int]


class Plan(NamedTuple):
    """Events of a pass in their order, as (kind, unit); arrivals: how many gradients of tensors each unit gets."""

    forward: list[Event]
    backward: list[Event]
    arrivals: Counter[int]


class SavedParameter(NamedTuple):
    """Description of a view of a unit's parameter, which a graph saves instead of the view."""

    unit: int
    number: int
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


class Unit:
    """Parameters that are gathered together, by their names in the module. child: whose they are; None: the rest."""

    def __init__(self, name: str, child: nn.Module | None, parameters: dict[str, nn.Parameter]):
        self.name, self.child, self.names = name, child, list(parameters)
        self.parameters = list(parameters.values())
        self.tensors: list[Tensor] = []  # the memory that the parameters are views of, while it is there

    def bind(self, w: Sequence[Array]) -> None:
        self.tensors = [as_tensor(each) for each in w]
        for parameter, each in zip(self.parameters, self.tensors, strict=True):
            parameter.data = each

    def check(self) -> None:
        """Raise UsageError if the module has replaced one of its parameters."""
        for name, parameter, each in zip(self.names, self.parameters, self.tensors, strict=bool(self.tensors)):
            if parameter.data_ptr() != each.data_ptr():
                raise UsageError(f"the module replaces its parameter {name} while it computes")

    def unbind(self) -> None:
        self.tensors = []
        for parameter in self.parameters:
            parameter.data = without_memory(parameter)


class Pass:
    """One pass of a batch through the units: forward, or forward and backward, by `plan`, which None records."""

    def __init__(self, model: Any, units: list[Unit], weights: Weights, plan: Plan | None):
        self.model, self.units, self.weights, self.plan = model, units, weights, plan
        self.kind = TYPES[model.dtype]
        self.left, self.later = (list(plan.forward), list(plan.backward)) if plan else ([], [])  # events still to come
        self.recorded = Plan([], [], Counter())
        self.recording = self.recorded.forward
        self.current: int | None = None  # the unit that is there, beside the rest
        self.places: dict[int, tuple[int, int]] = {}  # address -> (unit, number of the tensor) of what is there
        self.open_gradients: set[int] = set()
        self.arrived = Counter[int]()
        self.final: set[int] = set()
        self.counted: set[int] = set()  # addresses of saved activations
        self.bytes = 0

    def train(self, batch: Batch) -> float:
        """Add the batch's gradient; return the sum of losses."""
        loss: Tensor | None = None
        with self.attached(gradients=True) as saving:
            with saving:
                if len(batch.y):
                    self.model.turn(training=True)
                    self.model.draws.at(batch.epoch, batch.step, batch.index)
                    loss = self.model.sum_of_losses(self.model.output(batch.x), as_tensor(batch.y))
            self.model.pool.count(self.bytes)
            self.second_half()
            if loss is not None and loss.requires_grad:
                with torch.autograd.set_multithreading_enabled(False):  # hooks that send messages run in this thread
                    loss.backward()  # type: ignore[no-untyped-call]
            self.model.pool.count(-self.bytes)
        return 0.0 if loss is None else loss.item()

    def score(self, batch: Batch) -> tuple[float, float]:
        """Return (sum of losses, score) of the batch."""
        result = 0.0, 0.0
        with self.attached(gradients=False), torch.no_grad():
            if len(batch.y):
                self.model.turn(training=False)
                output, y = self.model.output(batch.x), as_tensor(batch.y)
                result = self.model.sum_of_losses(output, y).item(), self.model.score(output, y)
        return result

    @contextlib.contextmanager
    def attached(self, gradients: bool) -> Iterator[Any]:
        """Context with all hooks; at its end, events that the batch has not brought are made up for."""
        self.model.bound.forget()
        with contextlib.ExitStack() as hooks:
            for u, unit in enumerate(self.units):
                if unit.child is not None:
                    hook = partial(self.before_forward, u)
                    hooks.callback(unit.child.register_forward_pre_hook(hook, prepend=True).remove)
                for each in unit.parameters if gradients else ():
                    hooks.callback(each.register_hook(partial(self.before_gradient, u)).remove)
                    hooks.callback(each.register_post_accumulate_grad_hook(partial(self.after_gradient, u)).remove)
            rest = [u for u, unit in enumerate(self.units) if unit.child is None]
            for u in rest:
                self.open(u)
            yield torch.autograd.graph.saved_tensors_hooks(self.pack, self.unpack)
            self.make_up()
            for u in rest if self.current is None else (self.current, *rest):
                self.close(u)
            for u in range(len(self.units)) if gradients else ():
                self.finish(u)

    def plan_made(self) -> Plan:
        """Return the plan that a pass without one has recorded."""
        last = {event: at for at, event in enumerate(self.recorded.backward)}
        kept = [each for at, each in enumerate(self.recorded.backward) if each[0] == OPEN or last[each] == at]
        return Plan(self.recorded.forward, kept, self.arrived)

    def second_half(self) -> None:
        """Begin the backward half."""
        self.make_up()
        self.recording = self.recorded.backward
        self.left, self.later = self.later, []

    def make_up(self) -> None:
        while self.left:
            self.do(self.left.pop(0))

    def come(self, event: Event) -> None:
        """Do an event, after all that precede it in the plan."""
        if self.plan is None:
            self.recording.append(event)
            self.do(event)
            return
        if event not in self.left:
            raise UsageError(
                f"on these rows the module runs its children in another order than on the rows of the trial, at "
                f"{self.units[event[1]].name}; full sharding needs the same order on all rows: take train-allreduce"
            )
        while (earlier := self.left.pop(0)) != event:
            self.do(earlier)
        self.do(event)

    def do(self, event: Event) -> None:
        kind, u = event
        if kind == FINAL:
            self.finish(u)
            return
        if self.current is not None:
            self.close(self.current)
        self.current = u
        self.open(u)

    def open(self, u: int) -> None:
        """Bind a unit's parameters, which are gathered, and start to gather those of the next unit of the plan."""
        coming = itertools.chain(self.left, self.later)
        following = next((each for kind, each in coming if kind == OPEN and each != u), None)
        unit = self.units[u]
        unit.bind(self.weights.open(u, following))
        for number, each in enumerate(unit.tensors):
            if each.numel():
                self.places[each.untyped_storage().data_ptr()] = u, number

    def close(self, u: int) -> None:
        unit = self.units[u]
        unit.check()
        for each in unit.tensors:
            self.places.pop(each.untyped_storage().data_ptr(), None)
        self.weights.close(u)
        unit.unbind()

    def finish(self, u: int) -> None:
        """Start to reduce a unit's gradient, which is zero if no tensor of it has one."""
        if u in self.final:
            return
        self.before_gradient(u)
        self.final.add(u)
        for each in self.units[u].parameters:
            each.grad = None
        self.weights.reduce(u)

    # -- hooks

    def before_forward(self, u: int, *_: Any) -> None:
        if u != self.current:
            self.come((OPEN, u))

    def before_gradient(self, u: int, *_: Any) -> None:
        if u in self.final:
            raise UsageError(
                f"on these rows the gradient of {self.units[u].name} becomes final in another order than on the rows "
                "of the trial; full sharding needs the same order on all rows: take train-allreduce"
            )
        if u not in self.open_gradients:
            self.open_gradients.add(u)
            for parameter, each in zip(self.units[u].parameters, self.weights.gradient(u), strict=True):
                parameter.grad = as_tensor(each)

    def after_gradient(self, u: int, *_: Any) -> None:
        self.arrived[u] += 1
        if self.plan is None:
            self.recording.append((FINAL, u))  # the last one counts
        elif self.arrived[u] == self.plan.arrivals[u]:
            self.come((FINAL, u))

    def pack(self, tensor: Tensor) -> Any:
        """Return what the graph saves for a tensor: a SavedParameter, or the tensor itself."""
        storage = tensor.untyped_storage()
        address = storage.data_ptr()
        if address in self.places:
            u, number = self.places[address]
            if tensor.dtype != self.kind:  # a view of another type
                return tensor.detach().clone()
            offset = tensor.storage_offset() - self.units[u].tensors[number].storage_offset()
            return SavedParameter(u, number, tensor.size(), tensor.stride(), offset)
        if address not in self.counted:
            self.counted.add(address)
            self.bytes += storage.nbytes()
        return tensor

    def unpack(self, packed: Any) -> Tensor:
        if not isinstance(packed, SavedParameter):
            return packed  # type: ignore[no-any-return]
        unit = self.units[packed.unit]
        if unit.child is not None and packed.unit != self.current:
            self.come((OPEN, packed.unit))
        whole = unit.tensors[packed.number]
        return whole.as_strided(packed.size, packed.stride, whole.storage_offset() + packed.offset)
