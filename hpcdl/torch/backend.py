"""A backend of torch.distributed: its process groups are hpcdl's communicators.

    all_reduce, reduce             by HPCDL_ALLREDUCE where hpcdl's kernels know type and operation; others (16 bits,
                                   complex, bool; product, bits) in chunks that are folded on arrival (comm/exchange.py)
    broadcast, all_gather_single   tree, ring
    reduce_scatter, all_gather,    one step: each rank sends its part directly to every other rank
      gather, scatter, all_to_all
    send, recv, barrier            push, wait, barrier

A blocking call on a CPU tensor takes the direct path (comm/call_path.py), in the tensor's own memory. Lists of tensors
hold one tensor per process, as for gloo: a process has one device."""

import datetime
import functools
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, distributed
from torch.distributed import ReduceOp
from torch.distributed.distributed_c10d import Work

from hpcdl.chunks import chunks
from hpcdl.comm.allreduce.circulant import circulant_all_gather, has_fewer_steps
from hpcdl.comm.allreduce.ring import ring_all_gather
from hpcdl.comm.diagnostics.call_signature import Call
from hpcdl.comm.exchange import Message, exchange, folded_all_reduce, folded_reduce, folded_reduce_scatter, folding
from hpcdl.comm.operations import reducible
from hpcdl.comm.point_to_point import ANY
from hpcdl.comm.primitives import chain
from hpcdl.errors import UsageError
from hpcdl.torch.arrays import CODED, Back, all_back, array_to_fill, array_to_send, element_type, memory_of
from hpcdl.torch.monitored import monitored_barrier
from hpcdl.torch.process_group import CommunicatorGroup
from hpcdl.torch.work import DONE, engine

Op = ReduceOp.RedOpType
NAMES = {Op.SUM: "sum", Op.AVG: "mean", Op.MAX: "max", Op.MIN: "min", Op.PRODUCT: "product"}
NAMES |= {Op.BAND: "and", Op.BOR: "or", Op.BXOR: "xor", Op.PREMUL_SUM: "sum"}
DIRECT = ("sum", "mean", "max", "min")  # operations of Communicator.all_reduce
OPTIONS: Any = distributed.AllreduceOptions()  # the defaults of all operations: sum, in flight, no timeout of its own
KNOWN = {kind for kind in (torch.float32, torch.float64, torch.int8, torch.int16, torch.int32, torch.int64)}
KNOWN |= {torch.uint8, torch.uint16, torch.uint32, torch.uint64}


class Refused(UsageError, ValueError):
    """An invalid operation: a UsageError, and a ValueError for programs that catch PyTorch's."""


@functools.cache
def reduction_of(op: Any, kind: torch.dtype) -> tuple[str, bool, bool]:
    """Return a reduction's name, True if `Communicator` has it for type `kind`, and True if values are multiplied by a
    factor first. Raises Refused for unfit types."""
    name = NAMES[op]
    if name == "mean" and not (kind.is_floating_point or kind.is_complex):
        raise Refused(f"ReduceOp.AVG is for floating-point tensors, not for {kind}; take SUM")
    if name in ("and", "or", "xor") and (kind.is_floating_point or kind.is_complex):
        raise Refused(f"ReduceOp.B{name.upper()} is for tensors of integers, not for {kind}")
    if name in ("max", "min") and kind.is_complex:
        raise Refused(f"ReduceOp.{name.upper()} is for tensors of numbers that have an order, not for {kind}")
    if (kind.is_floating_point and kind.itemsize == 1) or kind is torch.complex32:
        raise Refused(f"tensors of {kind} cannot be reduced; convert them first")
    return name, name in DIRECT and kind in KNOWN, op == Op.PREMUL_SUM


def only(tensors: Sequence[Tensor]) -> Tensor:
    """Return the only tensor of this process. Raises Refused for any other number of tensors."""
    if len(tensors) != 1:
        raise Refused(f"the backend hpcdl takes one tensor from each process, not {len(tensors)}")
    return tensors[0]


class BackendGroup(CommunicatorGroup):
    """A process group over a communicator, with the operations of torch.distributed."""

    # -- reductions --------------------------------------------------------------------------------------------------

    def allreduce(self, tensors: list[Tensor], opts: Any = OPTIONS) -> Work:
        tensor = only(tensors)
        name, direct, scaled = reduction_of(opts.reduceOp.op, tensor.dtype)
        if scaled:
            tensor.detach().mul_(opts.reduceOp.factor)
        if direct:
            vector: Any = memory_of(tensor) if tensor.is_cpu else self._on_gpu(tensor)
            back: Back = None
            if vector is None:
                vector, back = array_to_fill(tensor)
            at_once, start = partial(self.comm.all_reduce, vector, name), partial(self.comm.iall_reduce, vector, name)
            return self._do(opts.asyncOp, at_once, start, [tensor], back)
        vector, back = array_to_fill(tensor)
        steps = partial(folded_all_reduce.steps, vector=vector)
        return self._folded(opts, "all_reduce", tensor, vector.size, steps, back)

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any = OPTIONS) -> Work:
        if len(tensors) == 1:
            return self.allreduce(tensors, opts)
        flat = torch.cat([each.detach().reshape(-1) for each in tensors])
        work: Any = self.allreduce([flat], opts)

        def back() -> None:
            for each, part in zip(tensors, flat.split([each.numel() for each in tensors]), strict=True):
                each.detach().copy_(part.view(each.shape))

        if work is DONE or work.done:
            back()
            return DONE
        work.finish, work.outputs = all_back(work.finish, back), tensors
        return work  # type: ignore[no-any-return]

    def reduce(self, tensors: list[Tensor], opts: Any) -> Work:
        tensor, root = only(tensors), opts.rootRank
        name, direct, scaled = reduction_of(opts.reduceOp.op, tensor.dtype)
        if scaled:
            tensor.detach().mul_(opts.reduceOp.factor)
        vector, back = array_to_fill(tensor)
        if self.me != root:
            back = None
        if direct and name != "mean":
            at_once, start = (partial(way, vector, root, name) for way in (self.comm.reduce, self.comm.ireduce))
            return self._do(opts.asyncOp, at_once, start, [tensor], back)
        steps = partial(folded_reduce.steps, vector=vector, root=root)
        return self._folded(opts, "reduce", tensor, vector.size, steps, back, root, self.me == root)

    def reduce_scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = OPTIONS) -> Work:
        return self._reduce_scatter(only(outputs), [array_to_send(each) for each in inputs[0]], opts)

    def reduce_scatter_single(self, output: Tensor, source: Tensor, opts: Any = OPTIONS) -> Work:
        if source.numel() != output.numel() * self.ranks or output.dtype != source.dtype:
            needed = f"an input of {output.numel() * self.ranks} {output.dtype}, not {source.numel()} {source.dtype}"
            raise Refused(f"rank {self.me}: a reduce-scatter to {output.numel()} on {self.ranks} ranks needs {needed}")
        vector = array_to_send(source)
        return self._reduce_scatter(output, [vector[each] for each in chunks(vector.size, self.ranks)], opts)

    _reduce_scatter_base = reduce_scatter_single

    def _reduce_scatter(self, output: Tensor, parts: list[np.ndarray], opts: Any) -> Work:
        *_, scaled = reduction_of(opts.reduceOp.op, output.dtype)
        if len(parts) != self.ranks or parts[self.me].size != output.numel():
            raise Refused(f"rank {self.me}: a reduce-scatter needs a tensor for each rank, as long as its output")
        if scaled:
            parts = [each * opts.reduceOp.factor for each in parts]
        into, back = array_to_fill(output, filled=False)
        steps = partial(folded_reduce_scatter.steps, parts=parts, into=into)
        return self._folded(opts, "reduce_scatter", output, sum(each.size for each in parts), steps, back)

    def _folded(
        self, opts: Any, what: str, tensor: Tensor, size: int, steps: Any, back: Back, root: int = 0, mine: bool = True
    ) -> Work:
        """Start a reduction whose parts are folded on arrival. mine: True if this rank gets the result."""
        name = NAMES[opts.reduceOp.op]
        mean = (lambda: tensor.detach().div_(self.ranks)) if mine and name == "mean" else None
        fold = folding("sum" if name == "mean" else name, CODED.get(tensor.dtype))
        call = call_of(what, tensor, size, name, root)
        return self._run(opts.asyncOp, call, partial(steps, fold=fold), [tensor], all_back(back, mean))

    def reduce_scatter_single_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = OPTIONS) -> Work:
        pairs = zip(outputs, inputs, strict=True)
        return self._all([self.reduce_scatter_single(output, source, opts) for output, source in pairs], outputs)

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    # -- data movement ------------------------------------------------------------------------------------------------

    def broadcast(self, tensors: list[Tensor], opts: Any) -> Work:
        tensor, root = only(tensors), opts.rootRank
        vector, back = array_to_fill(tensor)
        call = call_of("broadcast", tensor, vector.size, root=root)
        steps = partial(chain.broadcast.steps, vector=vector, apart=self.comm.several_nodes, root=root, met=True)
        return self._run(opts.asyncOp, call, steps, [tensor], back if self.me != root else None)

    def all_gather_single(self, output: Tensor, source: Tensor, opts: Any = OPTIONS) -> Work:
        if output.numel() != source.numel() * self.ranks or output.dtype != source.dtype:
            needed = f"an output of {source.numel() * self.ranks} {source.dtype}, not {output.numel()} {output.dtype}"
            raise Refused(f"rank {self.me}: an all-gather of {source.numel()} on {self.ranks} ranks needs {needed}")
        vector, back = array_to_fill(output, filled=False)
        np.copyto(vector[chunks(vector.size, self.ranks)[self.me]], array_to_send(source))
        call = call_of("all_gather", output, vector.size)
        gather = circulant_all_gather if has_fewer_steps(vector, self.ranks) else ring_all_gather
        return self._run(opts.asyncOp, call, lambda comm: gather.steps(comm, vector), [output], back)

    _allgather_base = all_gather_single

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = OPTIONS) -> Work:
        source, into = array_to_send(only(inputs)), outputs[0]
        self._one_for_each(into, inputs[0].dtype)
        places, back = self._places(into)
        call = call_of("all_gather", inputs[0], sum(each.size for each in places))
        return self._to_all(opts.asyncOp, call, places, [source] * self.ranks, into, back)

    def all_gather_single_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = OPTIONS) -> Work:
        pairs = zip(outputs, inputs, strict=True)
        return self._all([self.all_gather_single(output, source, opts) for output, source in pairs], outputs)

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def allgather_coalesced(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = OPTIONS) -> Work:
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

    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = OPTIONS) -> Work:
        self._one_for_each(inputs, inputs[0].dtype if inputs else None)
        self._one_for_each(outputs, inputs[0].dtype)
        places, back = self._places(outputs)
        call = call_of("all_to_all", outputs[0], 0)
        return self._to_all(opts.asyncOp, call, places, [array_to_send(each) for each in inputs], outputs, back)

    def all_to_all_single(
        self, output: Tensor, source: Tensor, output_sizes: list[int], input_sizes: list[int], opts: Any = OPTIONS
    ) -> Work:
        place, back = array_to_fill(output, filled=False)
        places = self._parts(place, output, output_sizes)
        parts = self._parts(array_to_send(source), source, input_sizes)
        return self._to_all(opts.asyncOp, call_of("all_to_all", output, 0), places, parts, [output], back)

    alltoall_base = all_to_all_single

    def _parts(self, vector: np.ndarray, tensor: Tensor, sizes: Sequence[int]) -> list[np.ndarray]:
        """Return the part of `vector` for each rank. sizes: in rows of the tensor; empty: equal parts."""
        rows = tensor.size(0) if tensor.dim() else tensor.numel()
        if not sizes:
            if rows % self.ranks:
                raise Refused(f"rank {self.me}: {rows} rows are no multiple of {self.ranks} ranks; give split sizes")
            sizes = [rows // self.ranks] * self.ranks
        if len(sizes) != self.ranks or sum(sizes) != rows:
            raise Refused(f"rank {self.me}: split sizes {list(sizes)} do not cut {rows} rows for {self.ranks} ranks")
        ends = np.cumsum(sizes) * (vector.size // rows if rows else 0)
        return [vector[end - length : end] for end, length in zip(ends, np.diff(ends, prepend=0), strict=True)]

    def _to_all(
        self, later: bool, call: Call, places: Sequence[Any], parts: Sequence[Any], outputs: list[Tensor], back: Back
    ) -> Work:
        copy_into(places[self.me], parts[self.me], self.me)
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

    def barrier(self, opts: Any = OPTIONS) -> Work:
        seconds = opts.timeout.total_seconds()
        if seconds > 0 and not opts.asyncOp:
            self._started(lambda: [self.comm.ibarrier()], [], None).wait(opts.timeout)
            return DONE
        return self._do(opts.asyncOp, self.comm.barrier, self.comm.ibarrier, [], None)

    def monitored_barrier(self, timeout: datetime.timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """Wait for all ranks; RuntimeError on present ranks if others are missing in time; rank 0 names them."""
        self.barriers += 1
        with engine.exclusive():
            seconds = (timeout or self.timeout).total_seconds()
            monitored_barrier(self.comm.mpi, self.barriers, seconds, wait_all_ranks)

    # -- shared parts -------------------------------------------------------------------------------------------------

    def _on_gpu(self, tensor: Tensor) -> Any:
        """Return the tensor as a GPU array if MPI sends from GPU memory and the tensor is contiguous; else None."""
        if self.comm.exchange != "direct" or not tensor.is_contiguous():
            return None
        import cupy

        return cupy.from_dlpack(tensor.detach().view(-1))

    def _one_for_each(self, tensors: Sequence[Tensor], kind: torch.dtype | None, size: int | None = None) -> None:
        """Raise Refused unless there is one tensor per rank, all of this type and, if given, of this length."""
        if len(tensors) != self.ranks:
            raise Refused(f"rank {self.me}: a list has {len(tensors)} tensors, not one for each of {self.ranks} ranks")
        for rank, each in enumerate(tensors):
            if each.dtype is not kind or size not in (None, each.numel()):
                expected = kind if size is None else f"{size} elements of {kind}"
                found = f"{each.numel()} elements of {each.dtype}, and should be of {expected}"
                raise Refused(f"rank {self.me}: the tensor for rank {rank} is of {found}")

    def _places(self, tensors: Sequence[Tensor]) -> tuple[list[np.ndarray], Back]:
        pairs = [array_to_fill(tensor, filled=False) for tensor in tensors]
        return [vector for vector, _ in pairs], all_back(*(back for _, back in pairs))

    def _exchange(
        self, later: bool, call: Call, sends: list[Message], receives: list[Message], outputs: list[Tensor], back: Back
    ) -> Work:
        return self._run(later, call, lambda comm: exchange.steps(comm, sends, receives), outputs, back)

    def split_group(
        self, ranks: list[int], timeout: Any = None, opts: Any = None, **about: Any
    ) -> "BackendGroup | None":
        """Return the group of these ranks, which must all call this; None on other ranks."""
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
    """Copy a rank's own part, which no message carries. Raises Refused if it does not fit."""
    if place.size != source.size or place.dtype != source.dtype:
        place_text = f"its output of {place.size} of {place.dtype}"
        raise Refused(f"rank {rank}: its own part, {source.size} of {source.dtype}, does not fit into {place_text}")
    np.copyto(place, source)


assert all(reducible(torch.empty(0, dtype=kind).numpy().dtype) for kind in KNOWN)
