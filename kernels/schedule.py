"""A recorded schedule, executed in compiled code: messages by MPI's own functions, additions, and the waits between.

A schedule is a table of int64 with a row for each action (hpcdl/comm/compiled_schedule.py records it):

    RECEIVE, SEND, SYNCHRONOUS    start a message: rank, tag, place, bytes; its request goes to the row's slot
    WAIT                          until the request of the slot is complete
    COMBINE                       place <- place + other place, or their maximum or minimum: bytes of both

A place is an offset in the vector or, below zero, in the scratch memory: offset - 1 - place. MPI's functions are called
by their addresses. All their arguments are passed as 64-bit numbers: handles are pointers in some libraries, and int in
others, which read the lower half (in the calling conventions of x86-64, AArch64 and POWER, little-endian)."""

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from hpcdl.kernels.bind import block, function
from hpcdl.kernels.shared import CLOCK, DONE, NAPS, SLICED, SPINS, WAITED, WAITING, at, combine, now, yield_core

RECEIVE, SEND, SYNCHRONOUS, WAIT, COMBINE = range(5)  # actions
ACTION, OTHER, TAG, PLACE, BYTES, SLOT, VALUES = range(7)  # columns of a row
COLUMNS = 8  # a cache line
FAILED = 3  # an MPI function has returned an error code, which is in state[ERROR]

# Positions in the state after those of kernels/shared.py that `yield_core` and `now` use: ROW the next row; ERROR and
# FLAG what MPI returned; COMM and BYTE the handles of the communicator and of MPI_BYTE; REQUESTS the address of the
# slots, of REQUEST bytes each; SCRATCH the address of the scratch memory; LANE the first tag of the operation; TEST the
# address of MPI_Test; FUNCTIONS those of the functions that start messages, in the order of the actions.
ROW, ERROR, FLAG, COMM, BYTE, REQUESTS, REQUEST, SCRATCH, LANE, TEST, FUNCTIONS = range(16, 27)
STATUS = 32  # where MPI writes a status: 8 words
WORDS = 40
assert max(SPINS, WAITED, NAPS, SLICED, CLOCK + 1) < ROW


def calling(count):
    """Return the intrinsic that calls the function at an address with `count` 64-bit numbers; it returns int32."""

    def generate(context, builder, signature, arguments):
        kind = ir.FunctionType(ir.IntType(32), [ir.IntType(64)] * count)
        return builder.call(builder.inttoptr(arguments[0], kind.as_pointer()), arguments[1:])

    return generate


@intrinsic
def call_with_3(context, address, a, b, c):
    """Call the function at this address with 3 numbers."""
    return types.int32(*[types.int64] * 4), calling(3)


@intrinsic
def call_with_7(context, address, a, b, c, d, e, f, g):
    """Call the function at this address with 7 numbers."""
    return types.int32(*[types.int64] * 8), calling(7)


@function
def address_of(place, vector, state):
    """Return the address of a place."""
    return np.int64(vector.ctypes.data) + place if place >= 0 else state[SCRATCH] - 1 - place


@function
def start(row, vector, state):
    """Start the message of a row; return MPI's error code."""
    return call_with_7(
        state[FUNCTIONS + row[ACTION]],
        address_of(row[PLACE], vector, state),
        row[BYTES],
        state[BYTE],
        row[OTHER],
        state[LANE] + row[TAG],
        state[COMM],
        state[REQUESTS] + row[SLOT] * state[REQUEST],
    )


@function
def await_request(slot, state, patience):
    """Poll the request of this slot until it is complete: DONE, or FAILED. Return WAITING after `patience` yields."""
    request, words = state[REQUESTS] + slot * state[REQUEST], np.int64(state.ctypes.data)
    polls = yields = began = 0
    while True:
        error = call_with_3(state[TEST], request, words + 8 * FLAG, words + 8 * STATUS)
        if error or state[FLAG] & 0xFFFFFFFF:
            if began:
                state[WAITED] += now(state) - began
            state[ERROR] = error
            return FAILED if error else DONE
        if not began:
            began = now(state)
        polls += 1
        if polls >= state[SPINS]:
            if yields == patience:
                state[WAITED] += now(state) - began
                return WAITING
            yield_core(state)
            polls, yields = 0, yields + 1


@block("T[::1], int64[:, ::1], int64[::1], int64, int64")
def run(vector, rows, state, op, patience):
    """Execute the rows from state[ROW] on; return DONE, FAILED, or WAITING after `patience` yields in one wait.
    op: SUM, MAX or MIN of kernels/shared.py, for COMBINE."""
    while state[ROW] < len(rows):
        row = rows[state[ROW]]
        action = row[ACTION]
        if action == WAIT:
            found = await_request(row[SLOT], state, patience)
            if found != DONE:
                return found
        elif action == COMBINE:
            count = row[BYTES] // vector.itemsize
            into, values = address_of(row[PLACE], vector, state), address_of(row[VALUES], vector, state)
            combine(at(into, count, vector), at(values, count, vector), op)
        else:
            error = start(row, vector, state)
            if error:
                state[ERROR] = error
                return FAILED
        state[ROW] += 1
    state[ROW] = 0
    return DONE
