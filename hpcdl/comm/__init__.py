"""Messages between ranks: the primitives, the all-reduce algorithms, the trace and the watchdog."""

from hpcdl.comm.communicator import Communicator
from hpcdl.comm.failure import refuse_together
from hpcdl.comm.point_to_point import ANY, Arrival

__all__ = ["ANY", "Arrival", "Communicator", "refuse_together"]
