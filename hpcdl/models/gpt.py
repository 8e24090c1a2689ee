"""GPT: a decoder-only transformer, a language model of tokens.

    x -> token + position -> (attention -> feed-forward) x layers -> norm -> head -> softmax -> cross-entropy

A row of the data is `length` tokens, and y the token after them. The model predicts each of x's tokens from those
before it and y from all of them: `length` predictions a row, whose mean loss is the loss of the row. (Radford et al.,
"Language models are unsupervised multitask learners", 2019)

    parameters    12 layers width^2 + (vocabulary + context) width, and 13 layers width + 2 width of biases and norms
    operations    about 6 a parameter and token, forward and backward together
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from hpcdl.errors import UsageError
from hpcdl.kernels.device import CPU, Array, Device
from hpcdl.models import generation
from hpcdl.models.layered import Layered
from hpcdl.models.layers import Layer
from hpcdl.models.losses import SoftmaxCrossEntropy
from hpcdl.models.pool import Pool
from hpcdl.models.transformer import Attention, Embedding, FeedForward, Head, Norm

TOKENS = 4096  # scored at once


class GPT(Layered):
    """A model of sequences of `length` tokens, which are numbers below `vocabulary`.

    layers: number of blocks; width: of the vectors between them, divided among `heads` heads; context: the longest
    sequence with position vectors; tied: True if the head's weight is the token embedding.
    """

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
                f"take gpt:context={length}, or make shorter ones by prepare-data text --length {context}"
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
        """Return the outputs for the last token of each sequence."""
        return self.device.xp.ascontiguousarray(z.reshape(-1, self.features, z.shape[1])[:, -1])

    def generate(
        self,
        parameters: Array,
        prompt: Sequence[int],
        count: int,
        random: np.random.Generator,
        temperature: float = 1.0,
    ) -> list[int]:
        """Return `count` tokens that follow `prompt`, drawn from the softmax of z / temperature (generation.py).

        Temperature 0 takes the most probable token. An empty prompt is token 0. Raises UsageError for invalid tokens
        and for outputs z that are not finite.
        """
        return generation.generate(generation.cached_outputs(self, parameters), prompt, count, random, temperature)
