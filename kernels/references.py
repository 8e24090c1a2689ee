"""Each kernel in plain numpy, with the same name, arguments and results, for comparison in tests and benchmarks."""

import numpy as np

from hpcdl.kernels.layer_norm import EPS


def standardize(x, mean, factor):
    x -= mean
    x *= factor


def sgd(w, g, rate, scale, decay):
    w -= rate * (scale * g + decay * w)


def philox(counter, key):
    """Return the four words of Philox4x32-10 (Salmon et al., 2011); counter: four arrays of words, key: two words."""
    word = np.uint64(0xFFFFFFFF)
    a, b, c, d = (np.asarray(each, np.uint64) for each in counter)
    k0, k1 = (int(each) for each in key)
    for _ in range(10):
        left, right = np.uint64(0xD2511F53) * a, np.uint64(0xCD9E8D57) * c
        high, low = right >> np.uint64(32), left >> np.uint64(32)
        a, b, c, d = high ^ b ^ np.uint64(k0), right & word, low ^ d ^ np.uint64(k1), left & word
        k0, k1 = (k0 + 0x9E3779B9) % 2**32, (k1 + 0xBB67AE85) % 2**32
    return a, b, c, d


def normals(count, first, step, key0, key1):
    """Return the normal numbers (Box and Muller, 1958) of the coordinates first .. first + count - 1."""
    at = [first + i for i in range(count)]
    low, high = (np.array([each >> shift & 0xFFFFFFFF for each in at], np.uint64) for shift in (0, 32))
    words = philox((low, high, step & 0xFFFFFFFF, step >> 32), (key0, key1))
    bits53 = [(words[k] << np.uint64(21)) | (words[k + 1] >> np.uint64(11)) for k in (0, 2)]  # of each pair of words
    u, v = (bits53[0] + np.uint64(1)) * 2.0**-53, bits53[1] * 2.0**-53
    return np.sqrt(-2 * np.log(u)) * np.cos(2 * np.pi * v)


def langevin(w, g, rate, scale, decay, deviation, first, step, key0, key1):
    w -= rate * (scale * g + decay * w)
    w += (deviation * normals(w.size, first, step, key0, key1)).astype(w.dtype)


def split_mix(state):
    """Return SplitMix64's outputs for an array of states, uint64."""
    z = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def dropout_mask(mask, keys, least, value):
    steps = (np.arange(mask.shape[1], dtype=np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    words = split_mix(keys.view(np.uint64)[:, None] + steps)
    mask[:] = np.where((words >> np.uint64(40)).astype(np.int64) >= least, value, 0)


def momentum(w, g, v, rate, scale, decay, beta):
    v *= beta
    v += scale * g
    v += decay * w
    w -= rate * v


def nesterov(w, g, v, rate, scale, decay, beta):
    d = scale * g
    d += decay * w
    v *= beta
    v += d
    d += beta * v
    d *= rate
    w -= d


def nesterov_direction(u, g, v, scale, beta, rest):
    d = scale * g
    d *= rest
    v *= beta
    v += d
    np.multiply(v, beta, out=u)
    u += d


def adam(w, g, m, s, rate, scale, decay, shrink, beta1, rest1, beta2, rest2, root, eps):
    d = scale * g
    d += decay * w
    m *= beta1
    m += rest1 * d
    s *= beta2
    d *= d
    s += rest2 * d
    np.sqrt(s, out=d)
    d *= root
    d += eps
    np.divide(m, d, out=d)
    d *= rate
    w *= shrink
    w -= d


def add_bias_residual(z, b, x):
    z += b
    z += x


def add_bias_relu(z, b):
    z += b
    np.maximum(z, 0, out=z)


def add_bias_tanh(z, b):
    z += b
    np.tanh(z, out=z)


def add_bias_gelu(z, b, y):
    x = z + b
    np.multiply(x, x, out=y)
    y *= 0.044715
    y += 1
    y *= x
    y *= np.sqrt(2 / np.pi)
    np.tanh(y, out=y)
    y += 1
    y *= x
    y *= 0.5


def add_rows(dy, gb):
    gb += dy.sum(axis=0)


def relu_backward(y, dy, gb):
    np.multiply(dy, ~(y <= 0), out=y)
    gb += y.sum(axis=0)


def tanh_backward(y, dy, gb):
    np.multiply(y, y, out=y)
    np.subtract(1, y, out=y)
    y *= dy
    gb += y.sum(axis=0)


def gelu_backward(z, b, dy, gb):
    x, c = z + b, np.sqrt(2 / np.pi)
    square = x * x
    t = np.tanh(c * (x + 0.044715 * x * square))
    z[...] = dy * (0.5 * (1 + t) + 0.5 * x * (1 - t * t) * c * (1 + 3 * 0.044715 * square))
    gb += z.sum(axis=0)


def softmax_cross_entropy(z, labels, dz):
    rows, top = np.arange(len(z)), z.max(axis=1, keepdims=True)
    np.subtract(z, top, out=dz)
    np.exp(dz, out=dz)
    total = dz.sum(axis=1, keepdims=True)
    dz /= total
    dz[rows, labels] -= 1
    losses = np.log(total[:, 0], dtype=np.float64) + top[:, 0] - z[rows, labels]
    return losses.sum(), np.count_nonzero((z.argmax(axis=1) == labels) & (losses == losses))


def row_max(z, tops):
    np.fmax.reduce(z, axis=1, initial=-np.inf, out=tops)


def partial_softmax(z, labels, first, tops, dz, sums):
    np.subtract(z, tops[:, None], out=dz)
    np.exp(dz, out=dz)
    np.sum(dz, axis=1, out=sums[:, 0])
    rows = np.flatnonzero((labels >= first) & (labels < first + z.shape[1]))
    sums[:, 1] = 0
    sums[rows, 1] = z[rows, labels[rows] - first] - tops[rows]


def finish_softmax(dz, labels, first, classes, sums):
    dz /= sums[:, :1]
    rows = np.flatnonzero((labels >= first) & (labels < first + dz.shape[1]))
    dz[rows, labels[rows] - first] -= 1
    losses = np.log(sums[:, 0], dtype=np.float64) - sums[:, 1]
    valid = ((labels >= 0) & (labels < classes)).all()
    return losses.sum(), np.count_nonzero((sums[:, 1] == 0) & (losses == losses)) if valid else -1


def hits(x, labels):
    return np.count_nonzero(((x > 0) == (labels == 1)) & (x == x))


def logistic(z, labels, dz):
    x = z[:, 0]
    dz[:, 0] = 1 / (1 + np.exp(-x)) - labels
    return np.logaddexp(0, np.where(labels == 1, -x, x), dtype=np.float64).sum(), hits(x, labels)


def hinge(z, labels, dz):
    x, sign = z[:, 0], np.where(labels == 1, 1, -1).astype(z.dtype)
    short = 1 - sign * x
    dz[:, 0] = np.where(short <= 0, 0, -sign)
    return np.maximum(short, 0).sum(dtype=np.float64), hits(x, labels)


def squared(z, y, dz):
    np.subtract(z, y[:, None], out=dz)
    score = np.square(dz, dtype=np.float64).sum()
    return score / 2, score


def huber(z, y, delta, dz):
    error = z - y[:, None]
    np.clip(error, -delta, delta, out=dz)
    size = np.abs(error, dtype=np.float64)
    losses = np.where(size <= delta, size**2 / 2, delta * (size - delta / 2))
    return losses.sum(), (size**2).sum()


def sum_of_squares(x):
    return np.square(x, dtype=np.float64).sum()


def orthogonalize(p):
    for k, column in enumerate(p.T):
        size = []
        for _ in range(2):
            for before in p.T[:k]:
                column -= (np.dot(before, column)) * before
            size.append(np.linalg.norm(column.astype(np.float64)))
        column *= 0 if size[1] <= size[0] / 2 else 1 / size[1]


def expand(m, e, p, q, share):
    np.matmul(p, q.T, out=m)
    e -= share * m


def in_place(operation):
    """Return a function that writes the result of `operation` into its first argument."""

    def overwrite(into, *rest):
        operation(into, *rest, out=into)

    return overwrite


add_into = add_bias = in_place(np.add)
max_into, min_into, scale = in_place(np.maximum), in_place(np.minimum), in_place(np.multiply)


def add_scaled(into, values, factor):
    into += factor * values


def gather(source, index, scale, out):
    np.multiply(source[index], out.dtype.type(scale), out=out)


def sparse_dot(data, indices, indptr, w, z):
    z[...] = 0
    np.add.at(z, np.repeat(np.arange(len(z)), np.diff(indptr)), data[:, None] * w[indices])


def scatter_add(data, indices, indptr, dz, g):
    np.add.at(g, indices, data[:, None] * np.repeat(dz, np.diff(indptr), axis=0))


def gather_sparse(source, indices, indptr, index, scale, data, columns, starts):
    lengths = indptr[index + 1] - indptr[index]
    starts[1:] = starts[0] + np.cumsum(lengths)
    at = np.repeat(indptr[index] - starts[:-1], lengths) + np.arange(starts[0], starts[-1])
    np.multiply(source[at], data.dtype.type(scale), out=data[starts[0] : starts[-1]])
    columns[starts[0] : starts[-1]] = indices[at]


def gather_images(source, index, scale, height, width, channels, down, right, mirrored, out):
    pixels = source[index].reshape(-1, height, width, channels)
    moved = np.zeros_like(pixels)
    for image, result, v, h, mirror in zip(pixels, moved, down, right, mirrored, strict=True):
        rows, columns = (slice(max(0, k), n + min(0, k)) for k, n in ((v, height), (h, width)))
        from_rows, from_columns = (slice(max(0, -k), n + min(0, -k)) for k, n in ((v, height), (h, width)))
        result[rows, columns] = image[from_rows, from_columns]
        if mirror:
            result[...] = result[:, ::-1].copy()
    np.multiply(moved.reshape(out.shape), out.dtype.type(scale), out=out)


def encode_float16(x, residual, code):
    residual += x
    half = residual.astype("f2")
    code[:] = half.view("u2")
    residual -= half


def decode_float16(into, code):
    into[:] = code.view("f2")


def add_float16(into, code):
    into += code.view("f2")


def encode_bfloat16(x, residual, code):
    residual += x
    bits = residual.astype("f4").view("u4")
    upper = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    code[:] = np.where(residual == residual, upper, (bits | 0x400000) >> 16)
    residual -= wide(code)


def wide(code):
    return (code.astype("u4") << 16).view("f4")


def decode_bfloat16(into, code):
    into[:] = wide(code)


def add_bfloat16(into, code):
    into += wide(code)


def scales_of(x, scales, size, mean):
    for b in range(scales.size):
        part = np.abs(x[b * size : (b + 1) * size].astype("f8"))
        if mean:
            scales[b] = part.mean()
        else:
            top = np.max(np.where(np.isnan(part), np.inf, part), initial=0)
            scales[b] = top
            if scales[b] < top:
                scales[b] = np.nextafter(scales[b], np.float32(np.inf))


def quantize(x, scales, codes, shift, levels, stochastic, number, first):
    at = np.arange(x.size)
    states = np.uint64(number) + (np.uint64(first + 1) + at.astype(np.uint64)) * np.uint64(0x9E3779B97F4A7C15)
    u = (split_mix(states) >> np.uint64(40)) * 2.0**-24 if stochastic else 0.5
    t = np.floor((x.astype("f8") / scales[at >> shift] + 1) * (levels / 2) + u)
    codes[:] = np.where(t > 0, np.minimum(t, levels), 0)


def sign_codes(x, codes):
    codes[:] = x >= 0


def pack(message, codes, bits):
    rows = np.zeros((message.size, 8 // bits), np.uint8)
    rows.reshape(-1)[: codes.size] = codes
    message[:] = np.bitwise_or.reduce(rows << (bits * np.arange(8 // bits, dtype=np.uint8)), axis=1)


def add_codes(into, message, scales, bits, shift, levels, factor):
    rows = message[:, None] >> (bits * np.arange(8 // bits, dtype=np.uint8)) & np.uint8((1 << bits) - 1)
    code = rows.reshape(-1)[: into.size].astype("f8")
    into += (factor * scales[np.arange(into.size) >> shift] * (2 * code - levels)).astype(into.dtype)


def select_largest(x, indices):
    size = np.where(np.isnan(x), np.inf, np.abs(x))
    indices[:] = np.sort(np.argsort(-size, kind="stable")[: indices.size])


def take(into, x, indices):
    into[:] = x[indices]


def add_at(values, into, indices, factor):
    inside = indices < into.size
    into[indices[inside]] += into.dtype.type(factor) * values[inside]


def encode(v, factor, fixed):
    fixed[:] = np.floor(v.astype("f8") * factor + 0.5)


def decode(into, factor, fixed):
    into[:] = fixed * factor


def average(a, w, share):
    a += share * (w - a)


def yogi(w, g, m, s, rate, scale, decay, beta1, rest1, rest2, eps):
    d = scale * g + decay * w
    m[:] = beta1 * m + rest1 * d
    s -= rest2 * d * d * np.sign(s - d * d)
    w -= rate * m / (np.sqrt(s) + eps)


def adagrad(w, g, s, rate, scale, decay, eps):
    d = scale * g + decay * w
    s += d * d
    w -= rate * d / (np.sqrt(s) + eps)


def proximal(g, w, center, factor):
    g += factor * (w - center)


def embed(tokens, table, first, vocabulary, out):
    flat = tokens.ravel()
    valid = (flat >= 0) & (flat < vocabulary) & (flat == np.floor(flat))
    here = valid & (flat >= first) & (flat < first + len(table))
    if here.all():
        np.take(table, (flat - first).astype(np.int64), axis=0, out=out, mode="clip")
    else:
        out[...] = 0
        out[here] = table[(flat[here] - first).astype(np.int64)]
    return 0 if valid.all() else -1


def embed_backward(tokens, dy, first, gradient):
    flat = tokens.ravel()
    here = (flat >= first) & (flat < first + len(gradient)) & (flat == np.floor(flat))
    np.add.at(gradient, (flat[here] - first).astype(np.int64), dy[here])


def add_positions(x, table, length, offset):
    x += table[(np.arange(len(x)) + offset) % length]


def add_positions_backward(dy, gradient, length, offset):
    np.add.at(gradient, (np.arange(len(dy)) + offset) % length, dy)


def choose_experts(lse, p, chosen, gates):
    order = np.argsort(-p, axis=1, kind="stable")
    chosen[:] = order[:, : chosen.shape[1]]
    largest = p.max(axis=1, keepdims=True) if p.size else p[:, :1]
    p[:] = np.exp(p - largest)
    total = p.sum(axis=1, keepdims=True)
    lse[:] = (largest + np.log(total))[:, 0]
    p /= total
    gates[:] = np.take_along_axis(p, chosen, 1)
    if chosen.shape[1] > 1:
        gates /= gates.sum(axis=1, keepdims=True)


def choose_experts_backward(lse, p, chosen, gates, dgates, share, length, balance, size, dz):
    s = share[np.arange(len(p)) // length]
    dz[:] = p * (balance * (s - (p * s).sum(axis=1, keepdims=True)) + size * lse[:, None])
    along = (gates * dgates).sum(axis=1, keepdims=True)
    if chosen.shape[1] == 1:
        dz -= along * p
        np.put_along_axis(dz, chosen, np.take_along_axis(dz, chosen, 1) + along, 1)
    else:
        more = gates * (dgates - along)
        np.put_along_axis(dz, chosen, np.take_along_axis(dz, chosen, 1) + more, 1)


def count_choices(counts, chosen, length, experts):
    by_sequence = chosen.reshape(counts.size // experts, length * chosen.shape[1])
    counts[:] = (by_sequence[:, None] == np.arange(experts)[:, None]).sum(axis=2).ravel()


def place_choices(starts, room, chosen, length, experts, place, source):
    flat, top = chosen.ravel(), chosen.shape[1]
    for k in range(starts.size):
        first = k // experts * length * top
        (found,) = np.nonzero(flat[first : first + length * top] == k % experts)
        kept = found[: room[k]] + first
        place.reshape(-1)[found + first] = -1
        place.reshape(-1)[kept] = starts[k] + np.arange(kept.size)
        source[starts[k] : starts[k] + kept.size] = kept


def gather_choices(rows, x, source, top):
    np.take(x, source[: len(rows)] // top, axis=0, out=rows)


def add_placed(y, rows, place, factors, c):
    (here,) = np.nonzero(place[:, c] >= 0)
    y[here] += factors[here, c][:, None] * rows[place[here, c]]


def scale_choices(rows, factors, source):
    rows *= factors[source[: len(rows)]][:, None]


def dot_choices(dots, place, u, du):
    dots[:] = np.where(place >= 0, np.einsum("ij,ij->i", u[place], du[place]), 0)


def layer_norm(x, gain, bias, y, mean, rstd):
    np.mean(x, axis=1, out=mean)
    rstd[:] = 1 / np.sqrt(np.var(x, axis=1) + np.asarray(EPS, x.dtype))
    np.subtract(x, mean[:, None], out=y)
    y *= rstd[:, None]
    y *= gain
    y += bias


def layer_norm_backward(dy, x, gain, mean, rstd, dx, dgain, dbias):
    h = (x - mean[:, None]) * rstd[:, None]
    dgain += np.einsum("ij,ij->j", dy, h)
    dbias += dy.sum(axis=0)
    np.multiply(dy, gain, out=dx)
    along = np.einsum("ij,ij->i", dx, h) / np.asarray(x.shape[1], x.dtype)
    dx -= dx.mean(axis=1)[:, None]
    h *= along[:, None]
    dx -= h
    dx *= rstd[:, None]


def rms_norm(x, gain, y, rstd):
    rstd[:] = 1 / np.sqrt(np.mean(x * x, axis=1) + np.asarray(EPS, x.dtype))
    np.multiply(x, rstd[:, None], out=y)
    y *= gain


def rms_norm_backward(dy, x, gain, rstd, dx, dgain):
    h = x * rstd[:, None]
    dgain += np.einsum("ij,ij->j", dy, h)
    np.multiply(dy, gain, out=dx)
    h *= (np.einsum("ij,ij->i", dx, h) / np.asarray(x.shape[1], x.dtype))[:, None]
    dx -= h
    dx *= rstd[:, None]


def swiglu(u, z):
    g, v = np.split(z, 2, axis=1)
    u[:] = g / (1 + np.exp(-g)) * v


def swiglu_backward(du, z, dz):
    g, v = np.split(z, 2, axis=1)
    s = 1 / (1 + np.exp(-g))
    dz[:] = np.concatenate([du * v * s * (1 + g * (1 - s)), du * (g * s)], axis=1)


def rotations(table, positions, base):
    size = table.shape[1]
    turned = np.exp(1j * positions[:, None] * base ** (-np.arange(0, size, 2) / size))
    table[:, ::2], table[:, 1::2] = turned.real, turned.imag[:, : size // 2]


def rotate(x, table, columns, sign):
    size, row = table.shape[1], np.arange(len(x)) % len(table)
    cosine, sine = (np.tile(part[row], columns // size) for part in (table[:, ::2], sign * table[:, 1::2]))
    a, b = x[:, :columns:2].copy(), x[:, 1:columns:2].copy()
    x[:, :columns:2], x[:, 1:columns:2] = a * cosine - b * sine, a * sine + b * cosine


def by_heads(x, length, heads):
    """Return a view (sequences, heads, length, size) of rows of tokens."""
    return x.reshape(len(x) // length, length, heads, x.shape[1] // heads).swapaxes(1, 2)


def attention_scores(q, k, scale):
    """Return the scaled scores of queries and keys (sequences, heads, length, size), -infinity for future keys."""
    s = scale * (q @ k.swapaxes(2, 3))
    s[..., np.triu(np.ones(s.shape[2:], bool), 1)] = -np.inf
    return s


def split_heads(qkv, width, length, size):
    """Return views of q (sequences, heads, length, size), and of k and v with a head for each kv head."""
    shared = (qkv.shape[1] - width) // 2
    parts = np.split(qkv, [width, width + shared], axis=1)
    return [by_heads(part, length, part.shape[1] // size) for part in parts]


def causal_attention(qkv, length, size, scale, a, lse):
    heads = a.shape[1] // size
    q, k, v = split_heads(qkv, a.shape[1], length, size)
    k, v = (np.tile(each, (1, heads // each.shape[1], 1, 1)) for each in (k, v))
    s = attention_scores(q, k, scale)
    top = s.max(axis=3, keepdims=True)
    p = np.exp(s - top)
    total = p.sum(axis=3, keepdims=True)
    by_heads(a, length, heads)[...] = (p / total) @ v
    by_heads(lse, length, heads)[...] = top + np.log(total)


def causal_attention_backward(qkv, a, da, lse, length, size, scale, dqkv):
    heads = a.shape[1] // size
    q, k, v = split_heads(qkv, a.shape[1], length, size)
    dq, dk, dv = split_heads(dqkv, a.shape[1], length, size)
    group = heads // k.shape[1]
    k, v = (np.tile(each, (1, group, 1, 1)) for each in (k, v))
    p, g = np.exp(attention_scores(q, k, scale) - by_heads(lse, length, heads)), by_heads(da, length, heads)
    ds = p * (g @ v.swapaxes(2, 3) - (g * by_heads(a, length, heads)).sum(axis=3, keepdims=True))
    dq[...] = scale * (ds @ k)
    for into, each in ((dk, scale * (ds.swapaxes(2, 3) @ q)), (dv, p.swapaxes(2, 3) @ g)):
        into[...] = each.reshape(len(each), group, *into.shape[1:]).sum(axis=1)


def block_scores(qkv, kv, length, first, keys, size, scale, heads):
    """Return q of the queries from `first` on, k and v of the first keys, for each head of q, and the scaled scores."""
    shared = kv.shape[1] // 2 // size
    q = by_heads(qkv[:, : heads * size], length, heads)[:, :, first:]
    k, v = (by_heads(each, length, shared)[:, :, :keys] for each in np.split(kv, 2, axis=1))
    k, v = (np.tile(each, (1, heads // shared, 1, 1)) for each in (k, v))
    return q, k, v, scale * (q @ k.swapaxes(2, 3))


def attend_block(qkv, kv, length, first, keys, size, scale, a, lse):
    heads = a.shape[1] // size
    _, _, v, s = block_scores(qkv, kv, length, first, keys, size, scale, heads)
    a, lse = (by_heads(each, length, heads)[:, :, first:] for each in (a, lse))
    after = np.logaddexp(lse, np.logaddexp.reduce(s, axis=3, keepdims=True))
    a[...] = np.exp(lse - after) * a + np.exp(s - after) @ v
    lse[...] = after


def attend_block_backward(qkv, kv, a, da, lse, length, first, keys, size, scale, dqkv, dkv):
    heads, shared = a.shape[1] // size, kv.shape[1] // 2 // size
    q, k, v, s = block_scores(qkv, kv, length, first, keys, size, scale, heads)
    a, g, lse = (by_heads(each, length, heads)[:, :, first:] for each in (a, da, lse))
    dq = by_heads(dqkv[:, : heads * size], length, heads)[:, :, first:]
    dk, dv = (by_heads(each, length, shared)[:, :, :keys] for each in np.split(dkv, 2, axis=1))
    p = np.exp(s - lse)
    ds = p * (g @ v.swapaxes(2, 3) - (g * a).sum(axis=3, keepdims=True))
    dq += scale * (ds @ k)
    for into, each in ((dk, scale * (ds.swapaxes(2, 3) @ q)), (dv, p.swapaxes(2, 3) @ g)):
        into += each.reshape(len(each), heads // shared, shared, *each.shape[2:]).sum(axis=1)
