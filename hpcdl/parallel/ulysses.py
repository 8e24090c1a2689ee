"""Ulysses: two all-to-alls turn shares of sequences, all heads, into whole sequences, a share of the heads, and back.

    C = 2                  tokens 0 1 | 2 3            heads A | B
    rank 0     tokens 0 1, heads A B   -->   tokens 0 1 2 3, head A   attention   -->   tokens 0 1, heads A B
    rank 1     tokens 2 3, heads A B   -->   tokens 0 1 2 3, head B   attention   -->   tokens 2 3, heads A B

The attention is that of one rank, with heads / C heads; C divides the heads of queries and of keys. A token has w
numbers of q, and 2u of k and v.

    values sent by a rank, of its T tokens      (C-1)/C T (w + 2u) for q, k and v, (C-1)/C T w for the output;
                                                backward as many, and (C-1)/C T w for the output once more
    messages                                    2 (C-1) forward, 3 (C-1) backward (pairwise)

That is 1/C of the ring's for each rank, up to a factor, but the messages cannot hide behind computing. The output by
heads is not kept beside that by tokens: backward makes it of the latter, so that a rank holds 1/C. (Jacobs et al.,
"DeepSpeed Ulysses: system optimizations for enabling training of extreme long sequence transformer models", 2023)"""

from collections.abc import Iterator
from typing import Any

from hpcdl.chunks import zigzag
from hpcdl.errors import UsageError
from hpcdl.kernels.device import Array
from hpcdl.parallel.token_group import TokenGroup


class Ulysses(TokenGroup):
    """The ranks of `comm`, with all-to-alls, of which none is hidden."""

    name = "ulysses"

    def check_heads(self, heads: int) -> None:
        if heads % self.size:
            raise UsageError(uneven_heads(heads, self.size))

    def attention(self, qkv: Array, length: int, heads: int, size: int, pool: Any) -> tuple[Array, tuple[Array, ...]]:
        """Return a, and (q, k, v and lse of whole sequences) for backward; collective. qkv goes to the pool."""
        shared = (qkv.shape[1] - heads * size) // 2
        whole = self.to_heads(qkv, shared, length, pool)
        pool.give(qkv)
        output, saved = super().attention(whole, self.size * length, heads // self.size, size, pool)
        a = self.to_tokens(output, shared, length, pool)
        pool.give(output)
        return a, saved

    def attention_backward(
        self, saved: tuple[Array, ...], a: Array, da: Array, length: int, size: int, pool: Any
    ) -> Array:
        """Return the gradient by qkv, in a new array of the pool; collective."""
        shared = (saved[0].shape[1] * self.size - a.shape[1]) // 2
        output, gradient = (self.to_heads(each, shared, length, pool) for each in (a, da))
        by_heads = super().attention_backward(saved, output, gradient, self.size * length, size, pool)
        pool.give(output)
        pool.give(gradient)
        dqkv = self.to_tokens(by_heads, shared, length, pool)
        pool.give(by_heads)
        return dqkv

    def to_heads(self, x: Array, shared: int, length: int, pool: Any) -> Array:
        """Return the columns of this rank's heads for all tokens of the sequences, from x, all columns for this rank's
        tokens. shared: columns of k; x has q as runs of so many columns, one query head for each head of keys."""
        count, runs = self.size, x.shape[1] // shared
        each = (len(x) // length, length, runs, shared // count)
        rows = pool.take(count, *each)
        columns = x.reshape(*each[:3], shared)
        for rank in range(count):
            rows[rank] = columns[:, :, :, rank * each[3] : (rank + 1) * each[3]]
        self.comm.all_to_all(rows)
        whole = pool.take(each[0], count * length, runs * each[3])
        for rank, tokens, place in self.places(length):
            whole[:, tokens] = rows[rank, :, place].reshape(whole[:, tokens].shape)
        pool.give(rows)
        return whole.reshape(each[0] * count * length, whole.shape[2])

    def to_tokens(self, x: Array, shared: int, length: int, pool: Any) -> Array:
        """Return all columns for this rank's tokens: the inverse of `to_heads`."""
        count, runs = self.size, x.shape[1] * self.size // shared
        each = (len(x) // (count * length), length, runs, shared // count)
        rows, whole = pool.take(count, *each), x.reshape(each[0], count * length, x.shape[1])
        for rank, tokens, place in self.places(length):
            rows[rank, :, place] = whole[:, tokens].reshape(rows[rank, :, place].shape)
        self.comm.all_to_all(rows)
        y = pool.take(each[0] * length, runs * shared)
        columns = y.reshape(*each[:3], shared)
        for rank in range(count):
            columns[:, :, :, rank * each[3] : (rank + 1) * each[3]] = rows[rank]
        pool.give(rows)
        return y

    def places(self, length: int) -> Iterator[tuple[int, slice, slice]]:
        """Yield (rank, its tokens in a whole sequence, the same in its own part) for each chunk of a sequence."""
        for rank in range(self.size):
            start = 0
            for tokens in zigzag(self.size * length, self.size, rank):
                stop = start + tokens.stop - tokens.start
                yield rank, tokens, slice(start, stop)
                start = stop


def uneven_heads(heads: int, ranks: int) -> str:
    """Return the message that these ranks cannot share so many heads of keys."""
    fitting = " or ".join(str(n) for n in range(1, heads + 1) if heads % n == 0)
    whose = f"{ranks} ranks cannot share {heads} heads of keys evenly"
    return f"--attention ulysses: {whose}; take --attention ring, or {fitting} ranks"
