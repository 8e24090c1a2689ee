"""A chain for train-apex's tests, which raises or sends signals at a step; how they start and read a run."""

from pathlib import Path

SCRIPT = Path(__file__).parents[1] / "scripts" / "train_apex.py"
CHAINS = Path(__file__).with_name("chains.py").read_text()
ODD = """
import os, signal
from pathlib import Path
from mpi4py import MPI

class Odd(Chain):
    '''At step `at` of rank `rank`, `often` times in all: raises, or sends the rank `to` a signal.'''
    def __init__(self, rank, at, often=1, to=-1):
        super().__init__()
        self.mine, self.at_step, self.often, self.to, self.count = MPI.COMM_WORLD.rank == rank, at, often, to, 0
        Path(f"pid-{MPI.COMM_WORLD.rank}").write_text(str(os.getpid()))
    def step(self, action):
        self.count += 1
        before = len([*Path().glob("happened-*")])
        if self.mine and before < self.often and (before or self.count >= self.at_step):
            Path(f"happened-{before}").touch()
            if self.to < 0:
                raise ValueError("the arm is stuck")
            os.kill(int(Path(f"pid-{self.to}").read_text()), signal.SIGTERM)
        return super().step(action)

def odd(rank, at, often=1, to=-1): return Odd(rank, at, often, to)
class Wide(Chain):
    def shown(self): return np.zeros(7, np.float32)
def wide(): return Wide()
"""
SMALL = (
    "--env apexchains:chain --model mlp:8 --learning-starts 20 --batch-size 8 --replay 200 --train-every 1 --chunk 4"
)
SMALL = [*f"{SMALL} --episodes 2 --evaluate-every 100 --seed 3".split()]
LONG = [*SMALL, "--env-steps", "10000000", "--evaluate-every", "1000000"]


def odd(**settings):
    return ["--env", "apexchains:odd", "--env-options", ",".join(f"{name}={value}" for name, value in settings.items())]


def in_a_line(done, words, status=2):
    lines = [line for line in done.stderr.splitlines() if "goes on from a run of" not in line]
    assert done.returncode == status and len(lines) == 1 and words in lines[0], done.stdout + done.stderr
