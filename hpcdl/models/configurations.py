"""Well-known models by name: their layers, and the memory of their training state.

Adam takes 16 bytes a parameter, both in float32 (parameter 4, gradient 4, two moments 8) and in 16 bit with master
weights (parameter 2, gradient 2, master weight 4, two moments 8). Parameters are counted by the layout of our own `gpt`
or `llama` with these settings. BERT is an encoder: the same tensors in its layers, and further tensors (`beyond`).
(16 bytes: Rajbhandari et al., "ZeRO", SC 2020. Each configuration names its own source)"""

from dataclasses import dataclass

from hpcdl.models import make_model
from hpcdl.models.meta_arrays import META

ADAM_BYTES = 16  # per parameter


@dataclass(frozen=True)
class Configuration:
    """The settings of a model. nominal: 10^9 parameters, as its source or a lecture's slide says. slide: GB of training
    state on the slide; None: not there. more: further settings of the spec. source: authors, title and year."""

    layers: int
    width: int
    heads: int
    vocabulary: int
    context: int
    nominal: float
    slide: float | None
    source: str
    encoder: bool = False
    kind: str = "gpt"
    more: str = ""

    @property
    def spec(self) -> str:
        """The spec for --model; for an encoder, without the parameters of `beyond`."""
        shape = f"layers={self.layers},width={self.width},heads={self.heads}"
        return f"{self.kind}:{shape}{self.more},context={self.context}"

    @property
    def beyond(self) -> int:
        """Number of parameters in an encoder's segment embedding, 2 w, and pooler, w^2 + w, for width w; gpt: 0."""
        return 2 * self.width + self.width**2 + self.width if self.encoder else 0

    def by_layer(self) -> list[tuple[str, int]]:
        """Return (layer, number of its parameters) in the layout's order; tied tensors count once."""
        model = make_model(self.spec, (self.context,), self.vocabulary, device=META, text=True)
        found = [(name, own.stop - own.start) for name, own in model.layout.layer_slices]
        return [*found, ("segments and pooler", self.beyond)] if self.beyond else found

    @property
    def parameters(self) -> int:
        return sum(count for _, count in self.by_layer())


BERT = 'Devlin et al., "BERT", 2019'
GPT2 = 'Radford et al., "Language models are unsupervised multitask learners", 2019'
NLG = 'Rosset, "Turing-NLG", 2020'
GPT3 = 'Brown et al., "Language models are few-shot learners", 2020'
LLAMA3 = 'Llama Team, "The Llama 3 herd of models", 2024, table 3'
MIXTRAL = 'Jiang et al., "Mixtral of experts", 2024, table 1'
DEEPSEEK = 'DeepSeek-AI, "DeepSeek-V3 technical report", 2024, section 4.2; without multi-token prediction'
EXPERTS = ",units=2048,experts=256,top=8,shared=1,dense=3,dense-units=18432,rope-base=10000"
LATENT = ",latent=512,query-latent=1536,rope-width=64,head-width=128"

CONFIGURATIONS = {  # layers, width, heads, vocabulary, context; 10^9 parameters, GB of state on the slide
    "bert-large": Configuration(24, 1024, 16, 30522, 512, 0.32, 5.12, BERT, encoder=True),
    "gpt2-xl": Configuration(48, 1600, 25, 50257, 1024, 1.5, 24.0, GPT2),
    "turing-nlg": Configuration(78, 4256, 28, 50257, 1024, 17.2, 275.0, NLG),
    "gpt3": Configuration(96, 12288, 96, 50257, 2048, 175.0, 2800.0, GPT3),
    "llama3-8b": Configuration(
        32, 4096, 32, 128256, 8192, 8.0, None, LLAMA3, kind="llama", more=",kv-heads=8,units=14336"
    ),
    "llama3-70b": Configuration(
        80, 8192, 64, 128256, 8192, 70.0, None, LLAMA3, kind="llama", more=",kv-heads=8,units=28672"
    ),
    "mixtral-8x7b": Configuration(
        32, 4096, 32, 32000, 32768, 46.7, None, MIXTRAL, kind="llama", more=",kv-heads=8,units=14336,experts=8,top=2"
    ),
    "deepseek-v3": Configuration(
        61, 7168, 128, 129280, 4096, 671.0, None, DEEPSEEK, kind="llama", more=EXPERTS + LATENT
    ),
}
