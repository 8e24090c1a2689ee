"""The record of a method of compression, and the parser of --compress NAME:SETTINGS."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from hpcdl.errors import UsageError, parse_spec


@dataclass(frozen=True)
class CompressionMethod:
    """A method of compression; METHOD in its file.

    name        as in --compress
    settings    its settings and their defaults; `feedback` is one of every method
    feedback    the default of `feedback`; no with a vote
    first       name of the setting that may stand without its name, as in topk:0.01; if its default is no,
                a word, as in sign:vote
    codec       (dtype, feedback, **settings) -> VectorCodec, for one vector; None: it has none, only an all-reduce
    state       (size, dtype, key, layout, feedback, **settings) -> Compressed, for all-reduces; None: a `ChunkExchange`
                of the codec's messages
    check       (**settings): raises UsageError, which `parse` begins with the spec
    optimizers  names of the optimizers of which it takes over a part, as momentum; empty: any optimizer
    clips       True if it clips the gradients of each rank itself (--clip-norm)
    vectors     vectors of the gradient's length that a rank holds beside the residual
    fits        (layout, **settings): raises UsageError if the method does not fit a model
    traffic     (codec, n, ranks) -> (bytes that a rank sends in an all-reduce of n values, steps); for forecasts
    phases      (steps, steps of an epoch, **settings) -> [(part of the steps, spec of the method whose all-reduce it
                has there, or none)]; for forecasts of a method with a warm-up
    lengths     (layout, cut, **settings) -> values of the plain all-reduces that it makes for a slice; for forecasts of
                a method without codec"""

    name: str
    codec: Callable[..., Any] | None = None
    state: Callable[..., Any] | None = None
    settings: dict[str, Any] = field(default_factory=dict)
    feedback: bool = True
    first: str = ""
    check: Callable[..., None] = lambda **settings: None
    optimizers: tuple[str, ...] = ()
    clips: bool = False
    vectors: int = 0
    fits: Callable[..., None] = lambda layout, **settings: None
    traffic: Callable[[Any, int, int], tuple[float, int]] = lambda codec, n, ranks: (
        2 * (ranks - 1) / ranks * codec.message_bytes(n),
        2,
    )
    phases: Callable[..., list[tuple[float, str]]] | None = None
    lengths: Callable[..., tuple[int, ...]] = lambda layout, cut, **settings: ()


def check_fraction(fraction: float) -> None:
    """Raise UsageError if `fraction` is no part of the values."""
    if not 0 < fraction <= 1:
        raise UsageError(f"fraction is above 0 and at most 1, not {fraction:g}")


def yes_or_no(name: str, value: str) -> bool:
    """Return True for yes, False for no; UsageError for others."""
    if value not in ("yes", "no"):
        raise UsageError(f"{name} is yes or no, not {value!r}")
    return value == "yes"


def parse_method(methods: dict[str, CompressionMethod], spec: str) -> tuple[CompressionMethod, bool, dict[str, Any]]:
    """Parse NAME or NAME:SETTING=VALUE,...; return (method, feedback, settings). Raises UsageError."""
    name, _, rest = spec.partition(":")
    method = methods.get(name)
    items = [item for item in rest.split(",") if item]
    if method is not None and method.first:
        is_word = method.settings[method.first] == "no"
        first = [item for item in items if (item == method.first if is_word else "=" not in item)]
        items = [item for item in items if item not in first]
        items += [f"{method.first}={'yes' if is_word else item}" for item in first]
    defaults = {each.name: each.settings | {"feedback": ""} for each in methods.values()}
    name, settings = parse_spec("compression", f"{name}:{','.join(items)}", defaults)
    method = methods[name]
    try:
        words = {key for key, default in method.settings.items() if default == "no"}
        settings |= {key: yes_or_no(key, settings[key]) for key in words}
        given = settings.pop("feedback")
        feedback = yes_or_no("feedback", given) if given else method.feedback and not settings.get("vote")
        method.check(**settings)
    except UsageError as error:
        raise UsageError(f"compression {spec!r}: {error}") from None
    return method, feedback, settings
