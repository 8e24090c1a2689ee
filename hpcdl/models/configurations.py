"""Well-known models by name: their layers, and the memory of their training state.

    model         layers  width   heads  vocabulary  context    a lecture's slide, 16 bytes a parameter
    bert-large        24   1024      16       30522      512       0.32 x 10^9 parameters       5.12 GB
    gpt2-xl           48   1600      25       50257     1024       1.5                         24
    turing-nlg        78   4256      28       50257     1024      17.2                        275
    gpt3              96  12288      96       50257     2048     175                        2,800

16 bytes a parameter is Adam's state, in float32 (parameter 4, gradient 4, two moments 8) and in 16 bit with master
weights (parameter 2, gradient 2, master weight 4, two moments 8) alike. Parameters are counted layer by layer by the
layout of our own `gpt` with these settings. BERT is an encoder: its layers have the same tensors, its layer norm stands
behind the embeddings instead of before the head, and `beyond` the gpt it has an embedding of two segments, 2 w, and a
pooler, w^2 + w, for width w.

(Devlin et al., "BERT", 2019; Radford et al., "Language models are unsupervised multitask learners", 2019; Rosset,
"Turing-NLG", 2020; Brown et al., "Language models are few-shot learners", 2020. State of 16 bytes: Rajbhandari et al.,
"ZeRO", SC 2020.)
"""

from dataclasses import dataclass
from typing import Any

from hpcdl.models import make_model
from hpcdl.models.meta_arrays import META

ADAM_BYTES = 16  # of a parameter: itself, its gradient, two moments; in 16 bit with master weights as many


@dataclass(frozen=True)
class Configuration:
    """A model by its numbers. nominal: parameters on a lecture's slide, in 10^9; slide: its GB of state."""

    layers: int
    width: int
    heads: int
    vocabulary: int
    context: int
    nominal: float
    slide: float
    encoder: bool = False

    @property
    def spec(self) -> str:
        """The model for --model; of an encoder, without its parameters beyond a gpt."""
        return f"gpt:layers={self.layers},width={self.width},heads={self.heads},context={self.context}"

    @property
    def beyond(self) -> int:
        """Parameters of an encoder beyond a gpt of these numbers: segment embedding and pooler."""
        return 2 * self.width + self.width**2 + self.width if self.encoder else 0

    def model(self) -> Any:
        """Return the gpt on arrays without memory."""
        return make_model(self.spec, (self.context,), self.vocabulary, device=META, text=True)

    def by_layer(self) -> list[tuple[str, int]]:
        """Return (layer, its parameters) in the layout's order; tied ones count where they lie."""
        found = [(name, own.stop - own.start) for name, own in self.model().layout.layer_slices]
        return [*found, ("segments and pooler", self.beyond)] if self.beyond else found

    @property
    def parameters(self) -> int:
        """The number of parameters."""
        return sum(count for _, count in self.by_layer())


CONFIGURATIONS = {
    "bert-large": Configuration(24, 1024, 16, 30522, 512, 0.32, 5.12, encoder=True),
    "gpt2-xl": Configuration(48, 1600, 25, 50257, 1024, 1.5, 24.0),
    "turing-nlg": Configuration(78, 4256, 28, 50257, 1024, 17.2, 275.0),
    "gpt3": Configuration(96, 12288, 96, 50257, 2048, 175.0, 2800.0),
}
