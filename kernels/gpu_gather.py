"""CUDA twins of gather.py: a grid-stride loop over the elements of out, which copies each from its source."""

from hpcdl.kernels.gather import gather, gather_images
from hpcdl.kernels.gpu import cuda_rowwise, launch_over

_ROWS = "T[:, ::1], int64[::1]"
_MOVES = "int64, int64, int64, int64[::1], int64[::1], int64[::1]"


def copy_element(i, j, source, index, scale, out):
    """out[i, j] = scale * source[index[i], j]."""
    out[i, j] = out.dtype.type(source[index[i], j]) * out.dtype.type(scale)


def copy_pixel(i, j, source, index, scale, height, width, channels, down, right, mirrored, out):
    """Set out[i, j], pixel (v, h) and channel c of image i, to pixel (v - down, h - right) of its source; outside: 0.
    Mirrored, h is counted from the right."""
    line = width * channels
    v, c = j // line - down[i], j % channels
    h = j % line // channels
    h = (width - 1 - h if mirrored[i] else h) - right[i]
    if v >= 0 and v < height and h >= 0 and h < width:
        out[i, j] = out.dtype.type(source[index[i], v * line + h * channels + c]) * out.dtype.type(scale)
    else:
        out[i, j] = out.dtype.type(0)


def register(kernel, body, signature: str):
    """Make `body` the CUDA twin of a gather kernel."""
    rows = cuda_rowwise(signature, over="out")(body)

    kernel.device(rows)(lambda *args: launch_over(rows, args[-1], *args))


for kind in gather:
    register(gather[kind], copy_element, f"{_ROWS}, float64, {kind}[:, ::1]")
    register(gather_images[kind], copy_pixel, f"{_ROWS}, float64, {_MOVES}, {kind}[:, ::1]")
