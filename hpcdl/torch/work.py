"""Operations of torch.distributed in flight: what advances them, and how their futures are completed.

    a blocking call            is complete when it returns (`DONE`); it advances all that is in flight meanwhile
    work.wait()                the same
    DDP, in the backward pass  each bucket starts when its gradients are ready, and advances earlier ones; an autograd
                               callback waits for all at the end, just before DDP waits for their futures
    anything else              a polling thread, from the time that a future is requested

The thread also works during the backward pass if the ranks of the node leave a core free; otherwise it would slow the
ranks down. One thread at a time uses hpcdl.comm: callers hold `Engine.lock`. If only one thread calls the backend, it
may block while it holds the lock. Several threads poll, as a wait may need what another thread has yet to send."""

import atexit
import contextlib
import datetime
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import torch
from mpi4py import MPI
from torch import Tensor
from torch.distributed.distributed_c10d import Work
from torch.futures import Future

from hpcdl.comm.point_to_point import Arrival
from hpcdl.comm.progress import AWAKE, advance, pause
from hpcdl.comm.requests import Request

MANY = 1 << 20  # bytes from which the thread helps during a backward pass
queue_callback: Any = torch.autograd.Variable._execution_engine.queue_callback  # type: ignore[attr-defined]
backward_pass: Callable[[], int] = torch._C._current_graph_task_id  # -1: none in this thread


class Pending(Work):  # type: ignore[misc]
    """Requests of hpcdl that form one operation of torch.distributed. finish(): called when they are complete.
    limit: seconds after which a wait for the operation raises; 0: never."""

    def __init__(
        self, requests: list[Request], outputs: list[Tensor], finish: Callable | None = None, limit: float = 0.0
    ):
        super().__init__()
        self.requests, self.outputs, self.finish, self.limit = requests, outputs, finish, limit
        self.left, self.done, self.future = len(requests), not requests, None  # type: int, bool, Awaited | None
        self.error: BaseException | None = None
        self.source = -1
        for each in requests:
            each.then(self.one_is_done)
        if not requests:
            self.complete()

    def one_is_done(self, result: Any) -> Any:
        """Count a completed request, and return its result."""
        if isinstance(result, Arrival):
            self.source = result.source
        self.left -= 1
        if self.left == 0:
            self.complete()
        return result

    def complete(self, error: BaseException | None = None) -> None:
        """Complete the operation; `Engine.settle` completes its future, without locks, as callbacks may do anything."""
        if error is None and self.finish is not None:
            try:
                self.finish()
            except Exception as failed:
                error = failed
        self.error, self.done, self.finish = error, True, None
        self.requests = []  # they refer to this operation: without the cycle, tensors are freed when the caller is done
        engine.live.pop(id(self), None)
        engine.finished.append(self)

    def advance(self) -> None:
        """Advance the requests as far as messages have arrived."""
        for request in self.requests:
            try:
                request.advance()
            except Exception as error:
                if not self.done:
                    self.complete(error)
            if request.error is not None and not self.done:  # a wait for another operation has met it
                self.complete(request.error)

    # -- what torch.distributed calls

    def wait(self, timeout: datetime.timedelta | None = None) -> bool:
        engine.wait(self, timeout.total_seconds() if timeout else self.limit)
        return True

    synchronize = wait

    def is_completed(self) -> bool:
        return engine.test(self)

    def is_success(self) -> bool:
        return self.done and self.error is None

    def exception(self) -> BaseException | None:
        return self.error

    def result(self) -> list[Tensor]:
        return self.outputs

    def source_rank(self) -> int:
        return self.source

    _source_rank = source_rank

    def get_future(self) -> Future[Any]:
        if self.future is None:
            self.future = Awaited(self)
            if self.done:
                self.future.settle()
            else:
                engine.ensure_progress(self)
        return self.future


class Awaited(Future[Any]):
    """The future of an operation; `wait` in Python advances the operation."""

    def __init__(self, work: Pending):
        devices = {each.device for each in work.outputs if each.is_cuda}
        super().__init__(devices=sorted(devices, key=str)) if devices else super().__init__()
        self.work: Pending | None = work  # None: settled

    def wait(self) -> Any:
        work = self.work
        if work is not None:
            engine.wait(work)
        return super().wait()

    def settle(self) -> None:
        work, self.work = self.work, None
        if work is None:
            return
        if work.error is None:
            self.set_result(work.outputs)
        else:
            self.set_exception(work.error)


class Engine:
    """The operations of this process in flight for torch.distributed. spare: True if the node has a free core."""

    def __init__(self) -> None:
        self.lock, self.bell = threading.RLock(), threading.Event()
        self.live: dict[int, Pending] = {}
        self.finished: deque[Pending] = deque()
        self.users: set[int] = set()  # threads that call the backend
        self.thread: threading.Thread | None = None
        self.spare = False
        self.ending = False
        self.pass_of_callback = -1
        self.process = os.getpid()

    def alone(self) -> bool:
        """Note that this thread calls the backend; return True if no other thread that still runs has called it."""
        if threading.get_ident() not in self.users:
            self.users.add(threading.current_thread().ident or 0)  # registers a thread of PyTorch with Python, too
        if len(self.users) > 1:
            self.users.intersection_update([each.ident for each in threading.enumerate()])
        return len(self.users) == 1

    @contextlib.contextmanager
    def exclusive(self) -> Iterator[None]:
        """Context for other calls of MPI; it holds the lock."""
        self.alone()
        with self.lock:
            yield

    def start(
        self, make: Callable[[], list[Request]], outputs: list[Tensor], finish: Callable | None = None, limit: float = 0
    ) -> Pending:
        """Start the operation whose requests make() returns. limit: seconds after which a wait raises; 0: never."""
        self.alone()
        with self.lock:
            self.advance_all()
            work = Pending(make(), outputs, finish, limit)
            if not work.done:
                self.live[id(work)] = work
        self.settle()
        if self.spare and not work.done and sum(each.nbytes for each in outputs) >= MANY:
            self.wake()
        return work

    def advance_all(self) -> None:
        """Advance all operations in flight; the caller holds the lock."""
        for each in list(self.live.values()):
            each.advance()

    def settle(self) -> None:
        """Complete the futures of completed operations; the caller must not hold the lock."""
        while self.finished:
            try:
                work = self.finished.popleft()
            except IndexError:  # another thread has
                return
            if work.future is not None:
                work.future.settle()

    def wait(self, work: Pending, timeout: float = 0.0) -> None:
        """Wait for an operation. Raises its error, or RuntimeError after `timeout` seconds; 0: no timeout."""
        if not work.done:
            if self.alone() and not timeout:
                self._block(work)
            else:
                self._poll(work, timeout)
        self.settle()
        if work.error is not None:
            raise work.error

    def _block(self, work: Pending) -> None:
        with self.lock:
            for request in work.requests:
                try:
                    request.wait()
                except Exception as error:
                    if not work.done:
                        work.complete(error)

    def _poll(self, work: Pending, timeout: float) -> None:
        begun = time.monotonic()
        while True:
            with self.lock:
                for request in work.requests:
                    with contextlib.suppress(Exception):  # the request stores it
                        request.test()
                work.advance()
                self.advance_all()
            self.settle()
            waited = time.monotonic() - begun
            if work.done:
                return
            if timeout and waited > timeout:
                name = work.requests[0].name
                late = f"{name} is not complete, as other ranks have not made the call"
                raise RuntimeError(f"rank {MPI.COMM_WORLD.rank}: timeout after {timeout:g} s: {late}")
            pause(waited)

    def test(self, work: Pending) -> bool:
        """Advance all operations; return True if this one is complete."""
        if not work.done:
            self.alone()
            with self.lock:
                work.advance()
                advance()
            self.settle()
        return work.done

    # -- background progress

    def ensure_progress(self, work: Pending) -> None:
        """Ensure that a future becomes complete even if no thread waits for the operation."""
        task = backward_pass()
        if task >= 0:
            if task != self.pass_of_callback:
                self.pass_of_callback = task
                queue_callback(self.end_of_backward)
        elif MPI.Query_thread() < MPI.THREAD_SERIALIZED:
            self.wait(work)
        else:
            self.wake()

    def end_of_backward(self) -> None:
        """Wait at the end of the backward pass for all operations with futures."""
        self.pass_of_callback = -1
        for each in list(self.live.values()):
            if each.future is not None:
                self.wait(each)

    def wake(self) -> None:
        """Wake the thread, which advances operations in flight; start it first if necessary."""
        if self.thread is None and MPI.Query_thread() >= MPI.THREAD_SERIALIZED and not self.ending:
            self.thread = threading.Thread(target=self._go_on, name="hpcdl-torch", daemon=True)
            self.thread.start()
            atexit.register(self.stop)
        self.bell.set()

    def _go_on(self) -> None:
        while not self.ending:
            self.bell.wait()
            self.bell.clear()
            quiet = time.monotonic() - AWAKE  # the first poll naps, too
            while self.live and not self.ending:
                before = len(self.live)
                if self.lock.acquire(blocking=False):
                    try:
                        self.advance_all()
                    finally:
                        self.lock.release()
                    self.settle()
                now = time.monotonic()
                quiet = now - AWAKE if len(self.live) < before else quiet
                pause(now - quiet)

    def stop(self) -> None:
        self.ending = True
        self.bell.set()
        if self.thread is not None and self.process == os.getpid():
            self.thread.join(1)


engine = Engine()
DONE = Pending([], [])
