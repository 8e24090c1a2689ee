"""Shamir's secret sharing: n shares of a secret, of which any t recover it and any t - 1 reveal nothing.

The secret is f(0) of a random polynomial over the integers modulo a prime p, share x is f(x):

    f(x) = secret + a_1 x + ... + a_(t-1) x^(t-1)  mod p           a_i uniform in 0 ... p-1

    f |        * 2                      t points fix f, and by that f(0). With t - 1 points, each value of f(0) is
      | 1 *                             met by exactly one polynomial: all secrets are equally likely.
      *            * 3
      +--------------------> x          secret = sum over shares i of f(x_i) prod over j != i of x_j / (x_j - x_i)

p = 2^256 + 297, the least prime above 2^256: a secret has up to 32 bytes, a share 33. (Shamir, CACM 1979)"""

import secrets

PRIME = 2**256 + 297
SHARE = 33  # bytes of a share


def split(secret: bytes, threshold: int, count: int) -> list[bytes]:
    """Return shares for x = 1, ..., count; any `threshold` of them recover the secret of up to 32 bytes."""
    polynomial = [secrets.randbelow(PRIME) for _ in range(threshold - 1)] + [int.from_bytes(secret, "little")]
    shares = []
    for x in range(1, count + 1):
        value = 0
        for coefficient in polynomial:
            value = (value * x + coefficient) % PRIME
        shares.append(value.to_bytes(SHARE, "little"))
    return shares


def weights(points: list[int]) -> list[int]:
    """Return the Lagrange weights of shares at these points, which are the same for all secrets."""
    result = []
    for x in points:
        numerator = denominator = 1
        for other in points:
            if other != x:
                numerator = numerator * other % PRIME
                denominator = denominator * (other - x) % PRIME
        result.append(numerator * pow(denominator, -1, PRIME) % PRIME)
    return result


def join(shares: list[bytes], weights: list[int], length: int) -> bytes:
    """Return the secret of `length` bytes from shares and the `weights` of their points.
    Raises OverflowError, almost surely, if the shares do not belong together."""
    total = sum(int.from_bytes(share, "little") * weight for share, weight in zip(shares, weights, strict=True))
    return (total % PRIME).to_bytes(length, "little")
