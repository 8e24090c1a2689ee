"""Gathering of a batch: copy rows of a data set, converted to the model's type and scaled, in one pass.

    out[i, j] = scale * source[index[i], j]

The data set keeps its own type in memory (a byte for a pixel, say). `gather_images` also shifts and mirrors images in
the same pass. `standardize` is another pass, over the batch in the cache: means belong to pixels after the shift."""

import numpy as np
from numba import types
from numba.core.cgutils import ir
from numba.extending import intrinsic

from hpcdl.kernels.bind import block, rowwise

LINE = 64  # bytes of a cache line
AHEAD = 2  # rows between a prefetch and its use
NEAR = 1 << 20  # bytes of a data set that lies in a cache: no prefetch


@intrinsic
def prefetch(context, address):
    """Prefetch the cache line at this address; an invalid address is no error."""

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
    Memory bandwidth bounds it: an element of the source and one of out. Rows of a large source are prefetched."""
    factor, base = out.dtype.type(scale), np.uintp(source.ctypes.data)
    width = np.uintp(source.shape[1] * source.itemsize)
    prefetched = out.shape[0] - AHEAD if source.size * source.itemsize > NEAR else 0
    for i in range(out.shape[0]):
        if i < prefetched:
            address = base + np.uintp(index[i + AHEAD]) * width
            for offset in range(0, width, LINE):
                prefetch(address + np.uintp(offset))
        row = np.uintp(index[i])  # unsigned, without the check for a negative index, so that the loop vectorizes
        for j in range(out.shape[1]):
            out[i, j] = out.dtype.type(source[row, j]) * factor


def _gather_images(source, index, scale, height, width, channels, down, right, mirrored, out):
    """Gather images (height, width, channels): shift image i by (down[i], right[i]), then mirror it if mirrored[i].
    Pixels from outside the image are 0. Mirroring exchanges left and right."""
    # np.uintp: an unsigned index needs no check for negative values, and without it the loops vectorize.
    factor, line = out.dtype.type(scale), width * channels
    for i in range(len(index)):
        image, target = source[index[i]], out[i]
        for j in range(len(target)):
            target[j] = out.dtype.type(0)
        shift = -right[i] if mirrored[i] else right[i]  # to the right, in the resulting image
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


# The source is read-only (the fourth argument of `Array`) and of type T; out has the type of the model.
_ROWS = "Array(T, 2, 'C', True), int64[::1]"
_MOVES = "int64, int64, int64, int64[::1], int64[::1], int64[::1]"
gather = {out: block(f"{_ROWS}, float64, {out}[:, ::1]")(_gather) for out in ("float32", "float64")}
gather_images = {out: block(f"{_ROWS}, float64, {_MOVES}, {out}[:, ::1]")(_gather_images) for out in gather}


@rowwise("T[:, ::1], T[::1], T[::1]")
def standardize(i, j, x, mean, factor):
    """x <- (x - mean) * factor, for every row; memory bandwidth bounds it, 2k bytes per element of k bytes."""
    x[i, j] = (x[i, j] - mean[j]) * factor[j]
