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
    feedback    the default of `feedback`
    first       name of the setting that may stand without its name, as in topk:0.01; a word for one that is yes or no
    codec       (dtype, feedback, **settings) -> VectorCodec, for one vector; None: it has none, only an all-reduce
    state       (size, dtype, key, layout, feedback, **settings) -> Compressed, for all-reduces
    check       (**settings): raises UsageError, which `parse` begins with the spec"""

    name: str
    state: Callable[..., Any]
    codec: Callable[..., Any] | None = None
    settings: dict[str, Any] = field(default_factory=dict)
    feedback: bool = True
    first: str = ""
    check: Callable[..., None] = lambda **settings: None


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
        is_word = method.settings[method.first] in ("yes", "no")
        items = [
            f"{method.first}=yes" if is_word and item == method.first
            else f"{method.first}={item}" if not is_word and "=" not in item
            else item
            for item in items
        ]  # fmt: skip
    defaults = {each.name: each.settings | {"feedback": "yes" if each.feedback else "no"} for each in methods.values()}
    name, settings = parse_spec("compression", ":".join(filter(None, [name, ",".join(items)])), defaults)
    method = methods[name]
    try:
        feedback = yes_or_no("feedback", settings.pop("feedback"))
        for key, default in method.settings.items():
            if default in ("yes", "no"):
                settings[key] = yes_or_no(key, settings[key])
        method.check(**settings)
    except UsageError as error:
        raise UsageError(f"compression {spec!r}: {error}") from None
    return method, feedback, settings
