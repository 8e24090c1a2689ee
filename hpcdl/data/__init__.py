"""Data sets: HDF5 files, placement of rows in memory, partition among ranks, order of batches.

data = open_data("digits", comm=comm, placement="shared", seed=0)
for batch in data.batches(epoch, batch_size=64, share=(comm.rank, comm.size)):
    ...                                                # batch.x, batch.y, batch.total"""

from hpcdl.data.arrays import from_arrays
from hpcdl.data.batch import Batch
from hpcdl.data.dataset import Data, Split
from hpcdl.data.opening import open_data

__all__ = ["Batch", "Data", "Split", "from_arrays", "open_data"]
