"""Parser of libsvm's text, LABEL INDEX:VALUE INDEX:VALUE ..., into sparse rows, in one pass over the bytes. CPU only.

    +1 3:0.5 17:1e-3 # a comment            a row; its indices ascend
    -1 qid:7 4:2                            qid:N is left out, and counted
                                            empty lines and lines of a comment alone are no rows

A number of up to 19 digits is read as m 10^e, m < 2^64, |e| <= 22. 10^|e| is exact in float64; if m is exact too, one
operation is rounded correctly (Clinger, 1990). For larger m the quotient is computed to twice the digits, q + r, and
accepted if r's error cannot change the sum (Ziv, 1991). The positions of all other numbers are returned, for the caller
to read them; so every number is rounded correctly."""

import numpy as np

from hpcdl.kernels.bind import exact, on_cpu

# Results of parse: FINE, or the error of the token that begins at state[AT].
FINE, NO_LABEL, BAD_LABEL, SEVERAL, BAD_PAIR, BAD_INDEX = range(6)
NEGATIVE, BEYOND, REPEATED, UNSORTED, ZERO, BAD_VALUE = range(6, 12)

# Words of the state: AT the position in the text; LINE, ROWS, ELEMENTS of this text so far; HARD numbers that the
# caller must read; LOW, HIGH the smallest and largest index of all texts so far, WHERE the line of HIGH; QID tokens
# left out; BEFORE lines of earlier texts.
AT, LINE, ROWS, ELEMENTS, HARD, LOW, HIGH, WHERE, QID, BEFORE = range(10)
WORDS = 10

TENS = np.array([10.0**e for e in range(23)])
MOST_DIGITS = 19  # every number of 19 digits is below 2^64
EXACT = np.uint64(1) << np.uint64(53)

NEWLINE, RETURN, TAB, SPACE, HASH, PLUS, COMMA, MINUS, DOT, COLON, UPPER_E, LOWER_E = b"\n\r\t #+,-.:Ee"
Q, I, D = b"qid"


@exact
def is_blank(byte):
    """True if this byte separates the tokens of a line."""
    return byte in (SPACE, TAB, RETURN)


@exact
def ends_token(byte):
    """True if a token ends before this byte."""
    return byte in (SPACE, TAB, RETURN, NEWLINE, HASH)


@exact
def is_digit(byte):
    return 48 <= byte <= 57


@exact
def quotient(m, tens):
    """Return (m / tens, True if it is certainly rounded correctly); False near the middle of two float64 numbers."""
    low = m & np.uint64(2047)
    a, b = float(m - low), float(low)  # both exact: a has at most 53 bits
    q = a / tens
    # a - q tens, exactly: the product q tens is the sum of two numbers, product + error (Dekker, 1971).
    split = 134217729.0 * q
    q1 = split - (split - q)
    q2 = q - q1
    split = 134217729.0 * tens
    t1 = split - (split - tens)
    t2 = tens - t1
    product = q * tens
    error = ((q1 * t1 - product) + q1 * t2 + q2 * t1) + q2 * t2
    r = (((a - product) - error) + b) / tens
    # r's error is some units of its last bit, far less than 2^-40 r.
    return q + r, q + r * (1 + 2.0**-40) == q + r * (1 - 2.0**-40)


@exact
def number(text, at, stop):
    """Read text[at:]; return (value, the number's end, True if it is a number, True if value is correctly rounded)."""
    start, negative = at, False
    if at < stop and (text[at] == MINUS or text[at] == PLUS):
        negative = text[at] == MINUS
        at += 1
    m, digits, scale, valid, exact = np.uint64(0), 0, 0, False, True
    for decimals in range(2):  # the digits before the point, then those after it
        while at < stop and is_digit(text[at]):
            valid = True
            if digits < MOST_DIGITS:
                m = m * np.uint64(10) + np.uint64(text[at] - 48)
                digits += m != 0
                scale -= decimals
            else:
                scale += 1 - decimals
                exact = exact and text[at] == 48
            at += 1
        if decimals == 1 or at >= stop or text[at] != DOT:
            break
        at += 1
    if valid and at < stop and (text[at] == LOWER_E or text[at] == UPPER_E):
        at += 1
        negative_exponent = False
        if at < stop and (text[at] == MINUS or text[at] == PLUS):
            negative_exponent = text[at] == MINUS
            at += 1
        power, exponent_digits = 0, False
        while at < stop and is_digit(text[at]):
            exponent_digits = True
            power = min(power * 10 + (text[at] - 48), 100000)
            at += 1
        valid = exponent_digits
        scale += -power if negative_exponent else power
    valid = valid and at > start
    if m == 0:
        value = 0.0
    elif scale == 0 and m <= EXACT:
        value = float(m)
    elif 0 < scale <= 22 and m <= EXACT:
        value = float(m) * TENS[scale]
    elif -22 <= scale < 0 and m <= EXACT:
        value = float(m) / TENS[-scale]
    elif -22 <= scale <= 0:
        value, safe = quotient(m, TENS[-scale])
        exact = exact and safe
    else:
        value, exact = 0.0, False
    return -value if negative else value, at, valid, exact


@on_cpu
def parse(text, stop, limit, base, labels, starts, columns, values, hard, state):
    """Parse text[state[AT] : stop], complete lines, into rows; return FINE, or the error of the token at state[AT].
    base (0 or 1), limit: bounds of the indices. To write: labels (rows,), starts (rows + 1,), columns, values
    (elements,) without zeros; hard (numbers, 3): begin, end, element (label: -1 - row) of numbers not read here."""
    at = state[AT]
    while at < stop:
        state[LINE] += 1
        while at < stop and is_blank(text[at]):
            at += 1
        if at < stop and text[at] != NEWLINE and text[at] != HASH:
            state[AT] = at
            row, count = state[ROWS], state[ELEMENTS]
            label, end, valid, exact = number(text, at, stop)
            if end < stop and text[end] == COMMA:
                return SEVERAL
            if end < stop and text[end] == COLON:
                return NO_LABEL
            if not valid or (end < stop and not ends_token(text[end])):
                return BAD_LABEL
            if not exact:
                hard[state[HARD]] = at, end, -1 - row
                state[HARD] += 1
            labels[row] = label
            at, last = end, np.int64(-1)
            while True:
                while at < stop and is_blank(text[at]):
                    at += 1
                if at >= stop or text[at] == NEWLINE or text[at] == HASH:
                    break
                state[AT] = at
                if (
                    at + 4 < stop
                    and text[at] == Q
                    and text[at + 1] == I
                    and text[at + 2] == D
                    and text[at + 3] == COLON
                ):
                    while at < stop and not ends_token(text[at]):
                        at += 1
                    state[QID] += 1
                    continue
                index, begin = np.int64(0), at
                while at < stop and is_digit(text[at]):
                    index = min(index * 10 + (text[at] - 48), np.int64(1) << 40)
                    at += 1
                if at == begin or at >= stop or text[at] != COLON:
                    if at == begin and at + 1 < stop and text[at] == MINUS and is_digit(text[at + 1]):
                        return NEGATIVE
                    return BAD_PAIR if at == begin or at >= stop or ends_token(text[at]) else BAD_INDEX
                if index > limit:
                    return BEYOND
                if index < base:
                    return ZERO
                if index <= last:
                    return REPEATED if index == last else UNSORTED
                last = index
                value, end, valid, exact = number(text, at + 1, stop)
                if not valid or (end < stop and not ends_token(text[end])):
                    return BAD_VALUE
                if not exact:
                    hard[state[HARD]] = at + 1, end, count
                    state[HARD] += 1
                if value != 0 or not exact:
                    columns[count], values[count] = index, value
                    count += 1
                if index < state[LOW]:
                    state[LOW] = index
                if index > state[HIGH]:
                    state[HIGH], state[WHERE] = index, state[BEFORE] + state[LINE]
                at = end
            state[ROWS], state[ELEMENTS] = row + 1, count
            starts[row + 1] = count
        while at < stop and text[at] != NEWLINE:  # the rest is a comment
            at += 1
        at += 1
        state[AT] = min(at, stop)
    return FINE


@on_cpu
def count(text, stop):
    """Return (lines, rows) of text[:stop]; rows are not checked."""
    lines, rows, at = 0, 0, 0
    while at < stop:
        lines += 1
        while at < stop and is_blank(text[at]):
            at += 1
        if at < stop and text[at] != NEWLINE and text[at] != HASH:
            rows += 1
        while at < stop and text[at] != NEWLINE:
            at += 1
        at += 1
    return lines, rows
