"""Counter-based random numbers that depend on their purpose, not on the rank that draws them.

A generator is keyed by (seed, purpose, index...): the order of epoch 3 is the same for any number of ranks, and a run
that resumes needs no saved random state. The key is a BLAKE2 digest, the generator Philox4x64 (Salmon et al., "Parallel
random numbers: as easy as 1, 2, 3", SC 2011), so equal keys give equal streams on every machine."""

import hashlib

import numpy as np


class Random:
    """`Random(seed)(purpose, *index)` is an independent numpy Generator for that purpose and index."""

    def __init__(self, seed: int):
        self.seed = int(seed)

    def __call__(self, purpose: str, *index: int | str) -> np.random.Generator:
        text = repr((self.seed, purpose, tuple(i if isinstance(i, str) else int(i) for i in index)))
        digest = hashlib.blake2b(text.encode(), digest_size=16).digest()
        return np.random.Generator(np.random.Philox(key=np.frombuffer(digest, "<u8")))
