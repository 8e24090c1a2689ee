"""--optimizer torch:AdamW,betas=(0.9,0.95): a rule of torch.optim on the flat vector, or on any slice of it.

    hpcdl                                                    PyTorch
    mean gradient, clipped: scale * g                   ->   the parameter's gradient
    --lr and --schedule: the rate of the step           ->   lr of its group
    --weight-decay                                      ->   weight_decay, as the rule has it (0 unless it is given)
    state["exp_avg"], ...: vectors like the parameters  <-   its state, in place
    step - since                                        ->   its count of steps

The vector is one parameter of one dimension, so that a rule fits that treats each element by itself; a slice of the
vector then moves as it does within the whole, on servers and in shards. Where PyTorch has a fused loop it is taken. A
number that a rule keeps beside its vectors, as NAdam's product, is kept as a vector of that number.
"""

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
    "Adafactor": "it looks at rows and columns of tensors, and a run's parameters are one vector",
    "LBFGS": "it computes the loss several times in a step, and a strategy computes it once",
    "Muon": "it takes matrices, and a run's parameters are one vector",
    "SparseAdam": "it takes sparse gradients, and a run's are dense",
}
INSTEAD = {"lr": "--lr and --schedule", "weight_decay": "--weight-decay"}  # what a run says of each rule
INNER = ("params", "maximize", "differentiable", "capturable", "foreach")  # what is no setting of a run


class TorchRule(NamedTuple):
    """A rule as it was asked for: its class, its settings, the names of its vectors, and of its other numbers."""

    kind: type[torch.optim.Optimizer]
    settings: dict[str, Any]
    vectors: tuple[str, ...]
    numbers: tuple[str, ...]
    decays: bool


@functools.lru_cache
def read(spec: str) -> TorchRule:
    """What torch:NAME,setting=value,... names. Raises UsageError, one line."""
    name, _, rest = spec.removeprefix(TORCH).partition(",")
    kinds = {
        each: kind
        for each, kind in vars(torch.optim).items()
        if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer) and kind is not torch.optim.Optimizer
    }
    told = f"optimizer {spec!r}"
    if name in REFUSED:
        raise UsageError(f"{told}: {REFUSED[name]}; take another rule, as torch:AdamW")
    if name not in kinds:
        raise unknown("optimizer of torch.optim", name, sorted(kinds.keys() - REFUSED.keys()))
    settings, takes = settings_of(rest, told), inspect.signature(kinds[name]).parameters
    for each in settings:
        if each in INSTEAD:
            raise UsageError(f"{told}: {each} is said by {INSTEAD[each]}")
        if each not in takes or each in INNER:
            known = ", ".join(sorted(set(takes) - set(INNER) - set(INSTEAD)))
            raise UsageError(f"{told}: there is no setting {each!r}; it takes {known}")
    fused = [settings["fused"]] if "fused" in settings else [True, None] if "fused" in takes else []
    for number, choice in enumerate(fused or [None]):
        if fused:
            settings["fused"] = choice
        try:
            state = first_state(kinds[name], settings)
            break
        except Exception as error:  # whatever PyTorch raises at such
            if number == len(fused or [None]) - 1:
                raise UsageError(f"{told}: {reason(error)}") from None
    of_shape = {each: isinstance(value, torch.Tensor) and value.shape == (2,) for each, value in state.items()}
    vectors = tuple(each for each in state if of_shape[each])
    numbers = tuple(each for each in state if not of_shape[each] and each != "step")
    return TorchRule(kinds[name], settings, vectors, numbers, "weight_decay" in takes)


def vectors_of(spec: str) -> tuple[str, ...]:
    """The names of the vectors, each as long as the parameters, that the optimizer has which `spec` names."""
    return read(spec).vectors + read(spec).numbers


def first_state(kind: type[torch.optim.Optimizer], settings: dict[str, Any]) -> dict[str, Any]:
    """What a rule keeps of a parameter after a step; it fails where it cannot do with these settings."""
    probe = torch.zeros(2, requires_grad=True)
    probe.grad = torch.ones(2)
    rule = kind([probe], lr=0.1, **settings)  # type: ignore[call-arg]
    rule.step()
    return {name: value for name, value in rule.state[probe].items() if value is not None}


class TorchOptimizer(Optimizer):
    """A rule of torch.optim; state: its own vectors, by PyTorch's names."""

    bound: Any = None  # state, where the vectors lie, and the parameter and the rule on them

    def __init__(self, spec: str, *args: Any):
        self.spec, self.rule = spec, read(spec)
        self.vectors = vectors_of(spec)
        super().__init__(*args)

    def apply(self, w: Array, g: Array, rate: float, scale: float) -> None:
        """One step of the rule, by scale * g."""
        if not self.size:
            return
        fresh, (parameter, mean, rule) = self.step == self.since, self.on(w)
        torch.mul(as_tensor(g), scale, out=mean)
        if self.weight_decay and not self.rule.decays:
            mean.add_(parameter.detach(), alpha=self.weight_decay)
        rule.param_groups[0]["lr"] = rate
        mine = rule.state[parameter]
        if not fresh and "step" in mine:
            mine["step"].fill_(self.step - self.since)
        rule.step()
        for name in self.rule.vectors:
            ours = as_tensor(self.state[name])
            if mine[name].data_ptr() != ours.data_ptr():
                ours.copy_(mine[name])
                mine[name] = ours
        for name in self.rule.numbers:
            as_tensor(self.state[name]).fill_(float(mine[name]))

    def on(self, w: Array) -> tuple[torch.nn.Parameter, torch.Tensor, torch.optim.Optimizer]:
        """The parameter that is w, its gradient, and the rule, whose state are this optimizer's vectors.

        At the first step its state is what PyTorch begins with; from then on they are one. A copy of this optimizer,
        for a slice, has a state of its own, and so a rule of its own.
        """
        fresh, at = self.step == self.since, as_tensor(w).data_ptr()
        if self.bound is not None and self.bound[0] is self.state and self.bound[1] == at and not fresh:
            return self.bound[2]  # type: ignore[no-any-return]
        parameter = torch.nn.Parameter(as_tensor(w))
        parameter.grad = torch.empty_like(parameter)
        decay = {"weight_decay": self.weight_decay} if self.rule.decays else {}
        rule = self.rule.kind([parameter], lr=0.0, **decay, **self.rule.settings)  # type: ignore[call-arg]
        if not fresh:
            mine = rule.state[parameter]
            mine["step"] = torch.zeros((), device=parameter.device if self.rule.settings.get("fused") else "cpu")
            mine |= {name: as_tensor(self.state[name]) for name in self.rule.vectors}
            mine |= {name: as_tensor(self.state[name])[0].clone() for name in self.rule.numbers}
        self.bound = self.state, at, (parameter, parameter.grad, rule)
        return self.bound[2]  # type: ignore[no-any-return]
