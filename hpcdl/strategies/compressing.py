"""The option of strategies whose messages may be compressed (hpcdl/comm/compression/)."""

from dataclasses import dataclass
from typing import Any

from hpcdl.errors import UsageError
from hpcdl.runs.options import Options, option
from hpcdl.strategies.description import Call, Run, Workload


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


def track_state(run: Run, state: Any) -> None:
    """Have the checkpoint hold what a `Compressed` keeps from one all-reduce to the next."""
    from hpcdl.checkpoint.state import KeptResidual, Same

    for name, vector in state.tracked.items():
        run.track(name, KeptResidual(vector))
    for name, vector in state.common.items():
        run.track(name, Same(vector))
    run.report(allreduce="compressed")


def reduction_calls(spec: str, case: Workload, part: slice, times: float = 1.0) -> list[Call]:
    """Return the all-reduces of slice `part` of the vector by a method, or by none; so many times a step."""
    from hpcdl.comm.compression import plain_lengths

    plain = () if spec == "none" else plain_lengths(spec, case.model.layout, part)
    if plain:
        return [Call("all_reduce", length * case.dtype.itemsize, times) for length in plain]
    operation = "all_reduce" if spec == "none" else spec
    return [Call(operation, (part.stop - part.start) * case.dtype.itemsize, times)]


def message_bytes(spec: str, case: Workload, values: int) -> int:
    """Return the bytes of the message of so many values by the codec of a method."""
    from hpcdl.comm.compression import make_codec

    return make_codec(spec, case.dtype).message_bytes(values)
