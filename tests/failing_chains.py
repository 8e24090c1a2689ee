"""train-gorila on chains that fail: what its tests share."""

from pathlib import Path

SCRIPTS = Path(__file__).parents[1] / "scripts"
SCRIPT = SCRIPTS / "train_gorila.py"
CHAINS = Path(__file__).with_name("chains.py").read_text()
SMALL = ["--env", "mychains:chain", "--model", "mlp:8,dueling", "--learning-starts", "20", "--batch-size", "8"]
SMALL += ["--replay", "400", "--episodes", "2", "--evaluate-every", "120", "--seed", "3", "--train-every", "1"]
SMALL += ["--chunk", "2", "--sync-every", "4"]
FAILING = """
import collections, os, signal
from mpi4py import MPI
RANK, WORST = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size - 1
TAKEN = collections.Counter()  # steps of this rank in each folder, for the ranks may stay up

class Failing(Chain):
    '''On the last rank it raises at a step of that rank, once or from then on, or sends itself a signal.'''
    def __init__(self, raises=0, always=False, sends=0):
        super().__init__()
        self.raises, self.always, self.sends = raises, always, sends
    def step(self, action):
        if RANK == WORST:
            TAKEN[os.getcwd()] += 1
            count = TAKEN[os.getcwd()]
            if count == self.raises or (self.always and count >= self.raises > 0):
                raise OSError(f"the emulator at step {count} is gone")
            if count == self.sends and not os.path.exists("sent"):
                open("sent", "w").close()
                os.kill(os.getpid(), signal.SIGTERM)
        return super().step(action)

def failing(raises=0, always=False, sends=0):
    return Failing(raises, always, sends)
"""
MODULE = CHAINS + FAILING  # of a user, in the folder where programs are started
