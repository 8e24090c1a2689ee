"""Ring attention: keys and values of all ranks pass each rank, which joins them block by block.

    3 ranks           step 0             step 1             step 2
    rank 0            kv 0, causal       kv 2               kv 1
    rank 1            kv 1, causal       kv 0               kv 2            kv s arrives from rank r-1 while the block
    rank 2            kv 2, causal       kv 1               kv 0            before it is computed

Rank r holds the chunks r and 2C-1-r of a sequence (context.py). Of the block of rank s its queries see

    s = r    the causal part       s < r    the first chunk, all queries       s > r    both chunks, the second half of
                                                                               the queries

so that all steps after the first cost the same on all ranks. The outputs of blocks are joined by their log-sum-exp
(hpcdl/kernels/block_attention.py). Backward turns the ring again: with kv s travels its gradient, to which each rank
adds, and which goes home in the end.

    values sent by a rank, T tokens of k and v with 2w numbers         messages
    forward       (C-1) 2 T w                                          C-1
    backward      (C-1) 4 T w                                          2 (C-1)

(Liu, Zaharia and Abbeel, "Ring attention with blockwise transformers for near-infinite context", 2023)"""

import math
import time
from collections.abc import Iterator
from typing import Any

from hpcdl.comm.communicator import Communicator
from hpcdl.comm.requests import Request
from hpcdl.kernels.attention import causal_attention, causal_attention_backward
from hpcdl.kernels.block_attention import attend_block, attend_block_backward
from hpcdl.kernels.device import Array
from hpcdl.kernels.reduce import add_into
from hpcdl.parallel.token_group import TokenGroup

KV, GRADIENT = 0, 1  # tags
PIECES = 8  # of the sequences of a block, between which messages advance


class RingAttention(TokenGroup):
    """The ranks of `comm`, with ring attention."""

    name = "ring"

    def __init__(self, comm: Communicator):
        super().__init__(comm)
        self.left, self.right = (comm.rank - 1) % comm.size, (comm.rank + 1) % comm.size

    def attention(self, qkv: Array, length: int, heads: int, size: int, pool: Any) -> tuple[Array, tuple[Array, ...]]:
        """Return a, and (qkv, lse) for backward; collective. length: of this rank's part of a sequence."""
        scale = 1 / math.sqrt(size)
        a, lse = pool.take(len(qkv), heads * size), pool.take(len(qkv), heads)
        for step, (owner, kv) in enumerate(self.blocks(self.keys(qkv, heads * size, pool), pool)):
            first, keys = self.seen(owner, length)
            for rows in self.pieces(len(qkv), length):
                if step == 0:
                    self.causal(qkv[rows], length, size, scale, a[rows], lse[rows])
                else:
                    self.block(qkv[rows], kv[rows], length, first, keys, size, scale, a[rows], lse[rows])
        self.exchanges += 0.5
        return a, (qkv, lse)

    def attention_backward(
        self, saved: tuple[Array, ...], a: Array, da: Array, length: int, size: int, pool: Any
    ) -> Array:
        """Return the gradient by qkv, in a new array of the pool; collective."""
        (qkv, lse), scale, width = saved, 1 / math.sqrt(size), a.shape[1]
        dqkv = pool.take(*qkv.shape)
        leaving: list[tuple[Request, Array]] = []
        for step, (owner, kv) in enumerate(self.blocks(self.keys(qkv, width, pool), pool)):
            first, keys = self.seen(owner, length)
            if step == 0:
                for rows in self.pieces(len(qkv), length):
                    self.causal_backward(qkv[rows], a[rows], da[rows], lse[rows], length, size, scale, dqkv[rows])
                continue
            gradient, arriving = pool.take(*kv.shape), None
            gradient[:] = 0
            if step > 1:  # the ranks before have added to it
                others = pool.take(*kv.shape)
                arriving = self.timed(self.comm.iwait, others, self.left, GRADIENT)
            for rows in self.pieces(len(qkv), length):
                more = (length, first, keys, size, scale, dqkv[rows], gradient[rows])
                self.block_backward(qkv[rows], kv[rows], a[rows], da[rows], lse[rows], *more)
            if arriving is not None:
                self.timed(arriving.wait)
                add_into(gradient.reshape(-1), others.reshape(-1))
                pool.give(others)
            leaving.append((self.timed(self.comm.ipush, gradient, self.right, GRADIENT), gradient))
        if self.size > 1:
            own = pool.take(len(qkv), qkv.shape[1] - width)
            self.timed(self.comm.wait, own, self.left, GRADIENT)
            dqkv[:, width:] += own
            pool.give(own)
        for request, gradient in leaving:
            self.timed(request.wait)
            pool.give(gradient)
        self.exchanges += 0.5
        return dqkv

    def keys(self, qkv: Array, width: int, pool: Any) -> Array:
        """Return k and v of all tokens, to be sent: (tokens, 2 * kv_heads * size)."""
        kv: Array = pool.take(len(qkv), qkv.shape[1] - width)
        kv[...] = qkv[:, width:]
        return kv

    def blocks(self, kv: Array, pool: Any) -> Iterator[tuple[int, Array]]:
        """Yield (owner, its kv) for all ranks, from this one on; while one is in use, the next one travels."""
        for step in range(self.size):
            self.requests, following = [], None  # type: Any, Any
            if step + 1 < self.size:
                following = pool.take(*kv.shape)
                self.requests = [
                    self.timed(self.comm.iwait, following, self.left, KV),
                    self.timed(self.comm.ipush, kv, self.right, KV),
                ]
            yield (self.rank - step) % self.size, kv
            for request in self.requests:
                self.timed(request.wait)
            pool.give(kv)
            kv = following

    def pieces(self, rows: int, length: int) -> Iterator[slice]:
        """Yield the rows of a few sequences at a time; in between the messages advance."""
        each = max(1, rows // length // PIECES) * length
        for start in range(0, rows, each):
            yield slice(start, min(rows, start + each))
            self.timed(self.advance)

    def advance(self) -> None:
        for request in self.requests:
            request.test()

    def seen(self, owner: int, length: int) -> tuple[int, int]:
        """Return the first query that sees the block of this rank, and how many of its keys the queries see."""
        return (0, length // 2) if owner < self.rank else (length // 2, length)

    def timed(self, call: Any, *arguments: Any) -> Any:
        """Return the result of a communicator's call; count its seconds as exposed."""
        start = time.perf_counter()
        result = call(*arguments)
        self.exposed += time.perf_counter() - start
        return result

    causal: Any = causal_attention
    causal_backward: Any = causal_attention_backward
    block: Any = attend_block
    block_backward: Any = attend_block_backward


class ExchangeAlone(RingAttention):
    """The messages of ring attention, without computing."""

    def nothing(self, *_: Any) -> None:
        """Compute nothing."""

    causal = causal_backward = block = block_backward = nothing
