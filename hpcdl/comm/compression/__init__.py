"""Compression of messages: one file a method, chosen as --compress NAME:SETTINGS.

    codec = make_codec("qsgd:bits=4", "float32")                            one vector to one message (codec.py)
    state = compressed("topk:0.01", size, "float32", seed)                  all-reduces of one vector (state.py)

METHODS in a method's file are its records (method.py)."""

import functools
from importlib import import_module
from typing import Any

from numpy.typing import DTypeLike

from hpcdl.comm.compression.codec import ErrorFeedback, RandomKey, VectorCodec
from hpcdl.comm.compression.exchange import ChunkExchange
from hpcdl.comm.compression.large_tensors import LargeTensors, large
from hpcdl.comm.compression.method import CompressionMethod, parse_method
from hpcdl.comm.compression.state import Compressed, TrainingContext
from hpcdl.errors import UsageError

__all__ = [
    "Compressed",
    "ErrorFeedback",
    "RandomKey",
    "TrainingContext",
    "VectorCodec",
    "compressed",
    "feedback_for",
    "make_codec",
    "methods",
]

FILES = ["sixteen", "int8", "qsgd", "terngrad", "sign", "topk", "randomk", "powersgd", "dgc", "onebit_adam"]


@functools.cache
def methods() -> dict[str, CompressionMethod]:
    """Return the methods by name. Their files are imported on first use: they load kernels."""
    return {each.name: each for name in FILES for each in import_module(f"{__name__}.{name}").METHODS}


def parse(spec: str) -> tuple[CompressionMethod, bool, dict[str, Any]]:
    """Parse --compress NAME:SETTINGS; return (method, feedback, settings). Raises UsageError."""
    return parse_method(methods(), spec)


def check_model(spec: str, layout: Any) -> None:
    """Raise UsageError if the spec is bad, or the method does not fit a model of this layout."""
    method, _, settings = parse(spec)
    try:
        method.fits(layout, **settings)
    except UsageError as error:
        raise UsageError(f"compression {spec!r}: {error}") from None


def plain_lengths(spec: str, layout: Any, cut: slice) -> tuple[int, ...]:
    """Return the values of the plain all-reduces of a method without codec, for a slice; empty for other methods."""
    method, _, settings = parse(spec)
    return method.lengths(layout, cut, **settings)


def phases(spec: str, steps: int, per_epoch: int) -> list[tuple[float, str]]:
    """Return [(part of a run's steps, method whose all-reduce is made there, or none)]; of most methods, their own."""
    method, _, settings = parse(spec)
    return [(1.0, spec)] if method.phases is None else method.phases(steps, per_epoch, **settings)


def traffic(spec: str, n: int, ranks: int) -> tuple[float, int]:
    """Return the bytes that a rank sends in an all-reduce of n values in float32, and the steps. UsageError as
    `make_codec`."""
    return parse(spec)[0].traffic(make_codec(spec, "float32"), n, ranks)


def make_codec(spec: str, dtype: DTypeLike) -> VectorCodec:
    """Return the codec of a method for vectors of `dtype`. UsageError: a bad spec, or a method without a codec."""
    method, feedback, settings = parse(spec)
    if method.codec is None:
        raise UsageError(f"compression {spec!r} works in an all-reduce only; take one of {', '.join(codecs())}")
    codec: VectorCodec = method.codec(dtype, feedback, **settings)
    return codec


def feedback_of(spec: str) -> bool:
    """Return True if the method keeps what its messages leave out; none does not. UsageError: a bad spec."""
    return spec != "none" and parse(spec)[1]


def codecs() -> list[str]:
    """Return the names of the methods that compress any vector: they have a codec, and are no part of an optimizer."""
    return [name for name, method in methods().items() if method.codec is not None and not method.optimizers]


def feedback_for(spec: str, size: int, dtype: DTypeLike) -> ErrorFeedback:
    """Return the codec of a method with a residual of `size` values, or without by its setting `feedback`."""
    return ErrorFeedback(make_codec(spec, dtype), size, feedback_of(spec))


def compressed(
    spec: str, size: int, dtype: DTypeLike, seed: int = 0, layout: Any = None, smallest: int = 0
) -> Compressed:
    """Return the state of compressed all-reduces of a vector. layout: of its tensors, for methods that need matrices.
    smallest: if above 0, compress only tensors of two or more dimensions and at least so many bytes, by the layout.
    UsageError: a bad spec, another type than float32 and float64, or no layout where it is needed."""
    if smallest:
        chosen, own = large(layout, smallest)
        whole = LargeTensors(size, chosen, compressed(spec, own.size, dtype, seed, own))
        whole.spec = spec
        return whole
    method, feedback, settings = parse(spec)
    if method.state is not None:
        state: Compressed = method.state(size, dtype, RandomKey(seed), layout, feedback, **settings)
    else:
        state = ChunkExchange(size, make_codec(spec, dtype), feedback, RandomKey(seed))
    state.spec = spec
    return state
