"""Messages between ranks: the primitives, the all-reduce algorithms, the trace and the watchdog."""

from hpcdl.comm import failure
from hpcdl.comm.communicator import ANY, Arrival, Communicator
from hpcdl.comm.failure import agreement

__all__ = ["ANY", "Arrival", "Communicator", "agreement"]

failure.install()
