"""A text larger than memory, from documents to a model that writes: python tests/soak/large_text.py [SIZE [STEPS]]

    corpus.py      SIZE bytes of JSON lines from a grammar, or a folder that it made   default 2e9
    prepare-data   a tokenizer of 4,096 tokens, shards, on 2 ranks                     killed once, and gone on with
    train          STEPS steps on 2 ranks, rows streamed from the shards               default 2000
                   killed with signal 9 after half of them, and resumed on 3 ranks and, from a copy, on 2
    evaluate       on the test documents, with a sample

All programs together have 1 GiB of memory (a control group; root). Then the same training holds its rows in memory,
without a limit, in the same order (`window_orders` draws it plainly). Checked: the losses of 2 ranks are equal to the
bit, before and after the kill; those of 3 ranks to rounding; nobody was out of memory. Printed: the most memory that
was used, with cached files."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from corpus import write_corpus

from hpcdl import cli
from hpcdl.data.format import read_info
from hpcdl.data.order import sampler
from hpcdl.data.order.sampler import WindowOrder
from hpcdl.data.placement import FileRows

MEMORY = 1 << 30
LINE = "--model gpt:layers=2,width=64,heads=4,context=64 --optimizer adamw --lr 0.002 --batch-size 24 --seed 1"
WINDOW = 4  # blocks of 8 MB, of each rank
OPTIONS = f"{LINE} --shuffle-window {WINDOW} --progress none"
ROUNDING = 1e-2  # of a loss in float32, after some thousand steps on another number of ranks


@contextlib.contextmanager
def memory_limit(size: int) -> Iterator[Path]:
    """Yield a control group of `size` bytes, version 1 or 2, to which a process adds itself."""
    root = Path("/sys/fs/cgroup")
    name, limit = ("memory", "memory.limit_in_bytes") if (root / "memory").exists() else ("", "memory.max")
    group = root / name / f"hpcdl-{os.getpid()}"
    group.mkdir()
    try:
        (group / limit).write_text(str(size))
        yield group
    finally:
        for _ in range(100):
            with contextlib.suppress(OSError):
                group.rmdir()
                break
            time.sleep(0.1)


def started(ranks: int, line: str, folder: Path, group: Path | None = None) -> subprocess.Popen:
    """Start `hpcdl LINE` on these ranks, in the control group."""
    program = [__file__] if "--placement shared" in line else ["-m", "hpcdl.cli"]
    command = ["mpiexec", "-n", str(ranks)] * (ranks > 0) + [sys.executable, *program, *line.split()]
    enter = None if group is None else lambda: (group / "cgroup.procs").write_text(str(os.getpid()))
    return subprocess.Popen(command, cwd=folder, start_new_session=True, preexec_fn=enter)


def run(ranks: int, line: str, folder: Path, group: Path | None = None) -> None:
    began = time.monotonic()
    status = started(ranks, line, folder, group).wait()
    print(f"{time.monotonic() - began:.0f} s: hpcdl {line}", flush=True)
    assert status == 0, f"status {status}"


def kill_when(job: subprocess.Popen, ready) -> None:
    """Kill a job with all its processes once ready() is true."""
    while not ready():
        assert job.poll() is None, f"the job ended with status {job.returncode} before it could be killed"
        time.sleep(0.02)
    os.killpg(job.pid, signal.SIGKILL)
    job.wait()


def window_orders(path: str, window: int) -> Callable[[int, int, int], np.ndarray]:
    """Return a function (seed, examples, epoch) -> the order of all rows of a streamed epoch."""
    starts = FileRows(read_info(path), "train", np.dtype(np.float32)).starts

    def order_of(seed: int, examples: int, epoch: int) -> np.ndarray:
        order, found = WindowOrder(seed, epoch, np.diff(starts), window), []
        for slot in range(len(order.ends)):
            parts = [starts[order.blocks[place]] + order.rows(place)[part] for place, part in order.pieces(slot)]
            rows = np.concatenate(parts) if parts else np.empty(0, np.int64)
            found.append(rows[order.within(slot, len(rows))])
        return np.concatenate(found)

    return order_of


def train_in_memory(line: list[str]) -> None:
    """Run `hpcdl LINE` with all rows in memory, in the order of streamed ones."""
    sampler.global_order = window_orders(line[line.index("--data") + 1], WINDOW)
    cli.main(line)


def losses(run: Path) -> dict[int, float]:
    """Return the training loss of each recorded step."""
    with contextlib.suppress(FileNotFoundError):
        lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines() if line.endswith("}")]
        return {line["step"]: line["train_loss"] for line in lines if "train_loss" in line}
    return {}


def main(size: str, steps: int) -> None:
    folder = Path(tempfile.mkdtemp(prefix="large_text-", dir=os.environ.get("TMPDIR")))
    with contextlib.ExitStack() as stack:
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        if Path(size).is_dir():
            (folder / "corpus").symlink_to(Path(size).absolute())
        else:
            print(f"{write_corpus(folder / 'corpus', int(float(size)))} documents", flush=True)
        group = stack.enter_context(memory_limit(MEMORY))
        prepare = (
            "prepare-data text corpus rows/ --field text --tokenizer bpe:4096 --shard-size 64MB --test-fraction 0.01"
        )
        kill_when(started(2, prepare, folder, group), lambda: any(folder.glob(".rows.parts/*.h5")))
        run(2, prepare, folder, group)
        train = (
            f"train-allreduce --data rows --placement streamed --steps {steps} --checkpoint-every {steps // 10} --out"
        )
        job = started(2, f"{train} killed {OPTIONS}", folder, group)
        kill_when(job, lambda: max(losses(folder / "killed"), default=0) > steps // 2)
        for ranks in (2, 3):
            shutil.copytree(folder / "killed", folder / f"resumed{ranks}")
            run(ranks, f"train-allreduce --resume resumed{ranks}", folder, group)
        run(0, "evaluate resumed3 --sample 200 --prompt the", folder, group)
        used = next(each for each in ("memory.max_usage_in_bytes", "memory.peak") if (group / each).exists())
        print(f"at most {int((group / used).read_text()) / 2**20:.0f} MiB", flush=True)
        run(2, f"{train.replace('streamed', 'shared')} whole {OPTIONS}", folder)
        whole, same, other = (losses(folder / name) for name in ("whole", "resumed2", "resumed3"))
        assert len(whole) > 10
        assert same == whole, "2 ranks: the losses differ"
        far = max(abs(other[step] - whole[step]) / whole[step] for step in whole)
        assert far < ROUNDING, f"3 ranks: the losses differ by {far}"
        print(f"{len(whole)} losses of 2 ranks are equal to the bit; those resumed on 3 differ by {far:.1e} at most")


if __name__ == "__main__":
    if sys.argv[1:2] == ["train-allreduce"]:
        train_in_memory(sys.argv[1:])
    else:
        size, steps = [*sys.argv[1:], *("2e9", "2000")[len(sys.argv) - 1 :]]
        main(size, int(steps))
