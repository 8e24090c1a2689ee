"""Microbenchmarks of a processor: chains of multiply-adds, streams through memory, words passed between cores.

    multiply_add(x, factor, addend, rounds)    x <- x factor + addend, DEPTH times a round; 2 DEPTH flops an element
    read_stream, copy_stream, triad_stream     sums of a; a <- b; a <- b + factor c
    ping_pong, meet, take_turns                a cache line between two threads; a barrier; a lock

Multiply-add: each step needs the result of the step before, so each element is a chain of dependent steps. An array of
one vector register is one chain, which waits for the latency of each step. An array of several registers has as many
independent chains: steps of one chain run while another waits (instruction-level parallelism). The width of a register
follows from the processor for which the loop is compiled.

The loops release the interpreter's lock, so that threads run them at the same time. CPU only.
"""

from collections.abc import Callable
from typing import Any

import numba
import numpy as np

from hpcdl.kernels.atomics import lock, place, unlock
from hpcdl.kernels.bind import FASTMATH, LOOPS, OPTIONS, function, generate, on_cpu
from hpcdl.kernels.shared import load, sched_yield, store

DEPTH = 16  # steps between two stores; with more, fewer chains fit into the processor's window of instructions
LINE = 8  # words of a cache line
SPINS = 2000  # polls of a word before the thread yields its core


def multiply_add_source(depth: int = DEPTH) -> str:
    """Return the text of the loop with its steps unrolled: a compiler would not keep a loop of them as it is."""
    steps = "   v = v * factor + addend\n" * depth
    return (
        "def multiply_add(x, factor, addend, rounds):\n"
        " for _ in range(rounds):\n"
        "  for i in range(x.size):\n"
        "   j = np.uintp(i)\n"  # never negative, so that even an array of one register is not left to a scalar loop
        f"   v = x[j]\n{steps}   x[j] = v\n"
    )


def multiply_add(depth: int = DEPTH) -> Any:
    """Return the loop, compiled at its first call for the processor that NUMBA_CPU_NAME names.

    Not cached: the cache's key does not contain Numba's setting for vectorization.
    """
    space = {"np": np}
    exec(multiply_add_source(depth), space)
    return numba.njit(fastmath={"contract"}, **OPTIONS)(space["multiply_add"])


def stream(body: Callable) -> Callable:
    """Decorator: a loop over arrays, compiled with the flags of kernels and cached."""
    loop = generate("block", LOOPS["block"], body, body=function(body))
    return numba.njit(cache=True, fastmath=FASTMATH, **OPTIONS)(loop)


@stream
def read_stream(a, rounds):
    """Return the sum of a, in two chains, so that no load waits for an addition; reads b bytes an element."""
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
    """a <- b; reads b bytes an element and writes b."""
    for _ in range(rounds):
        for i in range(a.size):
            a[np.uintp(i)] = b[np.uintp(i)]


@stream
def triad_stream(a, b, c, factor, rounds):
    """a <- b + factor c; reads 2 b bytes an element and writes b."""
    for _ in range(rounds):
        for i in range(a.size):
            a[np.uintp(i)] = b[np.uintp(i)] + factor * c[np.uintp(i)]


@on_cpu
def ping_pong(words, thread, rounds):
    """Threads 0 and 1 increment one word in turn: its cache line goes to the other core 2 * rounds times."""
    for i in range(rounds):
        polls = 0
        while load(place(words, 0)) != 2 * i + thread:
            polls += 1
            if polls % SPINS == 0:
                sched_yield()
        store(place(words, 0), 2 * i + thread + 1)


@on_cpu
def meet(words, thread, threads, rounds, spins):
    """Run `rounds` barriers: each thread increments its own word and waits until the words of all are as large."""
    for i in range(1, rounds + 1):
        store(place(words, LINE * thread), i)
        for other in range(threads):
            polls = 0
            while load(place(words, LINE * other)) < i:
                polls += 1
                if polls % spins == 0:
                    sched_yield()


@on_cpu
def take_turns(words, rounds, spins):
    """Take the lock, increment the word beside it, release the lock; `rounds` times."""
    for _ in range(rounds):
        lock(place(words, 0), spins)
        words[LINE] += 1
        unlock(place(words, 0))
