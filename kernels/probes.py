"""Loops that measure a processor: multiplications in chains, streams through memory, words that pass between cores.

    multiply_add(x, factor, addend, rounds)    x <- x factor + addend, DEPTH times a round; 2 DEPTH flops an element
    read_stream, copy_stream, triad_stream     sums of a; a <- b; a <- b + factor c
    ping_pong, meet, take_turns                a cache line between two threads; a barrier; a lock

Multiply-add: what a step needs is what the step before it has made, so the elements are chains that know nothing of
each other. An array of one vector register is one chain, which waits for the latency of each step; an array of several
has as many chains, with which the steps of one fill the time that those of another wait (instruction-level
parallelism). The Python is the same for all processors: what it is compiled for says how wide a register is.

The loops release the interpreter's lock, so that threads run them at the same time. CPU only.
"""

from collections.abc import Callable
from typing import Any

import numba
import numpy as np

from hpcdl.kernels.atomics import lock, place, unlock
from hpcdl.kernels.bind import FASTMATH, LOOPS, OPTIONS, function, generate, on_cpu
from hpcdl.kernels.shared import load, sched_yield, store

DEPTH = 16  # steps between two stores; with more, fewer chains fit into the instructions that a processor looks ahead
LINE = 8  # words of a cache line
SPINS = 2000  # looks at a word until the core is offered to others


def multiply_add_source(depth: int = DEPTH) -> str:
    """The text of the loop, its steps written one below the other: a compiler would cut a loop of them otherwise."""
    steps = "   v = v * factor + addend\n" * depth
    return (
        "def multiply_add(x, factor, addend, rounds):\n"
        " for _ in range(rounds):\n"
        "  for i in range(x.size):\n"
        "   j = np.uintp(i)\n"  # never negative, so that even an array of one register is not left to a scalar loop
        f"   v = x[j]\n{steps}   x[j] = v\n"
    )


def multiply_add(depth: int = DEPTH) -> Any:
    """The loop, to be compiled for the types it is called with, for the processor that NUMBA_CPU_NAME names.

    Not cached: the cache does not know whether Numba was told to vectorize.
    """
    space = {"np": np}
    exec(multiply_add_source(depth), space)
    return numba.njit(fastmath={"contract"}, **OPTIONS)(space["multiply_add"])


def stream(body: Callable) -> Callable:
    """Decorator: a loop over arrays, compiled and cached as kernels are."""
    loop = generate("block", LOOPS["block"], body, body=function(body))
    return numba.njit(cache=True, fastmath=FASTMATH, **OPTIONS)(loop)


@stream
def read_stream(a, rounds):
    """The sum of a, in both halves at once, so that additions keep no load waiting; reads b bytes an element."""
    total, half = a[0] - a[0], a.size // 2
    for _ in range(rounds):
        left, right = total - total, total - total
        for i in range(half):
            left += a[np.uintp(i)]
            right += a[np.uintp(i + half)]
        total = left + right
    return total


@stream
def copy_stream(a, b, rounds):
    """a <- b; reads b bytes an element, and writes as many."""
    for _ in range(rounds):
        for i in range(a.size):
            a[np.uintp(i)] = b[np.uintp(i)]


@stream
def triad_stream(a, b, c, factor, rounds):
    """a <- b + factor c; reads 2 b bytes an element, and writes b."""
    for _ in range(rounds):
        for i in range(a.size):
            a[np.uintp(i)] = b[np.uintp(i)] + factor * c[np.uintp(i)]


@on_cpu
def ping_pong(words, thread, rounds):
    """Two threads, 0 and 1, raise one word in turn: 2 rounds times a cache line goes to the other core."""
    for i in range(rounds):
        looks = 0
        while load(place(words, 0)) != 2 * i + thread:
            looks += 1
            if looks % SPINS == 0:
                sched_yield()
        store(place(words, 0), 2 * i + thread + 1)


@on_cpu
def meet(words, thread, threads, rounds, spins):
    """So many barriers: each thread raises the word on its own line, and waits until those of all have come as far."""
    for i in range(1, rounds + 1):
        store(place(words, LINE * thread), i)
        for other in range(threads):
            looks = 0
            while load(place(words, LINE * other)) < i:
                looks += 1
                if looks % spins == 0:
                    sched_yield()


@on_cpu
def take_turns(words, rounds, spins):
    """Take the lock, add one to the word beside it, give the lock back."""
    for _ in range(rounds):
        lock(place(words, 0), spins)
        words[LINE] += 1
        unlock(place(words, 0))
