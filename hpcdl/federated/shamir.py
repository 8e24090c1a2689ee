"""Shamir's secret sharing: a secret in n shares, of which any t give it back and any t - 1 say nothing.

The secret is f(0) of a random polynomial over the integers modulo a prime p, share x is f(x):

    f(x) = secret + a_1 x + ... + a_(t-1) x^(t-1)  mod p           a_i uniform in 0 ... p-1

    f |        * 2                      t points fix f, and by that f(0). With t - 1 points, each value of f(0) is
      | 1 *                             met by exactly one polynomial: all secrets are equally likely.
      *            * 3
      +--------------------> x          secret = sum over shares i of f(x_i) prod over j != i of x_j / (x_j - x_i)

p = 2^256 + 297, the least prime above 2^256: a secret has up to 32 bytes, a share 33. A secret costs n t products.

(Shamir, "How to share a secret", CACM 1979)
"""

import secrets

PRIME = 2**256 + 297
SHARE = 33  # bytes of a share


def split(secret: bytes, threshold: int, count: int) -> list[bytes]:
    """The shares of x = 1, ..., count, any `threshold` of which give the secret of up to 32 bytes back."""
    polynomial = [secrets.randbelow(PRIME) for _ in range(threshold - 1)] + [int.from_bytes(secret, "little")]
    shares = []
    for x in range(1, count + 1):
        value = 0
        for coefficient in polynomial:
            value = (value * x + coefficient) % PRIME
        shares.append(value.to_bytes(SHARE, "little"))
    return shares


def weights(points: list[int]) -> list[int]:
    """What the shares of these points are multiplied by; the same for all secrets that were split for them."""
    found = []
    for x in points:
        above = below = 1
        for other in points:
            if other != x:
                above = above * other % PRIME
                below = below * (other - x) % PRIME
        found.append(above * pow(below, -1, PRIME) % PRIME)
    return found


def join(shares: list[bytes], weights: list[int], length: int) -> bytes:
    """The secret of `length` bytes from as many shares as it takes, with the `weights` of their points.

    Raises OverflowError where the shares do not belong together, but for chance.
    """
    total = sum(int.from_bytes(share, "little") * weight for share, weight in zip(shares, weights, strict=True))
    return (total % PRIME).to_bytes(length, "little")
