"""The option of strategies whose messages may be compressed (hpcdl/comm/compression/)."""

from dataclasses import dataclass

from hpcdl.errors import UsageError
from hpcdl.runs.options import Options, option


@dataclass(frozen=True)
class CompressOptions(Options):
    compress: str = option("none", "send compressed messages, as by bfloat16, int8, qsgd:bits=4, sign or topk:0.01")

    @property
    def advice(self) -> str:
        if self.compress.startswith("float16"):
            return "--compress float16 sends no value above 65504: --compress bfloat16 may help, or a smaller --lr"
        return super().advice

    @property
    def compresses(self) -> bool:
        return self.compress != "none"


def check_codec(spec: str, messages: str) -> None:
    """Raise UsageError unless `spec` is none or a method with a codec. messages: what the strategy sends."""
    from hpcdl.comm.compression import codecs, parse

    if spec != "none" and parse(spec)[0].name not in codecs():
        name, names = spec.partition(":")[0], ", ".join(codecs())
        raise UsageError(f"--compress {name} works in an all-reduce, and here {messages}; take one of {names}")


def check_model_differences(spec: str) -> None:
    """Raise UsageError unless `spec` is none or a method whose all-reduce leaves the optimizer alone."""
    from hpcdl.comm.compression import parse

    if spec != "none" and parse(spec)[0].optimizers:
        name = spec.partition(":")[0]
        raise UsageError(
            f"--compress {name} is a part of the optimizer of all-reduced gradients, and here models are averaged: "
            "take another method, or train-allreduce"
        )
