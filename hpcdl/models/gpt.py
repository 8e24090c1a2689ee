"""GPT: a decoder-only transformer, a language model of tokens.

    x -> token + position -> (attention -> feed-forward) x layers -> norm -> head -> softmax -> cross-entropy

    parameters    12 L w^2 + (V + C) w, and 13 L w + 2 w of biases and norms      L layers, width w, V tokens, context C
    operations    about 6 per parameter and token, forward and backward together

Settings make today's models of it (docs/gpt.md): `--model llama` is RMSNorm, rotary positions, SwiGLU, grouped-query
attention, a head of its own and no biases (Touvron et al., "LLaMA", 2023; "The Llama 3 herd of models", 2024). With
`experts=8`, each block has a mixture of experts (mixture.py); with `latent=64`, latent attention (latent_attention.py).

The model predicts each token of a row x (length,) from the tokens before it, and y from all of x: `length` predictions,
whose mean loss is the row's. (Radford et al., "Language models are unsupervised multitask learners", 2019)"""

import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.random import Generator
from numpy.typing import DTypeLike

from hpcdl.errors import UsageError, unknown
from hpcdl.kernels.device import CPU, Array, Device
from hpcdl.models.attention import Attention
from hpcdl.models.feed_forward import FEED_FORWARDS
from hpcdl.models.generation import cached_outputs
from hpcdl.models.latent_attention import Latent, LatentAttention
from hpcdl.models.layered import Layered
from hpcdl.models.layers import Layer
from hpcdl.models.losses import SoftmaxCrossEntropy
from hpcdl.models.mixture import Experts, MixtureOfExperts
from hpcdl.models.normalization import NORMALIZATIONS
from hpcdl.models.pool import Pool
from hpcdl.models.transformer import Architecture, Embedding, Head, Norm

TOKENS = 4096  # tokens that are scored at once


def choice(setting: str, value: str, known: Iterable[str]) -> str:
    """Return the value of a setting. Raises UsageError if it is none of `known`."""
    if value not in known:
        raise unknown(f"{setting} of a gpt", value, known)
    return value


class GPT(Layered):
    """A model of sequences of `length` tokens, which are numbers below `vocabulary`.
    layers: number of blocks. width: elements of a token's vector, divided among `heads` heads. context: the longest
    sequence. tied: True if the head's weight is the token embedding. kv_heads: heads of keys and values; 0: `heads`.
    norm: layer or rms. positions: learned or rotary, the latter with angles of the base rope_base. feed_forward: gelu
    or swiglu, with `units` units; 0: by the width. biases: False if products have none. experts: number of feed-forward
    networks of a block, of which each token takes `top` (mixture.py); 0: one network, and no router. capacity, balance,
    z, shared: of `Experts`. dense: number of first blocks without experts, whose networks have `dense_units` units; 0:
    by the width. latent: width of the vector from which keys and values of all heads come (latent_attention.py), with
    query_latent, rope_width and head_width; 0: each has its own. name: the model's in errors."""

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
        *,
        kv_heads: int = 0,
        norm: str = "layer",
        positions: str = "learned",
        rope_base: float = 10_000.0,
        feed_forward: str = "gelu",
        units: int = 0,
        biases: bool = True,
        experts: int = 0,
        top: int = 2,
        capacity: str = "none",
        balance: float = 0.01,
        z: float = 0.001,
        shared: int = 0,
        dense: int = 0,
        dense_units: int = 0,
        latent: int = 0,
        query_latent: int = 0,
        rope_width: int = 0,
        head_width: int = 0,
        name: str = "gpt",
    ):
        told = f"model {name}"
        for setting, value in {"layers": layers, "width": width, "heads": heads, "context": context}.items():
            if value < 1:
                raise UsageError(f"{told}: {setting} must be 1 or more, not {value}")
        for setting, value in {"kv-heads": kv_heads, "units": units, "dense-units": dense_units}.items():
            if value < 0:
                raise UsageError(f"{told}: {setting} must be 1 or more, or 0 for the default, not {value}")
        mixed = Experts.of_settings(told, experts, top, capacity, balance, z, shared)
        if not mixed and (shared or dense or dense_units):
            raise UsageError(f"{told}: shared, dense and dense-units are settings of a mixture: add experts=8")
        if mixed and not 0 <= dense < layers:
            raise UsageError(f"{told}: dense {dense} of {layers} blocks; take a number from 0 to {layers - 1}")
        low = Latent.of_settings(told, latent, query_latent, rope_width, head_width, width, heads)
        if width % heads and not low:
            raise UsageError(f"{told}: width {width} cannot be divided evenly among {heads} heads")
        kv_heads = heads if low else kv_heads or heads
        if heads % kv_heads:
            fit = ", ".join(str(n) for n in range(1, heads + 1) if heads % n == 0)
            raise UsageError(f"{told}: heads {heads} cannot be divided evenly among kv-heads {kv_heads}; take {fit}")
        rotary = choice("positions", positions, ("learned", "rotary")) == "rotary"
        if low and not rotary:
            raise UsageError(f"{told}: latent attention has rotary positions: add positions=rotary, or take llama")
        if rotary and not low and width // heads % 2:
            raise UsageError(f"{told}: rotary positions turn pairs, and heads have {width // heads} elements each")
        if not (math.isfinite(rope_base) and rope_base > 0):
            raise UsageError(f"{told}: rope-base must be a finite number greater than 0, not {rope_base}")
        if length > context:
            raise UsageError(
                f"the data's sequences have {length} tokens, the model's context is {context}; "
                f"take {name}:context={length}, or make shorter sequences by prepare-data text --length {context}"
            )
        made_of = FEED_FORWARDS[choice("feed-forward", feed_forward, FEED_FORWARDS)]
        architecture = Architecture(
            length,
            width,
            heads,
            kv_heads,
            units or made_of.default_units(width),
            context,
            2 * layers,
            NORMALIZATIONS[choice("norm", norm, NORMALIZATIONS)],
            rope_base if rotary else 0.0,
            biases,
        )
        plain = dataclasses.replace(architecture, units=dense_units or made_of.default_units(width))  # before mixtures
        pool = Pool(dtype, device)
        chain: list[Layer] = [Embedding("embedding", pool, vocabulary, architecture)]
        for i in range(1, layers + 1):
            block, own = f"block{i}", (pool, architecture)
            chain.append(
                LatentAttention(f"{block}.attention", *own, low) if low else Attention(f"{block}.attention", *own)
            )
            if mixed and i > dense:
                chain.append(MixtureOfExperts(f"{block}.mlp", *own, mixed, made_of))
            else:
                chain.append(made_of(f"{block}.mlp", pool, plain if mixed else architecture))
        chain.append(Norm("norm", pool, architecture))
        chain.append(Head("head", pool, vocabulary, architecture, "embedding.token" if tied else ""))
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
