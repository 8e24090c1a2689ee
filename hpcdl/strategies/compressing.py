"""The option of strategies whose messages may be compressed (hpcdl/comm/compression/)."""

from dataclasses import dataclass
from typing import Any

from hpcdl.comm.gossip.topology import Topology
from hpcdl.errors import UsageError
from hpcdl.kernels.device import Array
from hpcdl.runs.options import Options, option
from hpcdl.strategies.description import CODING, Call, Communicator, Memory, Run, Workload


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


def check_averaging(spec: str, layout: Any) -> None:
    """Raise UsageError unless `spec` is none, or a method that fits the model and leaves the optimizer alone."""
    from hpcdl.comm.compression import check_model, parse

    if spec == "none":
        return
    if parse(spec)[0].optimizers:
        name = spec.partition(":")[0]
        raise UsageError(
            f"--compress {name} is a part of the optimizer of all-reduced gradients, and here models are averaged: "
            "take another method, or train-allreduce"
        )
    check_model(spec, layout)


def check_gossip(spec: str, graph: Topology) -> None:
    """Raise UsageError if CHOCO-SGD cannot compress the messages over this graph by `spec`."""
    check_codec(spec, "neighbours exchange models")
    if spec != "none" and graph.period != 1:
        raise UsageError(f"--compress needs a graph that stays the same, but {graph.spec} changes; take another")


def average_by_differences(comm: Communicator, w: Array, start: Array, state: Any) -> None:
    """w <- start + the mean over the ranks of w - start, in compressed messages. start: equal on all ranks."""
    from hpcdl.kernels.reduce import add_scaled

    add_scaled(w, start, -1.0)
    comm.all_reduce_compressed(w, state, op="mean")
    add_scaled(w, start, 1.0)


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
    from hpcdl.comm.compression import phases, plain_lengths

    bytes = (part.stop - part.start) * case.dtype.itemsize
    if spec == "none":
        return [Call("all_reduce", bytes, times)]
    plain = plain_lengths(spec, case.model.layout, part)
    if plain:
        factors = [Call("all_reduce", length * case.dtype.itemsize, times) for length in plain]
        return [*factors, Call(CODING + spec, bytes, times)]
    _, per_epoch, steps = case.plan
    named = [(share, "all_reduce" if own == "none" else own) for share, own in phases(spec, steps, per_epoch)]
    return [Call(operation, bytes, times * share) for share, operation in named]


def hold_kept(case: Workload, memory: Memory) -> None:
    """Add to `memory` what the method of --compress keeps from one all-reduce to the next."""
    from hpcdl.comm.compression import feedback_of, parse, plain_lengths

    spec = case.options.compress
    if spec != "none":
        case.hold(memory, "optimizer", feedback_of(spec) + parse(spec)[0].vectors)
        for length in plain_lengths(spec, case.model.layout, slice(0, case.length))[1:]:
            case.hold(memory, "optimizer", 1, length)  # PowerSGD's factors


def message_bytes(spec: str, case: Workload, values: int) -> int:
    """Return the bytes of the message of so many values by the codec of a method."""
    from hpcdl.comm.compression import make_codec

    return make_codec(spec, case.dtype).message_bytes(values)
