"""All-reduce in memory that the ranks of a node share: flags, sums over all ranks' vectors, and the waiting between.

Each rank owns a line of 64 bytes that all others can read: a flag, which only counts upwards, and the place of the
vector that the rank offers. A rank posts by raising its flag (a release store: whoever sees the flag sees what was
written before it) and waits until the flags of all have come as far (acquire loads). One post and one wait are a
barrier, without a message and without a lock.

    word of a line    0 flag    1 window, or 0: the rank's own scratch block    2 offset in bytes    3 pieces complete
                      4, 5 what the rank calls: length, type and operation, of a sync with an even or an odd number

Who waits for all flags compares what all call. Where calls differ, every rank sees it at the same sync, the first one,
before it reads another's vector or writes to it. A rank may be one sync ahead, so there are two such words.

Two ways, by length; n bytes in the vector, N ranks:

                        syncs    read by a rank    written by a rank
    n <= SMALL          1        n + N n           2 n      copy in, then every rank adds all vectors
    each block of it    2        n                 n        every rank adds its 1/N of all and writes it to all
    not in a window              + 2 n             + 2 n    to the rank's scratch block first, and back

The second way's N n reads and N n writes, all ranks together, are the least that leaves the sum in all vectors; it runs
against memory bandwidth, or in a cache against moving lines between cores. An element is added by one rank, or by all
in the same order, so all get the same bits.

A short vector goes to one of two buffers in turn: a rank that posts its sync c is done with sync c - 1, so after the
wait of c nobody reads the buffer of c - 1 any more.
"""

import numpy as np
from numba import carray, types
from numba.extending import intrinsic

from hpcdl.kernels.bind import block, function

SUM, MAX, MIN, MEAN = range(4)  # the two lowest bits of what a rank calls; a mean is a sum that its caller divides
LINE = 64  # bytes of a cache line: two ranks' flags never share one
SMALL = 8 << 10  # bytes up to which every rank adds all vectors
BLOCK = 1 << 20  # bytes of a rank's scratch block: what is added between two syncs where a vector is in no window
TILE = 8 << 10  # bytes that stay in the first-level cache from the adding to the writing
SCRATCH = LINE + 2 * SMALL  # where the scratch block begins in the memory of a rank
BYTES = SCRATCH + BLOCK  # of that memory

# A rank's state: its flag, the phase and block it stands in, bytes written, pieces of its leader known to be complete,
# its number, looks at flags between two offers of its core to other processes (1 where ranks outnumber cores), the
# nanoseconds for which it has waited for flags, what it calls, how many looks are yet in naps, two words for the clock.
COUNT, PHASE, START, SIZE, WRITTEN, PUBLISHED, RANK, SPINS, WAITED, CALL, NAPS, CLOCK = range(12)
WORDS = CLOCK + 2
NAP = 20  # microseconds
NAPPING = 1000  # looks in naps, when the core was taken away
TAKEN = 500_000  # nanoseconds between two offers of the core: it was taken away
MONOTONIC = 1  # CLOCK_MONOTONIC of Linux
BEGIN, OFFERED, ADDED = range(3)  # phases
WAITING, DONE, DIFFER = range(3)  # what a wait for all flags ends with


@intrinsic
def load(context, address):
    """The int64 at this address; what its writer wrote before it is visible afterwards."""

    def generate(context, builder, signature, arguments):
        pointer = builder.inttoptr(arguments[0], context.get_value_type(types.int64).as_pointer())
        return builder.load_atomic(pointer, "acquire", 8)

    return types.int64(types.int64), generate


@intrinsic
def store(context, address, value):
    """Write an int64 to this address, after all that was written before."""

    def generate(context, builder, signature, arguments):
        pointer = builder.inttoptr(arguments[0], arguments[1].type.as_pointer())
        builder.store_atomic(arguments[1], pointer, "release", 8)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


@intrinsic
def pointer(context, address, like):
    """The address as a pointer to elements of the type of the array `like`."""

    def generate(context, builder, signature, arguments):
        return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))

    return types.CPointer(like.dtype)(types.int64, like), generate


usleep = types.ExternalFunction("usleep", types.int32(types.uint32))
sched_yield = types.ExternalFunction("sched_yield", types.int32())
clock_gettime = types.ExternalFunction("clock_gettime", types.int32(types.int32, types.int64))


@function
def at(address, count, like):
    """The array of `count` elements, of the type of `like`, that begins at this address."""
    return carray(pointer(address, like), (count,))


@function
def copy(to, values):
    for i in range(to.size):
        to[i] = values[i]


@function
def combine(into, values, op):
    """into <- into + values, or the larger or the smaller of the two; a NaN on either side stays a NaN."""
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
    """The address of the memory of that rank: its line, short buffers and scratch block."""
    return places[0, 1 + rank]


@function
def ranks_of(places):
    """How many ranks share the memory."""
    return places.shape[1] - 1


@function
def now(state):
    """Nanoseconds on a clock that only goes forward."""
    clock_gettime(MONOTONIC, np.int64(state.ctypes.data) + 8 * CLOCK)
    return 1_000_000_000 * state[CLOCK] + state[CLOCK + 1]


@function
def called(line, count):
    """The address of the word that says what a rank calls in the sync of this number."""
    return line + 32 + 8 * (count % 2)


@function
def let_others(state, since):
    """Let others on the core, after the offer at `since` (ns); returns the time of this one.

    In naps for a while, where others have taken it: to yield does nothing for another session where the kernel groups
    processes by them, and who has slept is the first to come on.
    """
    if state[NAPS] > 0:
        state[NAPS] -= 1
        usleep(NAP)
    else:
        sched_yield()
    time = now(state)
    if time - since > TAKEN:
        state[NAPS] = NAPPING
    return time


@function
def come(places, state, patience):
    """Wait until the flags of all have come as far as this rank's: DONE; DIFFER where one calls something else.

    WAITING where it takes more than `patience` looks.
    """
    count, spins, looks = state[COUNT], state[SPINS], 0
    start = since = 0
    same = True
    for rank in range(ranks_of(places)):
        line = peer(places, rank)
        while load(line) < count:
            if looks == 0:
                start = since = now(state)
            looks += 1
            if looks >= patience:
                state[WAITED] += now(state) - start
                return WAITING
            if looks % spins == 0:
                since = let_others(state, since)
        same = same and load(called(line, count)) == state[CALL]
    if looks:
        state[WAITED] += now(state) - start
    return DONE if same else DIFFER


@function
def post(places, state):
    """Raise this rank's flag, and say what it calls."""
    state[COUNT] += 1
    line = peer(places, state[RANK])
    store(called(line, state[COUNT]), state[CALL])
    store(line, state[COUNT])


@function
def share(size, lines_of, parts, part):
    """Elements [first, last) of `size` that belong to a part: whole cache lines of `lines_of` elements each."""
    lines = (size + lines_of - 1) // lines_of
    each = (lines + parts - 1) // parts * lines_of
    return min(part * each, size), min((part + 1) * each, size)


@function
def offer(places, state, address, size):
    """Write to this rank's line where its `size` bytes at this address lie; False when they are in no window."""
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
    """The address, in this process, of what that rank offers."""
    line = peer(places, rank)
    return places[load(line + 8), 1 + rank] + load(line + 16)


@function
def add_all(vector, places, op, buffer):
    """vector <- all ranks' short vectors combined, in the order of the ranks."""
    copy(vector, at(peer(places, 0) + buffer, vector.size, vector))
    for rank in range(1, ranks_of(places)):
        combine(vector, at(peer(places, rank) + buffer, vector.size, vector), op)


@function
def add_share(size, like, places, rank, op):
    """Combine this rank's share of all ranks' blocks of `size` elements, and write it to all; bytes written."""
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
def all_offer(places):
    """Whether the vectors of all ranks lie in windows."""
    missing = 0
    for rank in range(ranks_of(places)):
        missing += load(peer(places, rank) + 8) == 0
    return missing == 0


@function
def offer_block(vector, start, places, state):
    """Offer the vector from `start` on, or a copy of its next block; raise the flag."""
    item, rest = vector.itemsize, vector.size - start
    address = np.int64(vector.ctypes.data) + start * item
    if not offer(places, state, address, rest * item):
        size = min(BLOCK // item, rest)
        copy(at(peer(places, state[RANK]) + SCRATCH, size, vector), vector[start : start + size])
        state[WRITTEN] += size * item
    post(places, state)


@function
def block_size(vector, start, places):
    """Elements between two syncs, once all have offered: all that is left when nobody needs a scratch block."""
    rest = vector.size - start
    return rest if all_offer(places) else min(BLOCK // vector.itemsize, rest)


@block("T[::1], int64[:, ::1], int64[::1], int64, int64")
def all_reduce(vector, places, state, call, patience):
    """Take the all-reduce of `vector` as far as the others have come; DONE when it is done, DIFFER if calls differ.

    Where they differ, it is to begin anew (PHASE, START).

    places (1 + windows, 1 + ranks): from column 1 on, in row 0 the addresses of all ranks' own memory and in the others
    those of a window's parts, whose bytes are in column 0. state: where this rank stands. call: length, type and
    operation in one number, the operation in its two lowest bits. patience: looks at flags before giving up for now,
    0 to look just once.
    """
    item, op = vector.itemsize, call & 3
    state[CALL] = call
    if vector.size * item <= SMALL:
        if state[PHASE] == BEGIN:
            buffer = LINE + SMALL * (state[COUNT] % 2)
            copy(at(peer(places, state[RANK]) + buffer, vector.size, vector), vector)
            state[WRITTEN] += vector.size * item
            post(places, state)
            state[PHASE] = OFFERED
        found = come(places, state, patience)
        if found == DONE:
            add_all(vector, places, op, LINE + SMALL * ((state[COUNT] - 1) % 2))
            state[PHASE] = BEGIN
        return found
    while state[START] < vector.size:
        start = state[START]
        if state[PHASE] == BEGIN:
            offer_block(vector, start, places, state)
            state[PHASE] = OFFERED
        if state[PHASE] == OFFERED:
            found = come(places, state, patience)
            if found != DONE:
                return found
            state[SIZE] = block_size(vector, start, places)  # after the next sync others may offer something else
            state[WRITTEN] += add_share(state[SIZE], vector, places, state[RANK], op)
            post(places, state)
            state[PHASE] = ADDED
        if come(places, state, patience) == WAITING:
            return WAITING
        size = state[SIZE]
        if load(peer(places, state[RANK]) + 8) == 0:
            copy(vector[start : start + size], at(peer(places, state[RANK]) + SCRATCH, size, vector))
            state[WRITTEN] += size * item
        state[PHASE] = BEGIN
        state[START] += size
    state[START] = 0
    return DONE


# What a hierarchical all-reduce needs (hpcdl/comm/allreduce/hierarchical.py): rank 0 of a node leads.


@block("T[::1], int64, int64[:, ::1], int64[::1]")
def offer_from(vector, start, places, state):
    """Offer the vector from element `start` on, or a copy of its next block, and raise the flag."""
    offer_block(vector, start, places, state)


@block("T[::1], int64, int64[:, ::1]")
def offered_size(vector, start, places):
    """Elements from `start` on that all ranks have offered."""
    return block_size(vector, start, places)


@block("T[::1], int64, int64, int64[:, ::1], int64[::1], int64")
def add_to_leader(vector, first, size, places, state, op):
    """Combine this rank's share of `size` elements into the leader's vector, and raise the flag.

    first: where they begin in what is offered. All ranks but the leader add, while the leader exchanges with others.
    """
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
    """into <- the leader's values, from `first` on in what it offers."""
    copy(into, at(offered(places, 0) + first * into.itemsize, into.size, into))
    state[WRITTEN] += into.nbytes


@block("T[:, ::1], T[::1], int64")
def arrived(places, state, patience):
    """Whether the flags of all have come as far as this rank's, as `come` has it."""
    return come(places, state, patience)


@block("T[:, ::1], T[::1]")
def raise_flag(places, state):
    """Raise this rank's flag."""
    post(places, state)


@block("T[:, ::1], T[::1]")
def in_window(places, state):
    """Whether what this rank offers lies in a window."""
    return load(peer(places, state[RANK]) + 8) > 0


@block("T[:, ::1], T[::1]")
def publish(places, state):
    """The leader: one more piece of its vector is complete."""
    state[PUBLISHED] += 1
    store(peer(places, 0) + 24, state[PUBLISHED])


@block("T[:, ::1], int64")
def published(places, count):
    """Whether so many pieces of the leader's vector are complete."""
    return load(peer(places, 0) + 24) >= count


OVER_NODES = [offer_from, offered_size, add_to_leader, copy_from_leader]
FLAGS = [arrived, raise_flag, in_window, publish, published]
