"""--optimizer torch:AdamW,betas=(0.9,0.95): an optimizer of torch.optim on the flat vector, or any slice of it.

    hpcdl                                                    PyTorch
    mean gradient, clipped: scale * g                   ->   the parameter's gradient
    --lr and --schedule: the rate of the step           ->   lr of its group
    --weight-decay                                      ->   weight_decay, in the rule's own way (0 by default)
    state["exp_avg"], ...: vectors like the parameters  <-   its state, in place
    step - since                                        ->   its count of steps

The vector is one parameter of one dimension, so only element-wise rules fit; a slice, on servers and in shards, is then
updated as within the whole. A number in the rule's state, such as NAdam's product, is stored as a vector full of it."""

import functools
import inspect
from typing import Any, NamedTuple

import torch

from hpcdl.errors import UsageError, reason, unknown
from hpcdl.kernels.device import Array
from hpcdl.optim.optimizer import Optimizer
from hpcdl.plugins import TORCH, settings_of
from hpcdl.torch.tensors import as_tensor

REFUSED = {
    "Adafactor": "Adafactor needs rows and columns of tensors, and a run's parameters are one vector",
    "LBFGS": "LBFGS computes the loss several times in a step, and a strategy computes it once",
    "Muon": "Muon needs matrices, and a run's parameters are one vector, which --optimizer muon cuts into them",
    "SparseAdam": "SparseAdam needs sparse gradients, and a run's gradients are dense",
}
INSTEAD = {"lr": "--lr and --schedule", "weight_decay": "--weight-decay"}  # settings that have options of their own
INNER = ("params", "maximize", "differentiable", "capturable", "foreach")  # arguments that are not settings


class TorchRule(NamedTuple):
    """A parsed spec. vectors, numbers: state entries by name. decays: True if the rule has a weight_decay."""

    kind: type[torch.optim.Optimizer]
    settings: dict[str, Any]
    vectors: tuple[str, ...]
    numbers: tuple[str, ...]
    decays: bool


@functools.lru_cache
def read(spec: str) -> TorchRule:
    """Return the rule of torch:NAME,setting=value,... Raises UsageError."""
    name, _, rest = spec.removeprefix(TORCH).partition(",")
    kinds = {
        each: kind
        for each, kind in vars(torch.optim).items()
        if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer) and kind is not torch.optim.Optimizer
    }
    option = f"optimizer {spec!r}"
    if name in REFUSED:
        raise UsageError(f"{option}: {REFUSED[name]}; take another rule, such as torch:AdamW")
    if name not in kinds:
        raise unknown("optimizer of torch.optim", name, sorted(kinds.keys() - REFUSED.keys()))
    settings, parameters = settings_of(rest, option), inspect.signature(kinds[name]).parameters
    for each in settings:
        if each in INSTEAD:
            raise UsageError(f"{option}: leave out {each}, and set it by {INSTEAD[each]}")
        if each not in parameters or each in INNER:
            known = ", ".join(sorted(set(parameters) - set(INNER) - set(INSTEAD)))
            raise UsageError(f"{option}: {name} has no setting {each!r}; its settings: {known}")
    fusible = "fused" in parameters.keys() - settings.keys()
    choices: list[dict[str, Any]] = [{"fused": True}, {"fused": None}] if fusible else [{}]
    for choice in choices:
        try:
            state = first_state(kinds[name], settings | choice)
            break
        except Exception as error:  # of any type
            refused = error
    else:
        raise UsageError(f"{option}: {reason(refused)}")
    settings |= choice
    is_vector = {each: isinstance(value, torch.Tensor) and value.shape == (2,) for each, value in state.items()}
    vectors = tuple(each for each in state if is_vector[each])
    numbers = tuple(each for each in state if not is_vector[each] and each != "step")
    return TorchRule(kinds[name], settings, vectors, numbers, "weight_decay" in parameters)


def vectors_of(spec: str) -> tuple[str, ...]:
    """Return the names of the state vectors of the optimizer `spec`, each as long as the parameters."""
    return read(spec).vectors + read(spec).numbers


def first_state(kind: type[torch.optim.Optimizer], settings: dict[str, Any]) -> dict[str, Any]:
    """Return a rule's state for a parameter after a step; raise PyTorch's error if the settings are invalid."""
    probe = torch.zeros(2, requires_grad=True)
    probe.grad = torch.ones(2)
    rule = kind([probe], lr=0.1, **settings)  # type: ignore[call-arg]
    rule.step()
    return {name: value for name, value in rule.state[probe].items() if value is not None}


class TorchOptimizer(Optimizer):
    """An optimizer of torch.optim; state: its vectors, by PyTorch's names."""

    bound: Any = None  # state, address of the vector, (parameter, gradient, rule)

    def __init__(self, spec: str, *args: Any):
        self.spec, self.rule = spec, read(spec)
        self.vectors = vectors_of(spec)
        super().__init__(*args)

    def apply(self, w: Array, g: Array, rate: float, scale: float) -> None:
        if not self.size:
            return
        fresh, (parameter, mean, rule) = self.step == self.since, self.on(w)
        torch.mul(as_tensor(g), scale, out=mean)
        if self.weight_decay and not self.rule.decays:
            mean.add_(parameter.detach(), alpha=self.weight_decay)
        rule.param_groups[0]["lr"] = rate
        rule_state = rule.state[parameter]
        if not fresh and "step" in rule_state:
            rule_state["step"].fill_(self.step - self.since)
        rule.step()
        for name in self.rule.vectors:
            vector = as_tensor(self.state[name])
            if rule_state[name].data_ptr() != vector.data_ptr():
                vector.copy_(rule_state[name])
                rule_state[name] = vector
        for name in self.rule.numbers:
            as_tensor(self.state[name]).fill_(float(rule_state[name]))

    def on(self, w: Array) -> tuple[torch.nn.Parameter, torch.Tensor, torch.optim.Optimizer]:
        """Return the parameter with memory w, its gradient, and the rule on this optimizer's state vectors. PyTorch
        makes the state at the first step, then shares it with this optimizer. A copy, for a slice, has its own."""
        fresh, address = self.step == self.since, as_tensor(w).data_ptr()
        if self.bound is not None and self.bound[0] is self.state and self.bound[1] == address and not fresh:
            return self.bound[2]  # type: ignore[no-any-return]
        parameter = torch.nn.Parameter(as_tensor(w))
        parameter.grad = torch.empty_like(parameter)
        decay = {"weight_decay": self.weight_decay} if self.rule.decays else {}
        rule = self.rule.kind([parameter], lr=0.0, **decay, **self.rule.settings)  # type: ignore[call-arg]
        if not fresh:
            rule_state = rule.state[parameter]
            rule_state["step"] = torch.zeros((), device=parameter.device if self.rule.settings.get("fused") else "cpu")
            rule_state |= {name: as_tensor(self.state[name]) for name in self.rule.vectors}
            rule_state |= {name: as_tensor(self.state[name])[0].clone() for name in self.rule.numbers}
        self.bound = self.state, address, (parameter, parameter.grad, rule)
        return self.bound[2]  # type: ignore[no-any-return]
