"""Context parallelism: the tokens of each sequence are cut over C ranks, and only attention exchanges anything.

    a sequence of 2C chunks on C = 3 ranks     chunk   0  1  2  3  4  5
                                               rank    0  1  2  2  1  0        rank r: chunks r and 2C-1-r (zigzag)

Chunk i attends to the chunks 0 .. i: with runs of chunks the last rank would have most to compute. In zigzag each rank
has r+1 chunks of keys for its first chunk of queries and 2C-r for its second, 2C+1 in all. Every other layer works
token by token, and what follows a token goes with it to its rank: its position, its target, its share of the loss. So a
rank has 1/C of the activations of all layers, and the gradient is summed over the ranks. The attention is one of

    ring        keys and values travel around (ring_attention.py)
    ulysses     shares of sequences become shares of heads, and back (ulysses.py)
    auto        the faster one, tried on sequences of the run's length: another run may take the other one, whose steps
                are the same but for rounding

(Llama Team, "The Llama 3 herd of models", 2024, section 3.3.2, cuts sequences so)"""

import time
from typing import Any

import numpy as np

from hpcdl.comm.communicator import Communicator
from hpcdl.comm.overlap import seconds_of
from hpcdl.errors import UsageError
from hpcdl.models.attention import Attention
from hpcdl.models.mixture import counted_choices
from hpcdl.models.part import require_layers
from hpcdl.models.pool import Pool
from hpcdl.parallel.ring_attention import ExchangeAlone, RingAttention
from hpcdl.parallel.ulysses import Ulysses


def check_context(model: Any, ranks: int, attention: str, parts: int = 1) -> None:
    """Raise UsageError, with numbers that would do, if `ranks` ranks cannot share the sequences of the model.
    parts: ranks that share the heads by tensor parallelism."""
    if ranks == 1:
        return
    require_layers(model)
    if not model.sequences:
        raise UsageError("context parallelism shares the tokens of sequences: take --model gpt")
    if counted_choices(model):
        raise UsageError(
            "ranks that share the tokens of sequences cannot count the choices of experts, which are limited and "
            "balanced by sequence: take data or tensor parallelism instead, or a model without experts"
        )
    if model.features % (2 * ranks):
        lower = model.features // (2 * ranks) * 2 * ranks
        fitting = f"{lower} or {lower + 2 * ranks}" if lower else f"{2 * ranks}"
        uneven = f"{ranks} ranks cannot cut sequences of {model.features} tokens into two chunks each"
        raise UsageError(f"{uneven}; take a length that is a multiple of {2 * ranks}, such as {fitting}")
    if attention == "ulysses" and (reason := unshared(model, ranks, parts)):
        raise UsageError(reason)


def unshared(model: Any, ranks: int, parts: int = 1) -> str:
    """Return why Ulysses cannot share the heads of the model over `ranks` ranks, or ""."""
    for heads in sorted({layer.kv_heads for layer in attention_layers(model)}):
        if heads % (ranks * parts):
            fitting = [n for n in range(1, heads // parts + 1) if heads // parts % n == 0]
            whose = f"{ranks} ranks cannot share {heads // parts} heads of keys evenly"
            return f"--attention ulysses: {whose}; take --attention ring, or {' or '.join(map(str, fitting))} ranks"
    return ""


def attention_layers(model: Any) -> list[Attention]:
    return [layer for layer in model.layers if isinstance(layer, Attention)]


def make_context(comm: Communicator, model: Any, rows: int, attention: str = "ring", parts: int = 1) -> Any:
    """Return the `ContextGroup` (hpcdl/models/group.py) of the ranks of `comm`; collective.
    rows: sequences that are computed at once. parts: ranks that share the heads. For `attention` see above."""
    check_context(model, comm.size, attention, parts)
    ring, ulysses = RingAttention(comm), Ulysses(comm)
    layers = attention_layers(model)
    if comm.size == 1 or not layers:
        return ulysses if attention == "ulysses" else ring
    own = comm.duplicate("trial")
    layer = layers[0].cut(0, parts)
    if attention == "ulysses":
        chosen: Any = ulysses
    elif attention == "auto" and not unshared(model, comm.size, parts):
        seconds = seconds_of(lambda: (turn(RingAttention(own), layer, rows), turn(Ulysses(own), layer, rows)), own)
        chosen = ring if seconds[0] <= seconds[1] else ulysses
        chosen.trial = dict(zip(("ring_seconds", "ulysses_seconds"), seconds, strict=True))
    else:
        chosen = ring
    if chosen is ring:
        (ring.alone,) = seconds_of(lambda: (turn(ExchangeAlone(own), layer, rows),), own)
    own.free()
    return chosen


def turn(way: Any, layer: Attention, rows: int) -> float:
    """Return the seconds of the attention of one layer, forward and backward, on random numbers."""
    pool, local = Pool(layer.pool.dtype, layer.pool.device), layer.length // way.size
    qkv = pool.take(rows * local, (layer.heads + 2 * layer.kv_heads) // layer.parts * layer.size)
    qkv[...] = pool.device.array(np.random.default_rng(0).standard_normal(qkv.shape).astype(pool.dtype))
    heads = layer.heads // layer.parts
    way.comm.barrier()
    start = time.perf_counter()
    a, saved = way.attention(qkv, local, heads, layer.size, pool)
    da = pool.take(*a.shape)
    da[...] = a
    way.attention_backward(saved, a, da, local, layer.size, pool)
    return time.perf_counter() - start


def costs(context: Any, own: Communicator) -> dict[str, Any]:
    """Return the entries of the summary, equal on all ranks; collective on `own`.
    hidden_fraction: 1 - exposed / alone, at least 0, of the ring; None: not measured. alone: seconds of the messages of
    an attention, forward and backward, without computing (tried at the start). exposed: seconds in communicator calls
    of one in training, waits among them. Means over ranks."""
    found: dict[str, Any] = {"attention": context.name, "context": dict(context.trial)}
    totals = np.array([context.exposed, context.exchanges])
    own.all_reduce(totals)  # also on stages of a pipeline without attention
    if context.alone and totals[1]:
        exposed = float(totals[0] / totals[1])
        found["hidden_fraction"] = float(np.clip(1 - exposed / context.alone, 0, 1))
        found["context"] |= {"exchange_alone_seconds": context.alone, "exchange_exposed_seconds": exposed}
    return found
