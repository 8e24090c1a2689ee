"""All-reduce in shared memory of the ranks of a node: flags, waits, and sums over all ranks' vectors.

Each rank owns a line of 64 bytes that all ranks can read: a flag, which only increases, and the position of the vector
that the rank offers. A rank posts by incrementing its flag (a release store, so readers of the flag see all earlier
writes), and waits until all flags are as large (acquire loads). A post and a wait are a sync: a barrier without a lock.

    word of a line    0 flag    1 window, or 0: the rank's own scratch block    2 offset in bytes    3 pieces complete
                      4, 5 the rank's call (length, type and operation) at syncs with an even or an odd number

A rank that waits for the flags compares the calls of all ranks. If they differ, every rank detects it at the same sync,
the first one, before it reads or writes another rank's vector. A rank may be one sync ahead, so there are two words.

Two algorithms, by length; n bytes in the vector, N ranks:

                        syncs    read by a rank    written by a rank
    n <= SMALL          1        n + N n           2 n      copy in, then every rank adds all vectors
    larger, by blocks   2        n                 n        every rank adds its 1/N of all and writes it to all
    not in a window              + 2 n             + 2 n    copy to the rank's scratch block first, and back

The N n reads and N n writes of the second algorithm are the minimum. Memory bandwidth bounds it, or in a cache the
movement of lines between cores. All ranks get the same bits: one rank adds an element, or all do in the same order.
Short vectors use two buffers in turn: after the wait of sync c, all ranks have read the buffer of c - 1."""

import numpy as np
from numba import carray, types
from numba.extending import intrinsic

from hpcdl.kernels.bind import block, function

SUM, MAX, MIN, MEAN = range(4)  # the two lowest bits of a call; for a mean, the caller divides the sum
LINE = 64  # bytes of a cache line: two ranks' flags never share one
SMALL = 4 << 10  # bytes up to which every rank adds all vectors
BLOCK = 1 << 20  # bytes of a rank's scratch block: added between two syncs for a vector that is in no window
TILE = 8 << 10  # bytes that stay in the first-level cache between addition and writing
SCRATCH = LINE + 2 * SMALL  # where the scratch block begins in the memory of a rank
BYTES = SCRATCH + BLOCK  # of the memory of a rank

# Positions in a rank's state: COUNT its flag; PHASE, START, SIZE the phase, and the block in progress; WRITTEN bytes;
# PUBLISHED pieces of the leader that are complete; RANK; SPINS polls before it yields its core, up to MOST_SPINS;
# WAITED nanoseconds of waiting; CALL; NAPS yields left that sleep instead; SLICED 1 if the kernel gives short time
# slices (hpcdl/time_slice.py); CLOCK two words of the clock.
COUNT, PHASE, START, SIZE, WRITTEN, PUBLISHED, RANK, SPINS, MOST_SPINS, WAITED, CALL, NAPS, SLICED, CLOCK = range(14)
WORDS = CLOCK + 2
SHARED = 1_000  # nanoseconds of a yield from which on another process has run: a yield to nobody takes some 500
NAP = 20  # microseconds
NAPPING = 1000  # yields that sleep instead, after another process has taken the core
TAKEN = 500_000  # nanoseconds of a yield from which on another process has taken the core
MONOTONIC = 1  # CLOCK_MONOTONIC of Linux
BEGIN, OFFERED, ADDED = range(3)  # phases
WAITING, DONE, DIFFER = range(3)  # results of a wait for all flags


@intrinsic
def load(context, address):
    """Return the int64 at this address, by an acquire load: what its writer wrote before is visible afterwards."""

    def generate(context, builder, signature, arguments):
        pointer = builder.inttoptr(arguments[0], context.get_value_type(types.int64).as_pointer())
        return builder.load_atomic(pointer, "acquire", 8)

    return types.int64(types.int64), generate


@intrinsic
def store(context, address, value):
    """Write an int64 to this address, by a release store: after all earlier writes."""

    def generate(context, builder, signature, arguments):
        pointer = builder.inttoptr(arguments[0], arguments[1].type.as_pointer())
        builder.store_atomic(arguments[1], pointer, "release", 8)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


@intrinsic
def pointer(context, address, like):
    """Return the address as a pointer to elements of the type of the array `like`."""

    def generate(context, builder, signature, arguments):
        return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))

    return types.CPointer(like.dtype)(types.int64, like), generate


usleep = types.ExternalFunction("usleep", types.int32(types.uint32))
sched_yield = types.ExternalFunction("sched_yield", types.int32())
clock_gettime = types.ExternalFunction("clock_gettime", types.int32(types.int32, types.int64))


@function
def at(address, count, like):
    """Return the array of `count` elements of the type of `like` at this address."""
    return carray(pointer(address, like), (count,))


@function
def copy(to, values):
    for i in range(to.size):
        to[i] = values[i]


@function
def combine(into, values, op):
    """into <- into + values, or their maximum or minimum by `op`; NaN if either is NaN."""
    if op in (SUM, MEAN):
        for i in range(into.size):
            into[i] += values[i]
    elif op == MAX:
        for i in range(into.size):
            if not values[i] <= into[i] and into[i] == into[i]:
                into[i] = values[i]
    else:
        for i in range(into.size):
            if not values[i] >= into[i] and into[i] == into[i]:
                into[i] = values[i]


@function
def peer(places, rank):
    """Return the address of a rank's memory: its line, short buffers and scratch block."""
    return places[0, 1 + rank]


@function
def ranks_of(places):
    """Return how many ranks share the memory."""
    return places.shape[1] - 1


@function
def now(state):
    """Return nanoseconds of the monotonic clock."""
    clock_gettime(MONOTONIC, np.int64(state.ctypes.data) + 8 * CLOCK)
    return 1_000_000_000 * state[CLOCK] + state[CLOCK + 1]


@function
def call_word(line, count):
    """Return the address of the word for a rank's call at sync number `count`."""
    return line + 32 + 8 * (count % 2)


@function
def yield_core(state):
    """Yield the core, and set how many polls may pass before the next yield: 1 if another process has run meanwhile,
    which may be the awaited one; otherwise twice as many as before. Without short slices, sleep for a while after
    another process has taken the core: Linux's autogroups ignore a yield to a process of another session, and a process
    that has slept gets a core first."""
    before = now(state)
    if state[NAPS] > 0:
        state[NAPS] -= 1
        usleep(NAP)
    else:
        sched_yield()
    taken = now(state) - before
    if taken > TAKEN and not state[SLICED]:
        state[NAPS] = NAPPING
    state[SPINS] = 1 if taken > SHARED else min(2 * state[SPINS], state[MOST_SPINS])


@function
def await_flags(places, state, patience):
    """Wait until all flags are as large as this rank's; return DONE, or DIFFER if the ranks' calls differ.
    Return WAITING after `patience` yields; for 0, after a single poll."""
    count = state[COUNT]
    polls = yields = start = 0
    same = True
    for rank in range(ranks_of(places)):
        line = peer(places, rank)
        while load(line) < count:
            if not start:
                start = now(state)
            polls += 1
            if patience == 0 or polls >= state[SPINS]:
                if yields == patience:
                    state[WAITED] += now(state) - start
                    return WAITING
                yield_core(state)
                polls, yields = 0, yields + 1
        same = same and load(call_word(line, count)) == state[CALL]
    if start:
        state[WAITED] += now(state) - start
    return DONE if same else DIFFER


@function
def post(places, state):
    """Write this rank's call to its line, then increment its flag."""
    state[COUNT] += 1
    line = peer(places, state[RANK])
    store(call_word(line, state[COUNT]), state[CALL])
    store(line, state[COUNT])


@function
def share(size, lines_of, parts, part):
    """Return (first, end) of a part's share of `size` elements, in whole cache lines of `lines_of` elements each."""
    lines = (size + lines_of - 1) // lines_of
    length = (lines + parts - 1) // parts * lines_of
    return min(part * length, size), min((part + 1) * length, size)


@function
def offer(places, state, address, size):
    """Offer by this rank's line the `size` bytes at this address; if in no window, offer scratch and return False."""
    line = peer(places, state[RANK])
    for segment in range(1, places.shape[0]):
        offset = address - places[segment, 1 + state[RANK]]
        if offset >= 0 and offset + size <= places[segment, 0]:
            store(line + 8, segment)
            store(line + 16, offset)
            return True
    store(line + 8, 0)
    store(line + 16, SCRATCH)
    return False


@function
def offered(places, rank):
    """Return the address, in this process, of the vector that a rank offers."""
    line = peer(places, rank)
    return places[load(line + 8), 1 + rank] + load(line + 16)


@function
def add_share(size, like, places, rank, op):
    """Combine this rank's share of all ranks' blocks of `size` elements and write it to all; return bytes written."""
    item, ranks = like.itemsize, ranks_of(places)
    first, last = share(size, LINE // item, ranks, rank)
    own = offered(places, rank)
    for start in range(first, last, TILE // item):
        count = min(TILE // item, last - start)
        mine = at(own + start * item, count, like)
        for step in range(1, ranks):
            other = offered(places, (rank + step) % ranks)
            combine(mine, at(other + start * item, count, like), op)
        for step in range(1, ranks):
            other = offered(places, (rank + step) % ranks)
            copy(at(other + start * item, count, like), mine)
    return (last - first) * item * (ranks - 1)


@function
def offer_block(vector, start, places, state):
    """Offer the vector from element `start` on, or, outside windows, a copy of its next block; increment the flag."""
    item, rest = vector.itemsize, vector.size - start
    address = np.int64(vector.ctypes.data) + start * item
    if not offer(places, state, address, rest * item):
        size = min(BLOCK // item, rest)
        copy(at(peer(places, state[RANK]) + SCRATCH, size, vector), vector[start : start + size])
        state[WRITTEN] += size * item
    post(places, state)


@function
def block_size(vector, start, places):
    """Return the elements of the next block, after all ranks' offers: the whole rest if all vectors are in windows."""
    rest = vector.size - start
    for rank in range(ranks_of(places)):
        if load(peer(places, rank) + 8) == 0:  # in no window
            return min(BLOCK // vector.itemsize, rest)
    return rest


@block("T[::1], int64[:, ::1], int64[::1], int64, int64")
def all_reduce(vector, places, state, call, patience):
    """Advance the all-reduce of `vector`; return DONE, WAITING for other ranks, or DIFFER if the ranks' calls differ.

    places (1 + windows, 1 + ranks): row 0 has the addresses of all ranks' memory, each other row those of a window's
    parts, both from column 1 on; column 0 the bytes of a window's part. state: this rank's; the caller resets PHASE and
    START after DIFFER. call: length, type, operation (the two lowest bits). patience: yields before WAITING, or 0."""
    item, op = vector.itemsize, call & 3
    state[CALL] = call
    if vector.size * item <= SMALL:
        if state[PHASE] == BEGIN:
            buffer = LINE + SMALL * (state[COUNT] % 2)
            copy(at(peer(places, state[RANK]) + buffer, vector.size, vector), vector)
            state[WRITTEN] += vector.size * item
            post(places, state)
            state[PHASE] = OFFERED
        status = await_flags(places, state, patience)
        if status == DONE:
            buffer = LINE + SMALL * ((state[COUNT] - 1) % 2)
            copy(vector, at(peer(places, 0) + buffer, vector.size, vector))
            for rank in range(1, ranks_of(places)):
                combine(vector, at(peer(places, rank) + buffer, vector.size, vector), op)
            state[PHASE] = BEGIN
        return status
    while state[START] < vector.size:
        start = state[START]
        if state[PHASE] == BEGIN:
            offer_block(vector, start, places, state)
            state[PHASE] = OFFERED
        if state[PHASE] == OFFERED:
            status = await_flags(places, state, patience)
            if status != DONE:
                return status
            state[SIZE] = block_size(vector, start, places)  # after the next sync other ranks may offer another vector
            state[WRITTEN] += add_share(state[SIZE], vector, places, state[RANK], op)
            post(places, state)
            state[PHASE] = ADDED
        if await_flags(places, state, patience) == WAITING:
            return WAITING
        size = state[SIZE]
        if load(peer(places, state[RANK]) + 8) == 0:
            copy(vector[start : start + size], at(peer(places, state[RANK]) + SCRATCH, size, vector))
            state[WRITTEN] += size * item
        state[PHASE] = BEGIN
        state[START] += size
    state[START] = 0
    return DONE


# Kernels of the hierarchical all-reduce (hpcdl/comm/allreduce/hierarchical.py); rank 0 of a node is the leader.
offer_from = block("T[::1], int64, int64[:, ::1], int64[::1]")(offer_block.py_func)
offered_size = block("T[::1], int64, int64[:, ::1]")(block_size.py_func)
raise_flag = block("T[:, ::1], T[::1]")(post.py_func)


@block("T[::1], int64, int64, int64[:, ::1], int64[::1], int64")
def add_to_leader(vector, first, size, places, state, op):
    """Combine this rank's share of `size` elements, from `first` on, into the leader's vector; increment the flag.
    All ranks except the leader call it; the leader communicates meanwhile."""
    item, ranks = vector.itemsize, ranks_of(places)
    low, high = share(size, LINE // item, ranks - 1, state[RANK] - 1)
    for start in range(first + low, first + high, TILE // item):
        count = min(TILE // item, first + high - start)
        total = at(offered(places, 0) + start * item, count, vector)
        for other in range(1, ranks):
            combine(total, at(offered(places, other) + start * item, count, vector), op)
    state[WRITTEN] += (high - low) * item
    post(places, state)


@block("T[::1], int64, int64[:, ::1], int64[::1]")
def copy_from_leader(into, first, places, state):
    """into <- the values from element `first` on of the vector that the leader offers."""
    copy(into, at(offered(places, 0) + first * into.itemsize, into.size, into))
    state[WRITTEN] += into.nbytes


@block("T[:, ::1], T[::1], int64")
def arrived(places, state, patience):
    """Wait for the flags of all ranks; arguments and result as for `await_flags`."""
    return await_flags(places, state, patience)


@block("T[:, ::1], T[::1]")
def in_window(places, state):
    """True if the vector that this rank offers lies in a window."""
    return load(peer(places, state[RANK]) + 8) > 0


@block("T[:, ::1], T[::1]")
def publish(places, state):
    """Publish, as the leader, that one more piece of its vector is complete."""
    state[PUBLISHED] += 1
    store(peer(places, 0) + 24, state[PUBLISHED])


@block("T[:, ::1], int64")
def published(places, count):
    """True if `count` pieces of the leader's vector are complete."""
    return load(peer(places, 0) + 24) >= count


OVER_NODES = [offer_from, offered_size, add_to_leader, copy_from_leader]
FLAGS = [arrived, raise_flag, in_window, publish, published]
