"""Routing of tokens to experts: top-k choices with gates, and the permutation that groups tokens by expert.

    choose_experts    p = softmax(z) of a token's E logits; the `top` largest logits, in descending order, a tie to the
                      lower index; gates p_c / (sum of the chosen p), or p_c itself if top = 1
    count_choices     the choices of each expert in each sequence
    place_choices     the row of each choice among the rows of its expert; -1 beyond the room that a sequence has

    tokens, top = 2           t0: e1 e0     t1: e1 e2     t2: e0 e1
    rows by expert            e0: t0 t2 | e1: t0 t1 t2 | e2: t1             source: the number of each row's choice
    place                     t0: 2 0       t1: 3 5       t2: 1 4

Choice number q is choice q mod top of token q div top. A sequence is `length` tokens; groups are numbered sequence by
sequence, expert by expert. Rows of an expert are in the order of sequences, tokens and choices, and so are sums over
them; the sum of a token over its choices is in the order of choices. So results do not depend on where a row lies.

Backward of choose_experts, with the gates' gradients d, and for each token the gradients of two losses (mixture.py):

    of the gates            top > 1: dz_c = g_c (d_c - sum g d)          top = 1: dz_e = g d ([e is chosen] - p_e)
    of the load balance     dz_e = b p_e (s_e - sum p s)                 s: share of an expert in the sequence's choices
    of the logits' sizes    dz_e = a p_e log(sum exp z)

(Shazeer et al., 2017; Fedus et al., "Switch transformers", 2022; Zoph et al., "ST-MoE", 2022.) Bytes moved per element
of b bytes: gather_choices and scale_choices 2b, add_placed 3b, dot_choices 2b."""

import math

import numpy as np

from hpcdl.kernels.bind import elementwise, rowwise
from hpcdl.kernels.elementary import exp


@elementwise("T[::1], T[:, ::1], int64[:, ::1], T[:, ::1]")
def choose_experts(i, lse, p, chosen, gates):
    """p, the logits of each token, <- softmax(p); write log(sum exp), the chosen experts and their gates.
    NaN is never larger than another logit, and the chosen experts are different ones in any case."""
    experts, top = p.shape[1], chosen.shape[1]
    for c in range(top):
        best = np.int64(-1)
        for e in range(experts):
            free = True
            for d in range(c):
                free = free and chosen[i, d] != e
            if free and (best < 0 or p[i, e] > p[i, best]):
                best = np.int64(e)
        chosen[i, c] = best
    largest, total = p[i, chosen[i, 0]], lse.dtype.type(0)
    for e in range(experts):
        p[i, e] = exp(p[i, e] - largest)
        total += p[i, e]
    lse[i] = largest + math.log(total)
    for e in range(experts):
        p[i, e] = p[i, e] / total
    total = lse.dtype.type(top == 1)
    if top > 1:
        for c in range(top):
            total += p[i, chosen[i, c]]
    for c in range(top):
        gates[i, c] = p[i, chosen[i, c]] / total


@elementwise("T[::1], T[:, ::1], int64[:, ::1], T[:, ::1], T[:, ::1], T[:, ::1], int64, T, T, T[:, ::1]")
def choose_experts_backward(i, lse, p, chosen, gates, dgates, share, length, balance, size, dz):
    """dz <- the gradient by the logits of each token. share: (sequences, experts), of sequences of `length` tokens."""
    experts, top, s = p.shape[1], chosen.shape[1], np.int64(i) // length
    mean, along = lse.dtype.type(0), lse.dtype.type(0)
    for e in range(experts):
        mean += p[i, e] * share[s, e]
    for e in range(experts):
        dz[i, e] = p[i, e] * (balance * (share[s, e] - mean) + size * lse[i])
    for c in range(top):
        along += gates[i, c] * dgates[i, c]
    if top == 1:
        for e in range(experts):
            dz[i, e] -= along * p[i, e]
        dz[i, chosen[i, 0]] += along
    else:
        for c in range(top):
            dz[i, chosen[i, c]] += gates[i, c] * (dgates[i, c] - along)


@elementwise("T[::1], int64[:, ::1], int64, int64")
def count_choices(k, counts, chosen, length, experts):
    """counts[k] = number of choices of expert k mod `experts` in sequence k div `experts`."""
    sequence, expert = np.int64(k) // experts, np.int64(k) % experts
    found = np.int64(0)
    for t in range(sequence * length, (sequence + 1) * length):
        for c in range(chosen.shape[1]):
            found += np.int64(chosen[t, c] == expert)
    counts[k] = found


@elementwise("T[::1], int64[::1], int64[:, ::1], int64, int64, int64[:, ::1], int64[::1]")
def place_choices(k, starts, room, chosen, length, experts, place, source):
    """Give the first room[k] choices of group k the rows from starts[k] on, and other choices of the group none."""
    sequence, expert = np.int64(k) // experts, np.int64(k) % experts
    found, top = np.int64(0), chosen.shape[1]
    for t in range(sequence * length, (sequence + 1) * length):
        for c in range(top):
            if chosen[t, c] == expert:
                if found < room[k]:
                    place[t, c] = starts[k] + found
                    source[starts[k] + found] = t * top + c
                else:
                    place[t, c] = -1
                found += 1


@rowwise("T[:, ::1], T[:, ::1], int64[::1], int64")
def gather_choices(i, j, rows, x, source, top):
    """rows[i] = x[the token of choice source[i]]."""
    rows[i, j] = x[source[i] // top, j]


@rowwise("T[:, ::1], T[:, ::1], int64[:, ::1], T[:, ::1], int64")
def add_placed(i, j, y, rows, place, factors, c):
    """y[i] += factors[i, c] * rows[place[i, c]], unless choice c of token i has no row."""
    if place[i, c] >= 0:
        y[i, j] += factors[i, c] * rows[place[i, c], j]


@rowwise("T[:, ::1], T[::1], int64[::1]")
def scale_choices(i, j, rows, factors, source):
    """rows[i] *= factors[source[i]]."""
    rows[i, j] *= factors[source[i]]


@elementwise("T[::1], int64[::1], T[:, ::1], T[:, ::1]")
def dot_choices(q, dots, place, u, du):
    """dots[q] = u[m] . du[m] for the row m = place[q] of choice q; 0 if it has no row."""
    total, m = dots.dtype.type(0), place[q]
    if m >= 0:
        for j in range(u.shape[1]):
            total += u[m, j] * du[m, j]
    dots[q] = total
