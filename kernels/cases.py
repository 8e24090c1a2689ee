"""Cases of all kernels for tests, bench-kernels and gpu-check: arguments, the reference in numpy, bytes moved.

    case = CASES["momentum"]
    args = case.make(rows, columns, "float32", np.random.default_rng(0))
    case.kernel(*args)          changes its arrays in place, and may return numbers
    case.reference(*args)       does the same to the same arguments, as a user of numpy would write it
    case.traffic(*args)         bytes that one call reads and writes

A vector kernel gets rows * columns elements. A call may be repeated any number of times: values stay in range."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from hpcdl.kernels import (
    activation,
    attention,
    block_attention,
    convert,
    dropout,
    embedding,
    fixed_point,
    gather,
    layer_norm,
    loss,
    low_rank,
    noise,
    norm,
    quantize,
    reduce,
    references,
    rms_norm,
    rotary,
    routing,
    select,
    sparse,
    swiglu,
    updates,
)
from hpcdl.kernels.bind import Kernel


@dataclass(frozen=True)
class KernelCase:
    """A kernel with arguments to call it; its reference is the function of references.py with the kernel's name.
    limit: "memory" or "arithmetic", which bounds the kernel's speed. columns: usual width of its matrix. nan: True if
    its result for NaN is defined. main: position of the argument whose shape counts as the shape of the call."""

    kernel: Kernel
    make: Callable[..., tuple]
    traffic: Callable[..., int]
    limit: str = "memory"
    columns: int = 256
    dtypes: tuple[str, ...] = ("float32", "float64")
    nan: bool = True
    main: int = 0

    @property
    def reference(self) -> Callable:
        return getattr(references, self.kernel.__name__.removeprefix("_"))


def bytes_of(*positions: int) -> Callable[..., int]:
    """Return traffic(*args), the sum of bytes of the args at these positions; give each once per read or write."""
    return lambda *args: sum(args[k].nbytes for k in positions)


def signed(random, shape, dtype="float32"):
    """Return an array of random elements between -1 and 1, the same for every type up to rounding."""
    return (2 * random.random(shape, np.float32) - 1).astype(dtype)


def vectors(count: int, *numbers: float):
    """Return make(...) of `count` vectors of elements from 0 to 1 (second moments are not negative) and `numbers`."""

    def make(rows, columns, dtype, random):
        return *(random.random(rows * columns, np.float32).astype(dtype) for _ in range(count)), *numbers

    return make


def coded(order: str, kind: str):
    """Return make(...) of an argument for each letter: v numbers between -1 and 1, c 16-bit codes of such numbers."""

    def make(rows, columns, dtype, random):
        code = {"float16": lambda x: x.astype("f2").view("u2"), "bfloat16": lambda x: (x.view("u4") >> 16).astype("u2")}
        numbers = (signed(random, rows * columns) for _ in order)
        return tuple(code[kind](x) if k == "c" else x.astype(dtype) for k, x in zip(order, numbers, strict=True))

    return make


def fixed(rows, columns, dtype, random):
    """Make arguments: numbers between -1 and 1, the factor 2^40, fixed-point numbers."""
    v = signed(random, rows * columns, dtype)
    return v, 2.0**40, random.integers(-(2**40), 2**40, v.size)


def quantized(bits: int, blocks: int = 4):
    """Return make(...) of numbers between -1 and 1, scales, codes of `bits` bits, packed codes, and the numbers that
    describe them: shift, levels. Blocks have 2^blocks values."""

    def make(rows, columns, dtype, random):
        x = signed(random, rows * columns, dtype)
        scales = 1 - random.random(-(-x.size >> blocks), np.float32) / 2
        levels = max(1, 2**bits - 2)
        codes = random.integers(0, levels + 1, x.size, np.uint8)
        return x, scales, codes, random.integers(0, 256, -(-x.size * bits // 8), np.uint8), blocks, levels

    return make


def quantize_case(bits: int, stochastic: int):
    """Return make(...) of the arguments of `quantize`."""
    place = stochastic, (1 << 62) + 7, (1 << 40) + 3

    def make(*args):
        x, scales, codes, _, shift, levels = quantized(bits)(*args)
        return x, scales, codes, shift, levels, *place

    return make


def pack_case(bits: int):
    """Return make(...) of the arguments of `pack`."""
    return lambda *args: (*quantized(bits)(*args)[3:1:-1], bits)


def add_codes_case(bits: int):
    """Return make(...) of the arguments of `add_codes`."""

    def make(*args):
        x, scales, _, message, shift, levels = quantized(bits)(*args)
        return x, message, scales, bits, shift, levels, -0.5

    return make


def selected(order: str):
    """Return make(...) of an argument for each letter: v numbers, k a seventh of them, i indices without repetition."""

    def make(rows, columns, dtype, random):
        n = rows * columns
        k = -(-n // 7)
        places = {
            "v": lambda: signed(random, n, dtype),
            "k": lambda: signed(random, k, dtype),
            "i": lambda: np.sort(random.permutation(n)[:k]).astype(np.uint32),
        }
        return tuple(places[letter]() for letter in order)

    return make


def factor(rows, columns, dtype, random):
    """Return a matrix of numbers between -1 and 1, of 4 columns at most, and no more than rows."""
    return (signed(random, (rows, min(rows, columns, 4)), dtype),)


def low_rank_factors(rows, columns, dtype, random):
    """Return the arguments of `expand` for two factors of rank 2."""
    shapes = (rows, columns), (rows, columns), (rows, 2), (columns, 2)
    return *(signed(random, shape, dtype) for shape in shapes), 0.25


def matrices(shapes: str):
    """Return make(...) of an argument for each letter: m (rows, columns), r (columns,); numbers between -1 and 1."""
    return lambda rows, columns, dtype, random: tuple(
        signed(random, (rows, columns) if letter == "m" else columns, dtype) for letter in shapes
    )


def mask_and_keys(rows, columns, dtype, random):
    """Make arguments: mask to write, a key for each row, the share of zeros in units of 2^-24, the nonzero value."""
    return np.empty((rows, columns), dtype), random.integers(-(2**63), 2**63, rows), dropout.STEPS // 4, 4 / 3


def class_labels(rows, columns, dtype, random):
    """Make arguments: outputs (rows, columns), labels (rows,), the gradient to write."""
    z = (6 * random.random((rows, columns), np.float32) - 3).astype(dtype)
    return z, random.integers(0, columns, rows), np.empty_like(z)


def binary_labels(rows, columns, dtype, random):
    """Make arguments: outputs (rows * columns, 1), labels 0 or 1, the gradient to write."""
    z, _, dz = class_labels(rows * columns, 1, dtype, random)
    return z, random.integers(0, 2, len(z)), dz


def regression_targets(rows, columns, dtype, random, *delta):
    """Make arguments: outputs (rows * columns, 1), values to predict, `delta` if given, the gradient to write."""
    z, labels, dz = binary_labels(rows, columns, dtype, random)
    return z, labels.astype(dtype), *delta, dz


def images(rows, columns, dtype, random, move=False):
    """Make arguments: rows of bytes, indices of rows, a factor; if `move`: shape, shifts, mirroring; rows to write."""
    source = random.integers(0, 256, (max(1, rows), columns), np.uint8)
    source.flags.writeable = False
    index, out = random.integers(0, len(source), rows), np.empty((rows, columns), dtype)
    if not move:
        return source, index, 1 / 16, out
    channels = 3 if columns % 3 == 0 else 1
    height = max(n for n in range(1, 29) if columns // channels % n == 0)
    shape = height, columns // channels // height, channels
    down, right = random.integers(-2, 3, (2, rows))
    return source, index, 1 / 16, *shape, down, right, random.integers(0, 2, rows), out


def tokens(order: str, part: float = 1.0):
    """Return make(...) of tokens (rows, 1) and an argument for each letter: m a matrix (rows, columns), t a table or
    its gradient, f the token of the table's first row, v the vocabulary's size. part: t's share of the vocabulary."""

    def make(rows, columns, dtype, random):
        vocabulary = max(8, rows)
        held = int(part * vocabulary)
        shapes, numbers = {"t": (held, columns), "m": (rows, columns)}, {"f": (vocabulary - held) // 2, "v": vocabulary}
        token = random.integers(0, vocabulary, (rows, 1)).astype(dtype)
        return token, *(numbers[k] if k in numbers else signed(random, shapes[k], dtype) for k in order)

    return make


def positions(offset: int):
    """Return make(...) of a matrix, a table of more positions than a sequence has, a sequence's length, `offset`."""

    def make(rows, columns, dtype, random):
        length = 5 + columns // 8
        x, table = (signed(random, (n, columns), dtype) for n in (rows, length + 2))
        return x, table, length, offset

    return make


def normalized(rows, columns, dtype, random):
    """Make arguments: x, gain, bias; to write: y, mean, rstd."""
    x, gain, bias, y = matrices("mrrm")(rows, columns, dtype, random)
    return 3 * x + 1, gain, bias, y, np.empty(rows, dtype), np.empty(rows, dtype)


def normalized_backward(rows, columns, dtype, random):
    """Make arguments: dy, x, gain, mean and rstd of each row; to write: dx; to add to: dgain, dbias."""
    dy, x, gain, dx, dgain, dbias = matrices("mmrmrr")(rows, columns, dtype, random)
    mean, rstd = x.mean(axis=1), 1 / np.sqrt(x.var(axis=1) + np.asarray(layer_norm.EPS, dtype))
    return dy, x, gain, mean, rstd, dx, dgain, dbias


def scaled(rows, columns, dtype, random):
    """Make arguments: x, gain; to write: y, rstd."""
    x, gain, y = matrices("mrm")(rows, columns, dtype, random)
    return 3 * x + 1, gain, y, np.empty(rows, dtype)


def scaled_backward(rows, columns, dtype, random):
    """Make arguments: dy, x, gain, rstd of each row; to write: dx; to add to: dgain."""
    dy, x, gain, dx, dgain = matrices("mmrmr")(rows, columns, dtype, random)
    return dy, x, gain, 1 / np.sqrt((x * x).mean(axis=1) + np.asarray(layer_norm.EPS, dtype)), dx, dgain


def gated(widths: str):
    """Return make(...) of a matrix for each letter: m (rows, columns), w (rows, 2 columns); numbers from -4 to 4."""
    return lambda rows, columns, dtype, random: tuple(
        4 * signed(random, (rows, columns if letter == "m" else 2 * columns), dtype) for letter in widths
    )


def rotation_table(rows, columns, dtype, random):
    """Make arguments: a table to write, positions that do not begin at 0, the base."""
    return signed(random, (rows, columns), dtype), 3 + np.arange(rows), 100.0


def rotated(rows, columns, dtype, random, more=0):
    """Make arguments: x, table of 7 positions at most, columns to rotate, sign. more: columns of x that stay."""
    size = 2 * max(n for n in (1, 2, 3, 5) if columns % n == 0)
    table = np.empty((max(1, min(rows, 7)), size), dtype)
    references.rotations(table, np.arange(len(table)), 100.0)
    return signed(random, (rows, 2 * columns + more), dtype), table, 2 * columns, -1


def logits(top: int, back: bool = False):
    """Return make(...) of what choose_experts takes, for rows * columns tokens and 5 experts; logits have ties.
    back: of what its backward takes, for sequences of 7 tokens."""

    def make(rows, columns, dtype, random):
        tokens = rows * columns
        p = random.integers(-9, 10, (tokens, 5)).astype(dtype) / 4
        lse, chosen, gates = np.empty(tokens, dtype), np.zeros((tokens, top), np.int64), np.empty((tokens, top), dtype)
        if not back:
            return lse, p, chosen, gates
        references.choose_experts(lse, p, chosen, gates)
        share = random.random((tokens // 7 + 1, 5), np.float32).astype(dtype)
        return lse, p, chosen, gates, signed(random, (tokens, top), dtype), share, 7, 0.5, 0.25, np.empty_like(p)

    return make


def choices(rows, columns, dtype, random):
    """Make arguments of place_choices, for 3 choices among 5 experts of `columns` tokens in each of `rows` sequences;
    there is room for 2 choices of a group."""
    chosen = random.permuted(np.tile(np.arange(5), (rows * columns, 1)), axis=1)[:, :3].copy()
    counts = np.zeros(rows * 5, np.int64)
    references.count_choices(counts, chosen, columns, 5)
    room = np.full_like(counts, 2)
    kept = np.minimum(counts, room).reshape(rows, 5).T.ravel()
    starts = (np.cumsum(kept) - kept).reshape(5, rows).T.ravel()
    return starts, room, chosen, columns, 5, np.zeros_like(chosen), np.zeros(chosen.size, np.int64)


def counted(rows, columns, dtype, random):
    """Make arguments of count_choices."""
    starts, _, chosen, *sizes, _, _ = choices(rows, columns, dtype, random)
    return starts, chosen, *sizes


def placed(order: str):
    """Return make(...) of an argument for each letter: m, n matrices (rows, columns), p places (rows, 2), some -1,
    f factors (rows, 2), s numbers of choices (rows,), g flat factors of all choices, q flat places, 2, 1, d dots."""

    def make(rows, columns, dtype, random):
        shapes = {"m": (rows, columns), "n": (rows, columns), "f": (rows, 2), "g": 2 * rows, "d": 2 * rows}
        place = random.integers(0, max(1, rows), (rows, 2))
        place[6::3] = -1
        fixed = {"p": place, "q": place.ravel(), "s": random.integers(0, max(1, 2 * rows), rows), "2": 2, "1": 1}
        made = (fixed[k] if k in fixed else signed(random, shapes[k], dtype) for k in order)
        if order[1] == "g":  # factors near 1, so that repeated calls neither vanish nor grow
            rows_, factors, source = made
            return rows_, np.sign(factors) + (factors == 0), source
        return tuple(made)

    return make


def attended(rows, columns, dtype, random, shared=False):
    """Make arguments: qkv of up to 4 heads in sequences of up to 64 tokens, length, size, scale; to write: a, lse.
    shared: True for at most 4 times as many heads of queries as of keys, with 2 heads of keys if there are 4."""
    heads = max(n for n in (1, 2, 3, 4) if columns % n == 0)
    kv = (2 if heads == 4 else 1) if shared else heads
    length = max(n for n in range(1, 65) if rows % n == 0)
    size = columns // heads
    qkv, a = (2 * signed(random, (rows, n), dtype) for n in (columns + 2 * kv * size, columns))
    return qkv, length, size, 0.5, a, np.empty((rows, heads), dtype)


def attended_backward(rows, columns, dtype, random, shared=False):
    """Make arguments: qkv, a, da, lse, length, size, scale; to write: dqkv."""
    qkv, length, size, scale, a, lse = attended(rows, columns, dtype, random, shared)
    references.causal_attention(qkv, length, size, scale, a, lse)
    return qkv, a, signed(random, a.shape, dtype), lse, length, size, scale, np.empty_like(qkv)


def attended_block(rows, columns, dtype, random):
    """Make arguments: qkv, kv, length, first query, keys, size, scale, and to change: a, lse."""
    qkv, length, size, scale, a, lse = attended(rows, columns, dtype, random)
    a[...], lse[...] = signed(random, a.shape, dtype), signed(random, lse.shape, dtype)
    kv = signed(random, (rows, qkv.shape[1] - columns), dtype)
    return qkv, kv, length, length // 3, (length + 1) // 2, size, scale, a, lse


def attended_block_backward(rows, columns, dtype, random):
    """Make arguments: qkv, kv, a, da, lse, length, first query, keys, size, scale, and to add to: dqkv, dkv."""
    qkv, kv, *where, a, lse = attended_block(rows, columns, dtype, random)
    references.attend_block(qkv, kv, *where, a, lse)
    da, dqkv, dkv = (signed(random, each.shape, dtype) for each in (a, qkv, kv))
    return qkv, kv, a, da, lse, *where, dqkv, dkv


def shard(rows, columns, dtype, random):
    """Make arguments: outputs of half of the classes, labels of all classes, first class, tops; to write: dz, sums."""
    z = (6 * random.random((rows, columns), np.float32) - 3).astype(dtype)
    tops, sums = np.full(rows, 3, dtype), np.empty((rows, 2), dtype)
    return z, random.integers(0, 2 * columns, rows), columns // 2, tops, np.empty_like(z), sums


def shard_sums(rows, columns, dtype, random):
    """Make arguments: dz, labels, the first class, the number of classes, sums near 1 (a call divides dz by them)."""
    z, labels, first, *_ = shard(rows, columns, dtype, random)
    sums = np.empty((rows, 2), dtype)
    sums[:, 0] = 1 + random.choice([-1, 1], rows) * 2.0**-13
    sums[:, 1] = -random.integers(0, 3, rows)
    return z, labels, first, 2 * columns, sums


def sparse_rows(outputs: int, order: str):
    """Return make(...) of sparse rows of 8 * columns features, and an argument for each letter of `order`.
    Even rows have `columns` elements, odd rows one less. w: a matrix (features, outputs), z: one (rows, outputs)."""

    def make(rows, columns, dtype, random):
        features, full = 8 * columns, np.ones((rows, columns), bool)
        full[1::2, -1:] = False
        indices = (8 * np.arange(columns) + random.integers(0, 8, (rows, columns))).astype(np.int32)[full]
        indptr = np.append(0, np.cumsum(full.sum(axis=1)))
        shapes, data = {"w": (features, outputs), "z": (rows, outputs)}, signed(random, len(indices), dtype)
        return data, indices, indptr, *(signed(random, shapes[letter], dtype) for letter in order)

    return make


def picked_rows(rows, columns, dtype, random):
    """Make arguments: sparse rows, a permutation of them, a factor; to write: the rows in that order."""
    source, indices, indptr = sparse_rows(1, "")(rows, columns, dtype, random)
    room = np.zeros(len(source), dtype), np.zeros_like(indices), np.zeros_like(indptr)
    return source, indices, indptr, random.permutation(rows), 1 / 16, *room


def products(data, indices, indptr, a, b):
    """Return bytes of a product with sparse rows; each element moves a row of the matrix (features, outputs)."""
    features, rows = (a, b) if len(b) == len(indptr) - 1 else (b, a)
    return data.nbytes + indices.nbytes + indptr.nbytes + rows.nbytes + data.size * features.shape[1] * data.itemsize


def gathered(source, index, *rest):
    """Return the bytes of the indices, and of the rows that are read and written."""
    return index.nbytes + rest[-1].size * source.itemsize + rest[-1].nbytes


STEP = 1e-3, 0.25, 0.01  # rate, scale, decay
LANGEVIN = *STEP, 0.1, 5, (1 << 40) + 3, 0x12345678, 0x9ABCDEF0  # ..., deviation, first coordinate, step, key0, key1
ADAM = *STEP, 0.999, 0.9, 1 - 0.9, 0.99, 1 - 0.99, 3.0, 1e-3  # ..., shrink, beta1, rest1, beta2, rest2, root, eps
YOGI = *STEP, 0.9, 1 - 0.9, 1 - 0.99, 1e-3

CASES = {
    "add_into": KernelCase(reduce.add_into, vectors(2), bytes_of(0, 0, 1)),
    "max_into": KernelCase(reduce.max_into, vectors(2), bytes_of(0, 0, 1)),
    "min_into": KernelCase(reduce.min_into, vectors(2), bytes_of(0, 0, 1)),
    "add_scaled": KernelCase(reduce.add_scaled, vectors(2, 1e-3), bytes_of(0, 0, 1)),
    "scale": KernelCase(reduce.scale, vectors(1, -1.0), bytes_of(0, 0)),
    "sum_of_squares": KernelCase(norm.sum_of_squares, vectors(1), bytes_of(0)),
    "sgd": KernelCase(updates.sgd, vectors(2, *STEP), bytes_of(0, 0, 1)),
    "momentum": KernelCase(updates.momentum, vectors(3, *STEP, 0.9), bytes_of(0, 0, 1, 2, 2)),
    "nesterov": KernelCase(updates.nesterov, vectors(3, *STEP, 0.9), bytes_of(0, 0, 1, 2, 2)),
    "nesterov_direction": KernelCase(
        updates.nesterov_direction, vectors(3, 0.25, 0.95, 1 - 0.95), bytes_of(0, 1, 2, 2)
    ),
    "adam": KernelCase(updates.adam, vectors(4, *ADAM), bytes_of(0, 0, 1, 2, 2, 3, 3)),
    "yogi": KernelCase(updates.yogi, vectors(4, *YOGI), bytes_of(0, 0, 1, 2, 2, 3, 3)),
    "average": KernelCase(updates.average, vectors(2, 0.25), bytes_of(0, 0, 1)),
    "adagrad": KernelCase(updates.adagrad, vectors(3, *STEP, 1e-10), bytes_of(0, 0, 1, 2, 2)),
    "langevin": KernelCase(noise.langevin, vectors(2, *LANGEVIN), bytes_of(0, 0, 1), "arithmetic"),
    "dropout_mask": KernelCase(dropout.dropout_mask, mask_and_keys, bytes_of(0, 1), "arithmetic"),
    "proximal": KernelCase(updates.proximal, vectors(3, 1e-4), bytes_of(0, 0, 1, 2)),
    "add_bias": KernelCase(activation.add_bias, matrices("mr"), bytes_of(0, 0, 1)),
    "add_bias_residual": KernelCase(activation.add_bias_residual, matrices("mrm"), bytes_of(0, 0, 1, 2)),
    "add_bias_relu": KernelCase(activation.add_bias_relu, matrices("mr"), bytes_of(0, 0, 1)),
    "add_bias_tanh": KernelCase(activation.add_bias_tanh, matrices("mr"), bytes_of(0, 0, 1), "arithmetic"),
    "add_bias_gelu": KernelCase(activation.add_bias_gelu, matrices("mrm"), bytes_of(0, 1, 2), "arithmetic"),
    "add_rows": KernelCase(activation.add_rows, matrices("mr"), bytes_of(0, 1, 1)),
    "relu_backward": KernelCase(activation.relu_backward, matrices("mmr"), bytes_of(0, 0, 1, 2, 2)),
    "tanh_backward": KernelCase(activation.tanh_backward, matrices("mmr"), bytes_of(0, 0, 1, 2, 2)),
    "gelu_backward": KernelCase(activation.gelu_backward, matrices("mrmr"), bytes_of(0, 0, 1, 2, 3, 3), "arithmetic"),
    "softmax_cross_entropy": KernelCase(loss.softmax_cross_entropy, class_labels, bytes_of(0, 1, 2), "arithmetic", 10),
    "row_max": KernelCase(loss.row_max, lambda *args: (shard(*args)[0], shard(*args)[3]), bytes_of(0, 1)),
    "partial_softmax": KernelCase(loss.partial_softmax, shard, bytes_of(0, 1, 3, 4, 5), "arithmetic"),
    "finish_softmax": KernelCase(loss.finish_softmax, shard_sums, bytes_of(0, 0, 1, 4)),
    "embed": KernelCase(embedding.embed, tokens("tfvm"), bytes_of(0, 4, 4), main=4),
    "embed part": KernelCase(embedding.embed, tokens("tfvm", part=0.5), bytes_of(0, 4), main=4),
    "embed_backward": KernelCase(embedding.embed_backward, tokens("mft"), bytes_of(0, 1, 1, 1), main=1),
    "embed_backward part": KernelCase(embedding.embed_backward, tokens("mft", part=0.5), bytes_of(0, 1), main=1),
    "add_positions": KernelCase(embedding.add_positions, positions(3), bytes_of(0, 0)),
    "add_positions_backward": KernelCase(embedding.add_positions_backward, positions(3), bytes_of(0)),
    "layer_norm": KernelCase(layer_norm.layer_norm, normalized, bytes_of(0, 3, 4, 5)),
    "layer_norm_backward": KernelCase(layer_norm.layer_norm_backward, normalized_backward, bytes_of(0, 1, 3, 4, 5)),
    "rms_norm": KernelCase(rms_norm.rms_norm, scaled, bytes_of(0, 2, 3)),
    "rms_norm_backward": KernelCase(rms_norm.rms_norm_backward, scaled_backward, bytes_of(0, 1, 3, 4)),
    "swiglu": KernelCase(swiglu.swiglu, gated("mw"), bytes_of(0, 1), "arithmetic"),
    "swiglu_backward": KernelCase(swiglu.swiglu_backward, gated("mww"), bytes_of(0, 1, 2), "arithmetic"),
    "rotations": KernelCase(rotary.rotations, rotation_table, bytes_of(0, 1), "arithmetic", 32),
    "rotate": KernelCase(rotary.rotate, rotated, lambda x, table, columns, _: 2 * len(x) * columns * x.itemsize),
    "choose_experts": KernelCase(routing.choose_experts, logits(2), bytes_of(0, 1, 1, 2, 3), nan=False),
    "choose_experts one": KernelCase(routing.choose_experts, logits(1), bytes_of(0, 1, 1, 2, 3), nan=False),
    "choose_experts_backward": KernelCase(
        routing.choose_experts_backward, logits(2, True), bytes_of(0, 1, 2, 3, 4, 9), nan=False
    ),
    "choose_experts_backward one": KernelCase(
        routing.choose_experts_backward, logits(1, True), bytes_of(0, 1, 2, 3, 4, 9), nan=False
    ),
    "count_choices": KernelCase(routing.count_choices, counted, bytes_of(0, 1), dtypes=("int64",), nan=False),
    "place_choices": KernelCase(routing.place_choices, choices, bytes_of(0, 1, 2, 5, 6), dtypes=("int64",), nan=False),
    "gather_choices": KernelCase(routing.gather_choices, placed("mns2"), bytes_of(0, 1, 2)),
    "add_placed": KernelCase(routing.add_placed, placed("mnpf1"), bytes_of(0, 0, 1, 2, 3)),
    "scale_choices": KernelCase(routing.scale_choices, placed("mgs"), bytes_of(0, 0, 1, 2)),
    "dot_choices": KernelCase(routing.dot_choices, placed("dqmn"), bytes_of(0, 1, 2, 3)),
    "causal_attention": KernelCase(
        attention.causal_attention, attended, bytes_of(0, 4, 5), "arithmetic", 128, nan=False
    ),
    "causal_attention_backward": KernelCase(
        attention.causal_attention_backward, attended_backward, bytes_of(0, 1, 2, 3, 7), "arithmetic", 128, nan=False
    ),
    "attend_block": KernelCase(
        block_attention.attend_block, attended_block, bytes_of(0, 1, 7, 8), "arithmetic", 128, nan=False
    ),
    "attend_block_backward": KernelCase(
        block_attention.attend_block_backward,
        attended_block_backward,
        bytes_of(0, 1, 2, 3, 10, 11),
        "arithmetic",
        128,
        nan=False,
    ),
    "logistic": KernelCase(loss.logistic, binary_labels, bytes_of(0, 1, 2), "arithmetic", 1),
    "hinge": KernelCase(loss.hinge, binary_labels, bytes_of(0, 1, 2), columns=1),
    "squared": KernelCase(loss.squared, regression_targets, bytes_of(0, 1, 2), columns=1),
    "huber": KernelCase(loss.huber, lambda *args: regression_targets(*args, 1.0), bytes_of(0, 1, 3), columns=1),
}
CASES["rotate part"] = replace(CASES["rotate"], make=partial(rotated, more=3))
for name, make in (("causal_attention", attended), ("causal_attention_backward", attended_backward)):
    CASES[f"{name} grouped"] = replace(CASES[name], make=partial(make, shared=True))
for kind in ("float16", "bfloat16"):
    for action, order, passes in (("encode", "vvc", (0, 1, 1, 2)), ("decode", "vc", (0, 1)), ("add", "vc", (0, 0, 1))):
        name = f"{action}_{kind}"
        CASES[name] = KernelCase(getattr(convert, name), coded(order, kind), bytes_of(*passes))
CASES["encode_fixed"] = KernelCase(fixed_point.encode, fixed, bytes_of(0, 2), nan=False)
CASES["decode_fixed"] = KernelCase(
    fixed_point.decode, lambda *args: (fixed(*args)[0], 2.0**-40, fixed(*args)[2]), bytes_of(0, 2)
)
for mean in (0, 1):
    CASES[f"scales_of {'mean' if mean else 'largest'}"] = KernelCase(
        quantize.scales_of, lambda *args, mean=mean: (*quantized(8)(*args)[:2], 16, mean), bytes_of(0)
    )
for bits in (1, 2, 4, 8):
    CASES[f"quantize {bits}"] = KernelCase(quantize.quantize, quantize_case(bits, 1), bytes_of(0, 2), "arithmetic")
    CASES[f"pack {bits}"] = KernelCase(quantize.pack, pack_case(bits), bytes_of(1), dtypes=("float32",))
    CASES[f"add_codes {bits}"] = KernelCase(quantize.add_codes, add_codes_case(bits), bytes_of(0, 0))
CASES["quantize nearest"] = KernelCase(quantize.quantize, quantize_case(8, 0), bytes_of(0, 2), "arithmetic")
CASES["sign_codes"] = KernelCase(quantize.sign_codes, lambda *args: quantized(1)(*args)[::2][:2], bytes_of(0, 1))
CASES["select_largest"] = KernelCase(select.select_largest, selected("vi"), bytes_of(0, 1))
CASES["take"] = KernelCase(select.take, selected("kvi"), bytes_of(0, 0, 2))
CASES["add_at"] = KernelCase(select.add_at, lambda *args: (*selected("kvi")(*args), 0.25), bytes_of(0, 0, 0, 2))
CASES["orthogonalize"] = KernelCase(low_rank.orthogonalize, factor, bytes_of(*[0] * 7), "arithmetic", 2)
CASES["expand"] = KernelCase(low_rank.expand, low_rank_factors, bytes_of(0, 1, 1))
CASES["standardize"] = KernelCase(gather.standardize, matrices("mrr"), bytes_of(0, 0, 1, 2), columns=784)
for kind in ("float32", "float64"):
    CASES[f"gather {kind}"] = KernelCase(gather.gather[kind], images, gathered, columns=784, dtypes=(kind,))
    CASES[f"gather_images {kind}"] = KernelCase(
        gather.gather_images[kind], partial(images, move=True), gathered, columns=784, dtypes=(kind,)
    )
for outputs in (1, 10):
    CASES[f"sparse_dot {outputs}"] = KernelCase(sparse.sparse_dot, sparse_rows(outputs, "wz"), products, columns=64)
    CASES[f"scatter_add {outputs}"] = KernelCase(sparse.scatter_add, sparse_rows(outputs, "zw"), products, columns=64)
for kind in ("float32", "float64"):
    CASES[f"gather_sparse {kind}"] = KernelCase(
        sparse.gather_sparse[kind], picked_rows, bytes_of(0, 1, 2, 3, 5, 6, 7), columns=64, dtypes=(kind,)
    )
