"""A backend of torch.distributed: its process groups are hpcdl's communicators.

    all_reduce, reduce             by HPCDL_ALLREDUCE where hpcdl's kernels know type and operation; others (16 bits,
                                   complex, bool; product, bits) in chunks that are folded on arrival (comm/exchange.py)
    broadcast, all_gather_single   tree, ring
    reduce_scatter, all_gather,    one step: each rank sends its part directly to every other
      gather, scatter, all_to_all
    send, recv, barrier            push, wait, barrier

A blocking call on a CPU tensor takes the direct path (comm/call_path.py), in the tensor's own memory. Lists of tensors
hold one tensor per process, as for gloo: a process has one device.
"""

import datetime
import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, distributed
from torch.distributed import ReduceOp
from torch.distributed.distributed_c10d import AllgatherOptions, Work

from hpcdl.chunks import chunks
from hpcdl.comm.allreduce.ring import ring_all_gather
from hpcdl.comm.allreduce.tree import tree_broadcast
from hpcdl.comm.diagnostics.call_signature import Call
from hpcdl.comm.exchange import (
    Message,
    exchange,
    folded_all_reduce,
    folded_reduce,
    folded_reduce_scatter,
    folding,
)
from hpcdl.comm.operations import reducible
from hpcdl.comm.point_to_point import ANY
from hpcdl.errors import UsageError
from hpcdl.torch.arrays import CODED, Back, all_back, array_to_fill, array_to_send, element_type, memory_of
from hpcdl.torch.monitored import monitored_barrier
from hpcdl.torch.process_group import CommunicatorGroup
from hpcdl.torch.work import DONE, engine

Op = ReduceOp.RedOpType
NAMES = {Op.SUM: "sum", Op.AVG: "mean", Op.MAX: "max", Op.MIN: "min", Op.PRODUCT: "product"}
NAMES |= {Op.BAND: "and", Op.BOR: "or", Op.BXOR: "xor", Op.PREMUL_SUM: "sum"}
DIRECT = ("sum", "mean", "max", "min")  # operations of Communicator.all_reduce
KNOWN = {kind for kind in (torch.float32, torch.float64, torch.int8, torch.int16, torch.int32, torch.int64)}
KNOWN |= {torch.uint8, torch.uint16, torch.uint32, torch.uint64}


class Refused(UsageError, ValueError):
    """An invalid operation: a UsageError, and a ValueError for programs that catch PyTorch's."""


@functools.cache
def reduction_of(op: Any, kind: torch.dtype) -> tuple[str, bool, bool]:
    """Return for a reduction: its name, True if the communicator has it, True if the result is to be divided."""
    name = NAMES[op]
    if name == "mean" and not (kind.is_floating_point or kind.is_complex):
        raise Refused(f"ReduceOp.AVG is for floating-point tensors, not for {kind}; take SUM")
    if name in ("and", "or", "xor") and (kind.is_floating_point or kind.is_complex):
        raise Refused(f"ReduceOp.B{name.upper()} is for tensors of integers, not for {kind}")
    if name in ("max", "min") and kind.is_complex:
        raise Refused(f"ReduceOp.{name.upper()} is for tensors of numbers that have an order, not for {kind}")
    if (kind.is_floating_point and kind.itemsize == 1) or kind is torch.complex32:
        raise Refused(f"tensors of {kind} cannot be reduced; convert them first")
    direct = name in DIRECT and kind in KNOWN
    return name if direct or name != "mean" else "sum", direct, name == "mean" and not direct


def only(tensors: Sequence[Tensor]) -> Tensor:
    """Return the only tensor of this process; raises Refused for any other number."""
    if len(tensors) != 1:
        raise Refused(f"the backend hpcdl takes one tensor from each process, not {len(tensors)}")
    return tensors[0]


class BackendGroup(CommunicatorGroup):
    """A process group over a communicator: its operations."""

    # -- reductions --------------------------------------------------------------------------------------------------

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> Work:
        opts = distributed.AllreduceOptions() if opts is None else opts
        tensor = only(tensors)
        name, direct, divides = reduction_of(opts.reduceOp.op, tensor.dtype)
        self._scale(tensor, opts.reduceOp)
        if direct:
            vector: Any = memory_of(tensor) if tensor.is_cpu else self._on_gpu(tensor)
            back: Back = None
            if vector is None:
                vector, back = array_to_fill(tensor)
            if not opts.asyncOp and engine.alone() and not self.limit:
                with engine.lock:
                    self.comm.all_reduce(vector, name)
                if back is not None:
                    back()
                if engine.finished:
                    engine.settle()
                return DONE
            return self._started(lambda: [self.comm.iall_reduce(vector, name)], [tensor], back)
        vector, back = array_to_fill(tensor)
        fold = folding(name, CODED.get(tensor.dtype))
        call = call_of("all_reduce", tensor, vector.size, NAMES[opts.reduceOp.op])
        return self._run(
            opts.asyncOp,
            call,
            lambda comm: folded_all_reduce.steps(comm, vector, fold),
            [tensor],
            all_back(back, (lambda: tensor.detach().div_(self.ranks)) if divides else None),
        )

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any = None) -> Work:
        opts = distributed.AllreduceCoalescedOptions() if opts is None else opts
        if len(tensors) == 1:
            return self.allreduce(tensors, opts)
        flat = torch.cat([each.detach().reshape(-1) for each in tensors])
        work = self.allreduce([flat], opts)

        def back() -> None:
            for each, part in zip(tensors, flat.split([each.numel() for each in tensors]), strict=True):
                each.detach().copy_(part.view(each.shape))

        return self._after(work, back, tensors)

    def reduce(self, tensors: list[Tensor], opts: Any) -> Work:
        tensor, root = only(tensors), opts.rootRank
        name, direct, divides = reduction_of(opts.reduceOp.op, tensor.dtype)
        self._scale(tensor, opts.reduceOp)
        vector, back = array_to_fill(tensor)
        if self.me != root:
            back, divides = None, False
        if direct and name != "mean":
            return self._do(
                opts.asyncOp,
                lambda: self.comm.reduce(vector, root, name),
                lambda: self.comm.ireduce(vector, root, name),
                [tensor],
                back,
            )
        if name == "mean":
            name, divides = "sum", self.me == root
        fold = folding(name, CODED.get(tensor.dtype))
        call = call_of("reduce", tensor, vector.size, NAMES[opts.reduceOp.op], root)
        return self._run(
            opts.asyncOp,
            call,
            lambda comm: folded_reduce.steps(comm, vector, fold, root),
            [tensor],
            all_back(back, (lambda: tensor.detach().div_(self.ranks)) if divides else None),
        )

    def reduce_scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None) -> Work:
        opts = distributed.ReduceScatterOptions() if opts is None else opts
        return self._reduce_scatter(only(outputs), [array_to_send(each) for each in inputs[0]], opts)

    def reduce_scatter_single(self, output: Tensor, source: Tensor, opts: Any = None) -> Work:
        opts = distributed.ReduceScatterOptions() if opts is None else opts
        if source.numel() != output.numel() * self.ranks or output.dtype != source.dtype:
            raise Refused(
                f"rank {self.me}: a reduce-scatter into {output.numel()} {output.dtype} on {self.ranks} ranks takes "
                f"{output.numel() * self.ranks}, not {source.numel()} {source.dtype}"
            )
        vector = array_to_send(source)
        return self._reduce_scatter(output, [vector[each] for each in chunks(vector.size, self.ranks)], opts)

    _reduce_scatter_base = reduce_scatter_single

    def _reduce_scatter(self, output: Tensor, parts: list[np.ndarray], opts: Any) -> Work:
        name, _, divides = reduction_of(opts.reduceOp.op, output.dtype)
        if len(parts) != self.ranks or parts[self.me].size != output.numel():
            raise Refused(f"rank {self.me}: a reduce-scatter takes a tensor for each rank, as long as its output")
        if opts.reduceOp.op == Op.PREMUL_SUM:
            parts = [each * opts.reduceOp.factor for each in parts]
        name, divides = ("sum", True) if name == "mean" else (name, divides)
        fold = folding(name, CODED.get(output.dtype))
        into, back = array_to_fill(output, filled=False)
        call = call_of("reduce_scatter", output, sum(each.size for each in parts), NAMES[opts.reduceOp.op])
        return self._run(
            opts.asyncOp,
            call,
            lambda comm: folded_reduce_scatter.steps(comm, parts, into, fold),
            [output],
            all_back(back, (lambda: output.detach().div_(self.ranks)) if divides else None),
        )

    def reduce_scatter_single_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> Work:
        pairs = zip(outputs, inputs, strict=True)
        return self._all([self.reduce_scatter_single(output, source, opts) for output, source in pairs], outputs)

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    # -- what is handed on as it is -----------------------------------------------------------------------------------

    def broadcast(self, tensors: list[Tensor], opts: Any) -> Work:
        tensor, root = only(tensors), opts.rootRank
        vector, back = array_to_fill(tensor)
        return self._run(
            opts.asyncOp,
            call_of("broadcast", tensor, vector.size, root=root),
            lambda comm: tree_broadcast.steps(comm, vector, root, met=True),
            [tensor],
            back if self.me != root else None,
        )

    def all_gather_single(self, output: Tensor, source: Tensor, opts: Any = None) -> Work:
        opts = AllgatherOptions() if opts is None else opts
        if output.numel() != source.numel() * self.ranks or output.dtype != source.dtype:
            raise Refused(
                f"rank {self.me}: an all-gather of {source.numel()} {source.dtype} on {self.ranks} ranks gives "
                f"{source.numel() * self.ranks}, not {output.numel()} {output.dtype}"
            )
        vector, back = array_to_fill(output, filled=False)
        np.copyto(vector[chunks(vector.size, self.ranks)[self.me]], array_to_send(source))
        call = call_of("all_gather", output, vector.size)
        return self._run(opts.asyncOp, call, lambda comm: ring_all_gather.steps(comm, vector), [output], back)

    _allgather_base = all_gather_single

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> Work:
        opts = AllgatherOptions() if opts is None else opts
        source, into = array_to_send(only(inputs)), outputs[0]
        self._one_for_each(into, inputs[0].dtype)
        places, back = self._places(into)
        copy_into(places[self.me], source, self.me)
        call = call_of("all_gather", inputs[0], sum(each.size for each in places))
        sends = [(source, other) for other in self.others]
        receives = [(places[other], other) for other in self.others]
        return self._exchange(opts.asyncOp, call, sends, receives, into, back)

    def all_gather_single_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> Work:
        pairs = zip(outputs, inputs, strict=True)
        return self._all([self.all_gather_single(output, source, opts) for output, source in pairs], outputs)

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def allgather_coalesced(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> Work:
        works = [
            self.allgather([[row[number] for row in outputs]], [source], opts) for number, source in enumerate(inputs)
        ]
        return self._all(works, [each for row in outputs for each in row])

    def gather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any) -> Work:
        source, root = array_to_send(only(inputs)), opts.rootRank
        call = call_of("gather", inputs[0], source.size, root=root)
        if self.me != root:
            return self._exchange(opts.asyncOp, call, [(source, root)], [], [], None)
        into = outputs[0]
        self._one_for_each(into, inputs[0].dtype, inputs[0].numel())
        places, back = self._places(into)
        copy_into(places[root], source, root)
        receives = [(places[other], other) for other in self.others]
        return self._exchange(opts.asyncOp, call, [], receives, into, back)

    def scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any) -> Work:
        output, root = only(outputs), opts.rootRank
        place, back = array_to_fill(output, filled=False)
        call = call_of("scatter", output, place.size, root=root)
        if self.me != root:
            return self._exchange(opts.asyncOp, call, [], [(place, root)], outputs, back)
        self._one_for_each(inputs[0], output.dtype, output.numel())
        parts = [array_to_send(each) for each in inputs[0]]
        copy_into(place, parts[root], root)
        return self._exchange(opts.asyncOp, call, [(parts[other], other) for other in self.others], [], outputs, back)

    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> Work:
        opts = distributed.AllToAllOptions() if opts is None else opts
        self._one_for_each(inputs, inputs[0].dtype if inputs else None)
        self._one_for_each(outputs, inputs[0].dtype)
        places, back = self._places(outputs)
        return self._to_all(opts.asyncOp, places, [array_to_send(each) for each in inputs], outputs, back)

    def all_to_all_single(
        self, output: Tensor, source: Tensor, output_sizes: list[int], input_sizes: list[int], opts: Any = None
    ) -> Work:
        opts = distributed.AllToAllOptions() if opts is None else opts
        place, back = array_to_fill(output, filled=False)
        places = self._parts(place, output, output_sizes)
        return self._to_all(
            opts.asyncOp, places, self._parts(array_to_send(source), source, input_sizes), [output], back
        )

    alltoall_base = all_to_all_single

    def _parts(self, vector: np.ndarray, tensor: Tensor, sizes: Sequence[int]) -> list[np.ndarray]:
        """Return the part of each rank; sizes: in rows of the tensor; none: equal parts."""
        rows = tensor.size(0) if tensor.dim() else tensor.numel()
        if not sizes:
            if rows % self.ranks:
                raise Refused(f"rank {self.me}: {rows} rows do not divide among {self.ranks} ranks; give the sizes")
            sizes = [rows // self.ranks] * self.ranks
        if len(sizes) != self.ranks or sum(sizes) != rows:
            raise Refused(f"rank {self.me}: the sizes {list(sizes)} are not those of {rows} rows on {self.ranks} ranks")
        ends = np.cumsum(sizes) * (vector.size // rows if rows else 0)
        return [vector[end - length : end] for end, length in zip(ends, np.diff(ends, prepend=0), strict=True)]

    def _to_all(
        self, later: bool, places: list[np.ndarray], parts: list[np.ndarray], outputs: list[Tensor], back: Back
    ) -> Work:
        copy_into(places[self.me], parts[self.me], self.me)
        call = call_of("all_to_all", outputs[0], 0)
        sends = [(parts[other], other) for other in self.others]
        receives = [(places[other], other) for other in self.others]
        return self._exchange(later, call, sends, receives, outputs, back)

    # -- point to point -----------------------------------------------------------------------------------------------

    def send(self, tensors: list[Tensor], to: int, tag: int = 0) -> Work:
        vector, kind = array_to_send(only(tensors)), kind_of(tensors[0])
        return self._started(lambda: [self.comm.ipush_labelled(vector, kind, to, tag)], tensors, None)

    def recv(self, tensors: list[Tensor], source: int, tag: int = 0) -> Work:
        vector, back = array_to_fill(only(tensors), filled=False)
        kind = kind_of(tensors[0])
        return self._started(lambda: [self.comm.iwait_labelled(vector, kind, source, tag)], tensors, back)

    def recv_anysource(self, tensors: list[Tensor], tag: int = 0) -> Work:
        return self.recv(tensors, ANY, tag)

    # -- barriers -----------------------------------------------------------------------------------------------------

    def barrier(self, opts: Any = None) -> Work:
        opts = distributed.BarrierOptions() if opts is None else opts
        seconds = opts.timeout.total_seconds()
        if seconds > 0 and not opts.asyncOp:
            work = self._started(lambda: [self.comm.ibarrier()], [], None)
            work.wait(opts.timeout)
            return DONE
        return self._do(opts.asyncOp, self.comm.barrier, self.comm.ibarrier, [], None)

    def monitored_barrier(self, timeout: datetime.timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """Wait for all ranks; RuntimeError on all if some are missing in time, which rank 0 names."""
        self.barriers += 1
        with engine.exclusive():
            seconds = (timeout or self.timeout).total_seconds()
            monitored_barrier(self.comm.mpi, self.barriers, seconds, wait_all_ranks)

    # -- shared parts -------------------------------------------------------------------------------------------------

    def _scale(self, tensor: Tensor, op: Any) -> None:
        if op.op == Op.PREMUL_SUM:
            tensor.detach().mul_(op.factor)

    def _on_gpu(self, tensor: Tensor) -> Any:
        """Return the tensor as a GPU array if the MPI library takes that; else None."""
        if self.comm.exchange != "direct" or not tensor.is_contiguous():
            return None
        import cupy

        return cupy.from_dlpack(tensor.detach().view(-1))

    def _one_for_each(self, tensors: Sequence[Tensor], kind: torch.dtype | None, size: int | None = None) -> None:
        """Raise Refused unless these are one tensor per rank, all of this type and, if given, length."""
        if len(tensors) != self.ranks:
            raise Refused(f"rank {self.me}: {len(tensors)} tensors are not one for each of {self.ranks} ranks")
        for rank, each in enumerate(tensors):
            if each.dtype is not kind or size not in (None, each.numel()):
                expected = kind if size is None else f"{size} elements of {kind}"
                raise Refused(
                    f"rank {self.me}: the tensor for rank {rank} is of {each.numel()} elements of {each.dtype}, and "
                    f"should be of {expected}"
                )

    def _places(self, tensors: Sequence[Tensor]) -> tuple[list[np.ndarray], Back]:
        pairs = [array_to_fill(tensor, filled=False) for tensor in tensors]
        return [vector for vector, _ in pairs], all_back(*(back for _, back in pairs))

    def _exchange(
        self,
        later: bool,
        call: Call,
        sends: Sequence[Message],
        receives: Sequence[Message],
        outputs: list[Tensor],
        back: Back,
    ) -> Work:
        return self._run(later, call, lambda comm: exchange.steps(comm, sends, receives), outputs, back)

    def split_group(
        self, ranks: list[int], timeout: Any = None, opts: Any = None, **about: Any
    ) -> "BackendGroup | None":
        """Return the group of these ranks, which make the call together; None on the others."""
        if self.me not in ranks:
            return None
        name = about.get("group_name") or f"{self.known_as}:{','.join(map(str, ranks))}"
        with engine.exclusive():
            comm = self.comm.subgroup(sorted(ranks), name)
        return BackendGroup(comm, name, self.store, timeout or self.timeout)

    splitGroup = split_group


def call_of(name: str, tensor: Tensor, size: int, op: str = "", root: int = 0) -> Call:
    """Return the call signature, which ranks compare, of an operation on tensors of this type."""
    return name, element_type(tensor.dtype), size, op, root


def kind_of(tensor: Tensor) -> str:
    """Return the name of a tensor's type, as messages carry it."""
    return str(tensor.dtype).removeprefix("torch.")


def copy_into(place: np.ndarray, source: np.ndarray, rank: int) -> None:
    """Copy a rank's own part, which no message carries."""
    if place.size != source.size or place.dtype != source.dtype:
        raise Refused(
            f"rank {rank}: {source.size} elements of {source.dtype} do not fit into {place.size} of {place.dtype}"
        )
    np.copyto(place, source)


assert all(reducible(torch.empty(0, dtype=kind).numpy().dtype) for kind in KNOWN)
