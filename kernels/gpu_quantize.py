"""CUDA twins of quantize.py: a block of threads for each block of values."""

import math

import numpy as np

from hpcdl.kernels import quantize
from hpcdl.kernels.gpu import THREADS, block_sum, cuda, cuda_kernel, group_max
from hpcdl.kernels.quantize import not_below


@cuda_kernel("T[::1], float32[::1], int64, int64")
def block_scales(x, scales, size, mean):
    """See `scales_of`."""
    for b in range(cuda.blockIdx.x, scales.size, cuda.gridDim.x):
        start, total, top = b * size, 0.0, 0.0
        stop = start + size if start + size < x.size else x.size
        for i in range(start + cuda.threadIdx.x, stop, THREADS):
            v = abs(float(x[i]))
            total += v
            if not v <= top:
                top = v if v == v else math.inf
        total, top = block_sum(total), group_max(top, THREADS)
        if cuda.threadIdx.x == 0:
            scales[b] = np.float32(total / (stop - start)) if mean else not_below(top)


@quantize.scales_of.device(block_scales)
def scales_of(x, scales, size, mean):
    block_scales(x.dtype, scales.size, x, scales, size, mean)
