"""The softmax of causal attention (Vaswani et al., "Attention is all you need", 2017) and its gradient, in place.

    p_j = exp(scale s_j - top) / sum_k exp(scale s_k - top)     for keys j, k <= position, top the largest scale s_k
    p_j = 0                                                     for keys j > position, which lie in the future
    ds_j = scale p_j (dp_j - sum_k p_k dp_k)                    0 for j > position

scores is (matrices * length, length): for each sequence and head a matrix (queries, keys), stacked by rows; row i is
the query at position i mod length. Scores of future keys are never read. NaN or +infinity among the other scores makes
the row NaN. Per element of b bytes the softmax moves 3b/2 bytes (an exponential for half of the elements bounds it),
its gradient 2b (memory bandwidth bounds it; half of p and dp are read)."""

from hpcdl.kernels.bind import block
from hpcdl.kernels.elementary import exp
from hpcdl.kernels.largest import largest


@block("T[:, ::1], int64, T")
def causal_softmax(scores, length, scale):
    """scores <- the softmax of scale * scores over the keys up to the position i mod length of row i, zeros beyond."""
    zero, one = scores.dtype.type(0), scores.dtype.type(1)
    for i in range(scores.shape[0]):
        count = i % length + 1
        for j in range(count):
            scores[i, j] *= scale
        top, total = largest(scores, i, count), zero
        for j in range(count):
            power = exp(scores[i, j] - top)
            scores[i, j] = power
            total += power
        inverse = one / total
        for j in range(count):
            scores[i, j] *= inverse
        for j in range(count, length):
            scores[i, j] = zero


@block("T[:, ::1], T[:, ::1], int64, T")
def causal_softmax_backward(p, dp, length, scale):
    """dp <- scale p (dp - the row's sum of p dp), zeros beyond the position i mod length of row i."""
    zero = p.dtype.type(0)
    for i in range(p.shape[0]):
        count, total = i % length + 1, zero
        for j in range(count):
            total += p[i, j] * dp[i, j]
        for j in range(count):
            dp[i, j] = scale * p[i, j] * (dp[i, j] - total)
        for j in range(count, length):
            dp[i, j] = zero
