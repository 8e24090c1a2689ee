"""Learning-rate schedules: functions of the step, counted in updates from 0.

With a = lr, W = warm-up steps, E = steps of an epoch, T = steps of the whole run:

    constant                    a
    step:every=10,factor=0.1    a factor^floor(step / (every E))                                 every: epochs
    cosine:floor=0,cycles=1     a (floor + (1 - floor) (1 + cos(pi x)) / 2),  x = (step - W) / (T - W), at most 1;
                                several cycles of L = ceil((T - W) / cycles) steps: x = ((step - W) mod L) / L
    1/t:decay=0.01              a / (1 + decay (step - W))
    polynomial:b=1,gamma=0.55   a (b + step - W)^-gamma

    warmup=5                    (all) W = 5 E: the rate rises from 0, a (step + 1) / W
    reference-batch=256         (all) a = lr batch_size / 256: lr is the rate for batches of 256 examples

Cosine: Loshchilov and Hutter, "SGDR", ICLR 2017; cycles, each of which begins at the full rate: snapshot ensembles,
Huang et al., ICLR 2017. 1/t: Robbins and Monro, 1951. Polynomial: Welling and Teh, ICML 2011. Reference batch: Goyal et
al., "Accurate, large minibatch SGD: training ImageNet in 1 hour", 2017, whose warm-up (section 2.2) begins at lr."""

import math
from collections.abc import Callable

from hpcdl.errors import UsageError, parse_spec

COMMON: dict[str, float] = {"warmup": 0.0, "reference-batch": 0}
SETTINGS: dict[str, dict[str, float]] = {
    "constant": COMMON,
    "step": {"every": 10.0, "factor": 0.1, **COMMON},
    "cosine": {"floor": 0.0, "cycles": 1, **COMMON},
    "1/t": {"decay": 0.01, **COMMON},
    "polynomial": {"b": 1.0, "gamma": 0.55, **COMMON},
}
LARGEST = {"floor": 1.0}
POSITIVE = ("every", "factor", "b", "cycles")


def make_schedule(spec: str, lr: float, steps: int, steps_per_epoch: int, batch_size: int) -> Callable[[int], float]:
    """Return the function step -> learning rate of `spec`, for a run of `steps` updates. lr: positive. batch_size:
    examples of an update, on all ranks. UsageError: an unknown name or setting, or a value out of range."""
    name, settings = parse_spec("schedule", spec, SETTINGS)
    check_range("learning rate", lr, positive=True)
    for key, value in settings.items():
        check_range(f"schedule's {key}", value, key in POSITIVE, LARGEST.get(key, math.inf))
    reference = settings["reference-batch"]
    peak = lr * batch_size / reference if reference else lr
    check_range("learning rate for batches of this size", peak, positive=True)
    cycles = int(settings.get("cycles", 1))
    # Both in steps, and limited: infinity has no integer.
    warmup, every = (round(min(settings.get(name, 0) * steps_per_epoch, 2**62)) for name in ("warmup", "every"))
    length = cycle(steps - warmup, cycles)

    def rate(step: int) -> float:
        if step < warmup:
            return peak * (step + 1) / warmup
        if name == "step":
            return peak * power(settings["factor"], step // max(1, every))
        if name == "cosine":
            x = min(1, (step - warmup) / max(1, steps - warmup))
            if cycles > 1:
                x = (step - warmup) % length / length
            return peak * (settings["floor"] + (1 - settings["floor"]) * (1 + math.cos(math.pi * x)) / 2)
        if name == "1/t":
            return peak / (1 + settings["decay"] * (step - warmup))
        if name == "polynomial":
            return peak * (settings["b"] + step - warmup) ** -settings["gamma"]
        return peak

    return rate


def cycle(steps: int, cycles: int) -> int:
    """Return the number of steps of each of `cycles` cycles in `steps` steps; the last cycle may have fewer."""
    return max(1, -(-steps // cycles))


def power(factor: float, exponent: int) -> float:
    """Return factor^exponent, or infinity on overflow."""
    try:
        return factor**exponent
    except OverflowError:
        return math.inf


def check_range(what: str, value: float, positive: bool, largest: float = math.inf) -> None:
    """Raise UsageError unless the value is finite, at most `largest`, and positive (if not `positive`: at least 0)."""
    if math.isfinite(value) and 0 <= value <= largest and (value > 0 or not positive):
        return
    wanted = "positive" if positive else "zero or positive"
    raise UsageError(f"the {what} is {wanted}{'' if largest == math.inf else f', at most {largest}'}, not {value}")
