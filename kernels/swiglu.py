"""SwiGLU: the product of one half of z with silu of the other half (Shazeer, "GLU variants improve transformer", 2020).

    forward     z = [g, v]        s = 1 / (1 + exp(-g))        u = g s v                silu(g) = g s
    backward    dg = du v s (1 + g (1 - s))        dv = du g s        dz = [dg, dv]

u and du are (rows, n), z and dz (rows, 2 n): the gate g side by side with v. NaN stays NaN. Bytes moved per element of
u of b bytes: forward 3b, backward 5b."""

from hpcdl.kernels.bind import rowwise
from hpcdl.kernels.elementary import exp


@rowwise("T[:, ::1], T[:, ::1]")
def swiglu(i, j, u, z):
    """u <- silu(g) v, for z = [g, v]."""
    one, g = u.dtype.type(1), z[i, j]
    u[i, j] = g / (one + exp(-g)) * z[i, j + u.shape[1]]


@rowwise("T[:, ::1], T[:, ::1], T[:, ::1]")
def swiglu_backward(i, j, du, z, dz):
    """dz <- the gradient by z, from du, the gradient by u."""
    one, g, v, n = du.dtype.type(1), z[i, j], z[i, j + du.shape[1]], du.shape[1]
    s = one / (one + exp(-g))
    dz[i, j] = du[i, j] * v * s * (one + g * (one - s))
    dz[i, j + n] = du[i, j] * (g * s)
