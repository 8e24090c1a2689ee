"""The ProcessGroup interface of PyTorch over a communicator, and how operations (backend.py) are started."""

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch.distributed.distributed_c10d import ProcessGroup, Work

from hpcdl.comm.communicator import Communicator
from hpcdl.comm.diagnostics.call_signature import Call
from hpcdl.comm.requests import Request
from hpcdl.torch.arrays import Back
from hpcdl.torch.group_cleanup import DestroyedCommunicator, destroy
from hpcdl.torch.work import DONE, Pending, engine


class CommunicatorGroup(ProcessGroup):  # type: ignore[misc]
    """A process group over a communicator. name: its name in PyTorch; store: shared by the ranks.
    limit: seconds after which an operation raises; 0: never, as the watchdog ends the job after the default group's
    timeout. own: True if the communicator belongs to this group and is freed with it."""

    def __init__(
        self, comm: Communicator, name: str, store: Any, timeout: timedelta, limit: float = 0.0, own: bool = True
    ):
        super().__init__(comm.rank, comm.size)
        self.owns_communicator = own
        self.comm, self.known_as, self.described_as, self.store = comm, name, "", store
        self.me, self.ranks, self.timeout, self.limit = comm.rank, comm.size, timeout, limit
        self.others = [(self.me + i) % self.ranks for i in range(1, self.ranks)]
        self.coalescing: list[Pending] | None = None
        self.barriers = 0
        self.devices = [torch.device(each) for each in ["cpu"] + ["cuda"] * torch.cuda.is_available()]

    def _run(self, later: bool, call: Call, steps: Any, outputs: list[Tensor], back: Back) -> Work:
        return self._do(later, lambda: self.comm.run(call, steps), lambda: self.comm.irun(call, steps), outputs, back)

    def _do(self, later: bool, at_once: Callable, start: Callable, outputs: list[Tensor], back: Back) -> Work:
        """Start an operation: blocking, by at_once(), if possible; else in flight, by the request of start()."""
        if later or self.limit or not engine.alone():
            return self._started(lambda: [start()], outputs, back)
        with engine.lock:
            at_once()
        if back is not None:
            back()
        if engine.finished:
            engine.settle()
        return DONE

    def _started(self, make: Callable[[], list[Request]], outputs: list[Tensor], back: Back) -> Work:
        work = engine.start(make, outputs, back, self.limit)
        if self.coalescing is not None:
            self.coalescing.append(work)
        return work

    def _all(self, works: list[Any], outputs: list[Tensor]) -> Work:
        pending = [work for work in works if work is not DONE]
        if not pending:
            return DONE
        return engine.start(lambda: [request for work in pending for request in work.requests], outputs)

    def getBackendName(self) -> str:
        return "hpcdl"

    _get_backend_name = name = getBackendName

    def setGroupName(self, name: str) -> None:
        self.known_as = name

    def getGroupName(self) -> str:
        return self.known_as

    _set_group_name = setGroupName
    group_name = property(getGroupName)

    def setGroupDesc(self, text: str) -> None:
        self.described_as = text

    def getGroupDesc(self) -> str:
        return self.described_as

    _set_group_desc = setGroupDesc
    group_desc = property(getGroupDesc)

    def get_group_store(self) -> Any:
        return self.store

    @property
    def _device_types(self) -> list[torch.device]:
        return self.devices

    def _get_backend(self, device: torch.device) -> Any:
        return self

    supports_splitting = supports_time_estimate = False
    supports_coalescing = True

    def supports_tensor_alloc(self, device: torch.device) -> bool:
        return False

    def _start_coalescing(self, device: torch.device) -> None:
        self.coalescing = []

    def _end_coalescing(self, device: torch.device) -> Work:
        works, self.coalescing = self.coalescing or [], None
        return self._all(works, [])

    def _set_sequence_number_for_group(self) -> None:
        """Do nothing: the communicator counts its calls (comm/call_path.py)."""

    def _get_sequence_number_for_group(self) -> int:
        return self.comm.sequence

    def set_timeout(self, timeout: timedelta) -> None:
        self.timeout = timeout

    _set_default_timeout = set_timeout

    def shutdown(self) -> None:
        """Destroy the group on this rank without waiting; free its own communicator when all ranks have done so."""
        if isinstance(self.comm, DestroyedCommunicator):
            return
        for each in list(engine.live.values()):
            if any(request.communicator is self.comm for request in each.requests):
                engine.test(each)
        if self.owns_communicator:
            with engine.exclusive():
                self.comm = destroy(self.comm, self.known_as)

    def abort(self) -> None:
        self.comm.mpi.Abort(1)
