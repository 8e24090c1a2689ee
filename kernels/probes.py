"""Microbenchmarks of a processor: chains of multiply-adds, streams through memory, words passed between cores.

Multiply-add: each step needs the result of the step before, so an array of one vector register is a chain that waits
for the latency of each step. Several registers are as many independent chains: one runs while another waits
(instruction-level parallelism). Their width follows from the processor for which the loop is compiled.

The loops release the interpreter's lock, so that threads run them at the same time. CPU only."""

from collections.abc import Callable
from typing import Any

import numba
import numpy as np

from hpcdl.kernels.atomics import lock, place, unlock
from hpcdl.kernels.bind import FASTMATH, LOOPS, OPTIONS, Loop, function, generate, on_cpu
from hpcdl.kernels.shared import load, sched_yield, store

DEPTH = 16  # steps between two stores; with more, fewer chains fit into the processor's window of instructions
LINE = 8  # words of a cache line
SPINS = 2000  # polls of a word before the thread yields its core


def multiply_add_source(depth: int = DEPTH) -> str:
    """Return the source of `multiply_add` with its steps unrolled: a compiler would change a loop of them."""
    steps = "   v = v * factor + addend\n" * depth
    return (
        "def multiply_add(x, factor, addend, rounds):\n"
        " for _ in range(rounds):\n"
        "  for i in range(x.size):\n"
        "   j = np.uintp(i)\n"  # never negative, so that even an array of one register is not left to a scalar loop
        f"   v = x[j]\n{steps}   x[j] = v\n"
    )


def multiply_add(depth: int = DEPTH) -> Any:
    """Return multiply_add(x, factor, addend, rounds): x <- x factor + addend, 2 flops, `depth` times a round. Its first
    call compiles it for the processor NUMBA_CPU_NAME; uncached, as a cache key lacks Numba's vectorization setting."""
    space = {"np": np}
    exec(multiply_add_source(depth), space)
    return numba.njit(fastmath={"contract"}, **OPTIONS)(space["multiply_add"])


def stream(body: Callable) -> Callable:
    """Decorator: compile a loop over arrays with the flags of kernels; cached."""
    return Loop(generate("block", LOOPS["block"], body, body=function(body)), fastmath=FASTMATH)


@stream
def read_stream(a, rounds):
    """Return the sum of `a`, in two chains, so that no load waits for an addition; a round reads all bytes of `a`."""
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
    """a <- b, `rounds` times; a round reads k bytes per element of k bytes, and writes k."""
    for _ in range(rounds):
        for i in range(a.size):
            a[np.uintp(i)] = b[np.uintp(i)]


@stream
def triad_stream(a, b, c, factor, rounds):
    """a <- b + factor c, `rounds` times; a round reads 2k bytes per element of k bytes, and writes k."""
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
    """Run `rounds` barriers: each thread increments its own word and waits until all words are as large."""
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
