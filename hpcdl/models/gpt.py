"""GPT: a decoder-only transformer, a language model of tokens.

    x -> token + position -> (attention -> feed-forward) x layers -> norm -> head -> softmax -> cross-entropy

    parameters    12 L w^2 + (V + C) w, and 13 L w + 2 w of biases and norms      L layers, width w, V tokens, context C
    operations    about 6 per parameter and token, forward and backward together

The model predicts each token of a row x (length,) from the tokens before it, and y from all of x: `length` predictions,
whose mean loss is the row's. (Radford et al., "Language models are unsupervised multitask learners", 2019)"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.random import Generator
from numpy.typing import DTypeLike

from hpcdl.errors import UsageError
from hpcdl.kernels.device import CPU, Array, Device
from hpcdl.models.generation import cached_outputs
from hpcdl.models.layered import Layered
from hpcdl.models.layers import Layer
from hpcdl.models.losses import SoftmaxCrossEntropy
from hpcdl.models.pool import Pool
from hpcdl.models.transformer import Attention, Embedding, FeedForward, Head, Norm

TOKENS = 4096  # tokens that are scored at once


class GPT(Layered):
    """A model of sequences of `length` tokens, which are numbers below `vocabulary`.
    layers: number of blocks. width: elements of a token's vector, divided among `heads` heads. context: the longest
    sequence with position vectors. tied: True if the head's weight is the token embedding."""

    sequences = True

    def __init__(
        self,
        length: int,
        vocabulary: int,
        dtype: DTypeLike,
        layers: int = 4,
        width: int = 128,
        heads: int = 4,
        context: int = 64,
        tied: bool = True,
        device: Device = CPU,
    ):
        for name, value in {"layers": layers, "width": width, "heads": heads, "context": context}.items():
            if value < 1:
                raise UsageError(f"model gpt: {name} must be 1 or more, not {value}")
        if width % heads:
            raise UsageError(f"model gpt: width {width} cannot be divided evenly among {heads} heads")
        if length > context:
            raise UsageError(
                f"the data's sequences have {length} tokens, the model's context is {context}; "
                f"take gpt:context={length}, or make shorter sequences by prepare-data text --length {context}"
            )
        pool, depth = Pool(dtype, device), 2 * layers
        chain: list[Layer] = [Embedding("embedding", pool, vocabulary, context, length, width)]
        for i in range(1, layers + 1):
            chain.append(Attention(f"block{i}.attention", pool, length, width, heads, depth))
            chain.append(FeedForward(f"block{i}.mlp", pool, length, width, depth))
        chain.append(Norm("norm", pool, length, width))
        chain.append(Head("head", pool, vocabulary, length, width, "embedding.token" if tied else ""))
        super().__init__(length, [*chain, SoftmaxCrossEntropy(pool, vocabulary, length)], pool)
        self.rows_at_once = max(1, TOKENS // length)

    def targets(self, batch: Any) -> Array:
        """Return the token after each token of the batch, (rows * length,)."""
        xp = self.device.xp
        targets = xp.empty(batch.x.shape, np.int64)
        with np.errstate(invalid="ignore"):  # the embedding reports NaN as an error
            targets[:, :-1] = batch.x[:, 1:]
        targets[:, -1] = batch.y
        return targets.reshape(-1)

    def last_rows(self, z: Array) -> Array:
        return self.device.xp.ascontiguousarray(z.reshape(-1, self.features, z.shape[1])[:, -1])

    def generate(
        self, parameters: Array, prompt: Sequence[int], count: int, random: Generator, temperature: float = 1.0
    ) -> list[int]:
        """Return `count` tokens that follow `prompt`, drawn from the softmax of z / temperature (generation.py).
        Temperature 0: the most probable token. Empty prompt: token 0. UsageError: unknown tokens, or z not finite."""
        outputs, tokens = cached_outputs(self, parameters), list(prompt) or [0]
        start = len(tokens)
        for _ in range(count):
            z = outputs(tokens)
            if not np.isfinite(z).all():
                raise UsageError("the model's outputs are not finite: its training diverged; take an older checkpoint")
            if temperature == 0:
                tokens.append(int(z.argmax()))
                continue
            with np.errstate(over="ignore"):  # close to temperature 0
                p = np.exp((z - z.max()) / temperature)
            tokens.append(int(random.choice(len(p), p=p / p.sum())))
        return tokens[start:]
