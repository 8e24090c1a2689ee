"""Small matrix products whose results stay in registers: 8 rows by 64 bytes of columns, for kernels on the CPU.

    C[r, j] = sum over k of A[r, k] B[k, j]         r = 0 .. 7,  j = 0 .. 64 / b - 1 for elements of b bytes

            B   k  =======            a row of B: one vector register (two, where registers have 32 bytes)
    A   k
        |      C 8 =======            an element of A, broadcast, times the row, is added to one of 8 registers
      8 |        8 =======

For each k: one load of a row, 8 broadcasts, 8 multiply-adds. A BLAS packs its operands first, which pays for large
products only. Elements of A may have any two strides, so that A or its transpose serves; rows of B and C are
contiguous. No bounds are checked. (Goto and van de Geijn, "Anatomy of high-performance matrix multiplication", 2008)"""

from typing import Any

from numba import types
from numba.core import cgutils
from numba.core.cgutils import ir
from numba.extending import intrinsic

ROWS, BYTES = 8, 64  # of a tile of C
INDEX = ir.IntType(64)


def register_tile(add: bool) -> Any:
    """Return the function of a tile, for compiled code; add: True if the product is added to C."""

    @intrinsic
    def tile(
        typing: Any,
        a: Any,
        a_at: Any,
        a_row: Any,
        a_k: Any,
        b: Any,
        b_at: Any,
        b_k: Any,
        c: Any,
        c_at: Any,
        c_row: Any,
        count: Any,
    ) -> Any:
        n = types.intp
        return types.void(a, n, n, n, b, n, n, c, n, n, n), generate

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        (a, b, c), count = (address(context, builder, signature, args, i) for i in (0, 4, 7)), args[10]
        a_row, a_k, b_k, c_row = args[2], args[3], args[6], args[9]
        element = context.get_value_type(signature.args[0].dtype)
        size = context.get_abi_sizeof(element)
        width = BYTES if "+avx512f" in context.codegen().magic_tuple()[2].split(",") else BYTES // 2
        vector = ir.VectorType(element, width // size)
        for first in range(0, BYTES // size, vector.count):
            totals = [cgutils.alloca_once(builder, vector) for _ in range(ROWS)]  # LLVM makes registers of them
            for total in totals:
                builder.store(ir.Constant(vector, None), total)
            with cgutils.for_range(builder, count) as loop:
                row = builder.gep(b, [builder.add(builder.mul(loop.index, b_k), INDEX(first))])
                row = builder.load(builder.bitcast(row, vector.as_pointer()), align=size)
                column = builder.gep(a, [builder.mul(loop.index, a_k)])
                for r, total in enumerate(totals):
                    factor = builder.load(builder.gep(column, [builder.mul(INDEX(r), a_row)]))
                    product = builder.fmul(broadcast(builder, factor, vector), row, flags=("contract",))
                    builder.store(builder.fadd(product, builder.load(total), flags=("contract",)), total)
            for r, total in enumerate(totals):
                place = builder.gep(c, [builder.add(builder.mul(INDEX(r), c_row), INDEX(first))])
                place, result = builder.bitcast(place, vector.as_pointer()), builder.load(total)
                if add:
                    result = builder.fadd(builder.load(place, align=size), result)
                builder.store(result, place, align=size)
        return context.get_dummy_value()

    return tile


def address(context: Any, builder: Any, signature: Any, args: Any, i: int) -> Any:
    """Return the address of element args[i + 1], counted from its first, of the array args[i]."""
    return builder.gep(context.make_array(signature.args[i])(context, builder, args[i]).data, [args[i + 1]])


def broadcast(builder: Any, number: Any, vector: Any) -> Any:
    """Return a vector of which each element is this number."""
    nothing, zero = ir.Constant(vector, ir.Undefined), ir.IntType(32)(0)
    first = builder.insert_element(nothing, number, zero)
    return builder.shuffle_vector(first, nothing, ir.Constant(ir.VectorType(ir.IntType(32), vector.count), None))


write_tile, add_tile = register_tile(False), register_tile(True)
