"""Gather a batch: pick rows of a data set, convert them to the model's type and scale them, in one pass.

    out[i, j] = scale * source[index[i], j]

The data set keeps its own type in memory (a byte per pixel, say), so a batch is converted when it is gathered and at no
other time. Images may be moved on the way (`gather_images`), at no further pass. `standardize` is a pass of its own
over the batch while it lies in a cache: a feature's mean belongs to its place after the move.
"""

import numpy as np
from numba import types
from numba.core.cgutils import ir
from numba.extending import intrinsic

from hpcdl.kernels.bind import block, rowwise

LINE = 64  # bytes of a cache line
AHEAD = 2  # rows
NEAR = 1 << 20  # bytes that lie in a cache anyway


@intrinsic
def prefetch(context, address):
    """Ask for the cache line at this address to be there when it is read; nothing happens where there is no memory."""

    def generate(context, builder, signature, arguments):
        byte, number = ir.IntType(8).as_pointer(), ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [byte, number, number, number])
        call = builder.module.declare_intrinsic("llvm.prefetch", [byte], kind)
        to_read, to_keep, data = number(0), number(3), number(1)
        builder.call(call, [builder.inttoptr(arguments[0], byte), to_read, to_keep, data])
        return context.get_dummy_value()

    return types.void(types.uintp), generate


def _gather(source, index, scale, out):
    """Write scale * source[index] into out (rows, columns); every index must lie inside source.

    Bytes moved per element: one of the source, one of out; memory bandwidth bounds it, above all that of writing. No
    processor foresees which row comes next, so it is told where rows are far away.
    """
    factor, base = out.dtype.type(scale), np.uintp(source.ctypes.data)
    width = np.uintp(source.shape[1] * source.itemsize)
    told = out.shape[0] - AHEAD if source.size * source.itemsize > NEAR else 0
    for i in range(out.shape[0]):
        if i < told:
            address = base + np.uintp(index[i + AHEAD]) * width
            for offset in range(0, width, LINE):
                prefetch(address + np.uintp(offset))
        row = np.uintp(index[i])  # no check for a negative index: the loop vectorizes
        for j in range(out.shape[1]):
            out[i, j] = out.dtype.type(source[row, j]) * factor


def _gather_images(source, index, scale, height, width, channels, down, right, mirrored, out):
    """Like gather, for images (height, width, channels): image i is moved by (down[i], right[i]), then mirrored.

    Pixels that come in from outside are 0. With mirrored[i] != 0 left and right change places.
    """
    # np.uintp: an index that cannot be negative needs no check for it, and without the check the loops vectorize.
    factor, line = out.dtype.type(scale), width * channels
    for i in range(len(index)):
        image, target = source[index[i]], out[i]
        for j in range(len(target)):
            target[j] = out.dtype.type(0)
        shift = -right[i] if mirrored[i] else right[i]  # to the right, in the image as it comes out
        first, last = max(0, shift), min(width, width + shift)
        for v in range(max(0, down[i]), min(height, height + down[i])):
            to, start = v * line, (v - down[i]) * line
            if mirrored[i]:
                start += (width - 1 + shift) * channels  # pixel h of the result is pixel width - 1 + shift - h
                for h in range(first, last):
                    for c in range(channels):
                        pixel = image[np.uintp(start - h * channels + c)]
                        target[np.uintp(to + h * channels + c)] = out.dtype.type(pixel) * factor
            else:
                start -= shift * channels
                for j in range(first * channels, last * channels):
                    target[np.uintp(to + j)] = out.dtype.type(image[np.uintp(start + j)]) * factor


# The source is read only (its fourth `Array` argument); its type is T. The type of out comes from the model.
_ROWS = "Array(T, 2, 'C', True), int64[::1]"
_MOVES = "int64, int64, int64, int64[::1], int64[::1], int64[::1]"
gather = {out: block(f"{_ROWS}, float64, {out}[:, ::1]")(_gather) for out in ("float32", "float64")}
gather_images = {out: block(f"{_ROWS}, float64, {_MOVES}, {out}[:, ::1]")(_gather_images) for out in gather}


@rowwise("T[:, ::1], T[::1], T[::1]")
def standardize(i, j, x, mean, factor):
    """x <- (x - mean) * factor, for every row.

    Bytes moved per element of k bytes: 2k; memory bandwidth bounds it.
    """
    x[i, j] = (x[i, j] - mean[j]) * factor[j]
