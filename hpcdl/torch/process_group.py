"""What a process group is for PyTorch, and how its operations begin: the part that knows nothing of what they do."""

import datetime
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.distributed_c10d import ProcessGroup, Work

from hpcdl.comm.communicator import Communicator
from hpcdl.comm.diagnostics.call_signature import Call
from hpcdl.comm.requests import Request
from hpcdl.torch.arrays import Back, all_back
from hpcdl.torch.group_cleanup import Gone, destroy
from hpcdl.torch.work import DONE, Pending, engine


class OfCommunicator(ProcessGroup):  # type: ignore[misc]
    """A process group over a communicator. name: by which PyTorch finds it; store: that the ranks share.

    limit: seconds after which an operation raises, where the timeout is not that of the default group, which ends the
    job (comm/diagnostics/watchdog.py). own: whether the communicator is this group's alone, and goes back when it is
    destroyed.
    """

    def __init__(
        self,
        comm: Communicator,
        name: str,
        store: Any,
        timeout: datetime.timedelta,
        limit: float = 0.0,
        own: bool = True,
    ):
        super().__init__(comm.rank, comm.size)
        self.own = own
        self.comm, self.known_as, self.described_as, self.store = comm, name, "", store
        self.me, self.ranks, self.timeout, self.limit = comm.rank, comm.size, timeout, limit
        self.others = [(self.me + i) % self.ranks for i in range(1, self.ranks)]
        self.coalescing: list[Pending] | None = None
        self.barriers = 0
        devices = ["cpu"] + ["cuda"] * torch.cuda.is_available()
        self.devices = [torch.device(each) for each in devices]

    # -- how they begin ----------------------------------------------------------------------------------------------

    def _run(self, later: bool, call: Call, steps: Any, outputs: list[Tensor], back: Back) -> Work:
        """An operation whose steps are ours."""
        return self._do(later, lambda: self.comm.run(call, steps), lambda: self.comm.irun(call, steps), outputs, back)

    def _do(
        self,
        later: bool,
        at_once: Callable[[], object],
        start: Callable[[], Request],
        outputs: list[Tensor],
        back: Back,
    ) -> Work:
        """An operation: blocking where it may be, else in flight."""
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
        """Several operations as one."""
        left = [each for each in works if each is not DONE]
        if not left:
            return DONE
        return engine.start(lambda: [request for work in left for request in work.requests], outputs)

    def _after(self, work: Any, back: Callable[[], None], outputs: list[Tensor]) -> Work:
        """The operation, and then this."""
        if work is DONE or work.done:
            back()
            return DONE
        work.finish, work.outputs = all_back(work.finish, back), outputs
        return work

    # -- what PyTorch asks of a group ---------------------------------------------------------------------------------

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
        """The communicator counts its calls itself (comm/call_path.py)."""

    def _get_sequence_number_for_group(self) -> int:
        return self.comm.sequence

    def set_timeout(self, timeout: datetime.timedelta) -> None:
        self.timeout = timeout

    _set_default_timeout = set_timeout

    def shutdown(self) -> None:
        """It is destroyed on this rank, which waits for no other: a communicator of its own goes back when all have."""
        if isinstance(self.comm, Gone):
            return
        for each in list(engine.live.values()):
            if any(request.communicator is self.comm for request in each.requests):
                engine.test(each)
        if self.own:
            with engine.mine():
                self.comm = destroy(self.comm, self.known_as)

    def abort(self) -> None:
        """End all ranks, as an exception does."""
        self.comm.mpi.Abort(1)
