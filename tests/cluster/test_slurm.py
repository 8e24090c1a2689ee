"""The templates in slurm/ on a real Slurm of one node and of two, under MPICH and Open MPI; interrupted in all ways."""

import configparser
import json
import os
import re
import shutil
from pathlib import Path

import pytest
from written_runs import lines, summary

from hpcdl.checkpoint.checkpoint_file import Checkpoint

ROOT = Path(__file__).parents[2]
TRAIN = ["train-allreduce", "--data", "digits", "--model", "mlp:8", "--steps", "400"]
NODES = pytest.mark.parametrize("nodes", [1, 2])
ONE_MPI = pytest.mark.parametrize("mpi", ["mpich"], indirect=True)  # what is the same under the other
FLAVOUR = {"mpich": "pmi2", "openmpi": "pmix"}
WRONG = {"mpich": "none", "openmpi": "pmi2"}  # worlds of one rank; under --mpi=pmix MPICH does not start at all


def state(folder: Path) -> dict[str, bytes]:
    """All vectors of a run's checkpoint."""
    return {name: vector.tobytes() for name, vector in Checkpoint.read(folder).vectors.items()}


def saved_at(folder: Path) -> int:
    """The step of a run's checkpoint."""
    return Checkpoint.read(folder).attributes["step"]


def finished(folder: Path, ranks: int, steps: int) -> dict:
    """The summary of a run that was to end like this."""
    found = summary(folder)
    assert (found["ranks"], found["steps"], found["stopped"]) == (ranks, steps, "finished")
    assert found["replicas_agree"] is True
    return found


@pytest.fixture
def gated(tmp_path):
    """Options and environment of a run that waits at its tenth step until it gets a signal; and the file it makes."""
    return [*TRAIN, "--allreduce", "gate:gate", "--checkpoint-every", "4"], {"GATE": str(tmp_path / "reached")}


@pytest.fixture(scope="session")
def never_stopped(tmp_path_factory):
    """A function: whether a run has finished with the bits of the same run on two ranks that was not interrupted.
    Those bits do not depend on the MPI and the nodes."""
    whole = tmp_path_factory.mktemp("whole") / "run"

    def check(folder, submit):
        finished(folder, 2, 400)
        if not whole.exists():
            options = [*TRAIN, "--allreduce", "ring", "--out", whole]
            submit("train_cpu.sbatch", *options, sbatch=["--ntasks-per-node=2"]).ended()
        assert state(folder) == state(whole)

    return check


def spread(nodes, ranks):
    """Options of a job of so many ranks on each of two nodes; on one the template says how many."""
    return ["--nodes=2", f"--ntasks-per-node={ranks}"] if nodes == 2 else []


def reach(job, environment):
    """Wait until a run stands at its gate."""
    job.slurm.until("the run is at its gate", Path(environment["GATE"]).exists, folder=job.folder)


# -- each template, as it is and on two nodes ------------------------------------------------------------------------


@NODES
def test_train_cpu(submit, tmp_path, nodes):
    job = submit("train_cpu.sbatch", *TRAIN, "--allreduce", "hierarchical", nodes=nodes, sbatch=spread(nodes, 2))
    found = job.ended()
    assert (found["NumNodes"], found["NumTasks"]) == (str(nodes), "4")
    run = finished(tmp_path / "runs" / f"train-{job.name}", 4, 400)
    # Between nodes only one rank of each sends; within one node none does: MPI knows which ranks share a node.
    sends = [each.get("all_reduce", {}).get("messages", 0) > 0 for each in run["traffic_per_rank"]]
    assert sends == ([False] * 4 if nodes == 1 else [True, False, True, False])


@NODES
def test_train_gpu(submit, tmp_path, nodes):
    """The kernels run in Numba's simulator, on the stand-in for CuPy; Slurm's GPUs are device files."""
    simulated = {"PYTHONPATH": str(ROOT / "tests" / "standin"), "NUMBA_ENABLE_CUDASIM": "1"}
    options = ["train-allreduce", "--data", "digits", "--model", "softmax", "--steps", "2", "--batch-size", "4"]
    job = submit("train_gpu.sbatch", *options, nodes=nodes, sbatch=spread(nodes, 1), **simulated)
    assert job.ended()["NumNodes"] == str(nodes)
    run = finished(tmp_path / "runs" / f"train-gpu-{job.name}", 2, 2)
    assert run["device"] == "cuda" and len(run["device_per_rank"]) == 2


def test_search_array(submit, tmp_path):
    """As it is: three seeds, as many at a time as there is room for."""
    job = submit("search_array.sbatch", *TRAIN, "--allreduce", "ring")
    folders = [tmp_path / "runs" / f"search-{job.name}" / str(member) for member in (1, 2, 3)]
    for member, folder in enumerate(folders, 1):
        job.member(member).ended()
        assert finished(folder, 2, 400)["seed"] == member
    assert len({state(folder)["parameters"] for folder in folders}) == 3


def test_search_array_with_options_on_two_nodes(submit, mpi, gated, tmp_path):
    """One member is requeued: the last, whose own number is that of the array, by which all members would be."""
    environment = gated[1] if mpi == "mpich" else {}  # under the other it is not stopped
    (tmp_path / "trials.txt").write_text("--lr 0.1\n--lr 0.2 --data 'digits'\n--lr 0.3 --allreduce gate:gate\n")
    sbatch = ["--array=2-3", "--nodes=2", "--ntasks-per-node=1"]
    options = ["@trials.txt", *TRAIN, "--allreduce", "ring"]
    job = submit("search_array.sbatch", *options, nodes=2, sbatch=sbatch, **environment)
    if environment:
        reach(job, environment)
    job.member(2).ended()
    last = job.member(3)
    assert last.show()["JobId"] == job.name
    if environment:
        last.signal("USR1")
        last.again()
    last.ended()
    for member, restarts in (2, "0"), (3, str(len(environment))):
        found = job.member(member).show()
        assert (found["Restarts"], found["NumNodes"]) == (restarts, "2")
        folder = tmp_path / "runs" / f"search-{job.name}" / str(member)
        finished(folder, 2, 400)
        assert f"lr: 0.{member}\n" in (folder / "config.yaml").read_text()


def test_a_search_as_an_array(submit, tmp_path):
    """Each member is a trial, and all write one journal."""
    space = ["--space", "lr=0.1|0.2|0.4", "--method", "grid"]
    job = submit("search_array.sbatch", *TRAIN, "--allreduce", "ring", *space, sbatch=["--array=0-2"])
    for member in range(3):
        job.member(member).ended()
    folder = tmp_path / "runs" / f"search-{job.name}"
    lines = [json.loads(line) for line in (folder / "journal.jsonl").read_text().splitlines()]
    ends = {line["trial"]: line["score"] for line in lines if line["event"] == "end"}
    assert sorted(ends) == [0, 1, 2] and len([line for line in lines if line["event"] == "begin"]) == 3
    assert {line["ranks"] for line in lines if line["event"] == "leg"} == {2}
    rows = (folder / "trials.csv").read_text().splitlines()
    assert len(rows) == 4 and all(row.split(",")[1] == "ended" for row in rows[1:])
    for trial in ends:
        assert finished(folder / "trials" / f"{trial:04d}" / "seed-0", 2, 400)["options"]["lr"] == 0.1 * 2**trial


@NODES
def test_bench_allreduce(submit, tmp_path, nodes):
    options = ["--sizes", "1KiB,8KiB", "--algorithms", "ring,hierarchical", "--seconds", "0.02"]
    job = submit("bench_allreduce.sbatch", *options, nodes=nodes, sbatch=spread(nodes, 2))
    assert job.ended()["NumNodes"] == str(nodes)
    found = json.loads((tmp_path / f"bench-allreduce-{job.name}.json").read_text())
    assert {(row["ranks"], row["size_bytes"]) for row in found["rows"]} == {(4, 1024), (4, 8192)}
    names = {(name, bare) for name in ("ring", "hierarchical", "mpi") for bare in (False, True)}
    assert {(row["algorithm"], row["bare"]) for row in found["rows"]} == names | {("copy", True), ("plain ring", True)}
    assert "all-reduce of float32 in place on 4 ranks" in job.log


def test_compare(submit, tmp_path):
    lines = ["train-allreduce --allreduce ring", "train-local-sgd --sync-every '4'", "train-gossip --topology none.txt"]
    sbatch = ["--ntasks-per-node=2"]
    job = submit("compare.sbatch", "--model", "mlp:8", "--steps", "40", "--seeds", "2", *lines, sbatch=sbatch)
    job.ended()
    folder = tmp_path / "runs" / f"compare-{job.name}"
    found = json.loads((folder / "results.json").read_text())
    assert [line["line"] for line in found["lines"]] == lines
    for name in ("1-train-allreduce", "2-train-local-sgd"):
        for seed in (0, 1):
            run = summary(folder / name / f"seed-{seed}")
            assert (run["ranks"], run["steps"], run["stopped"]) == (2, 40, "finished")
    assert "line 3 failed with seeds 0, 1: " in job.log and f"results: runs/compare-{job.name}" in job.log
    assert (folder / "table.md").exists()


def test_compare_on_two_nodes(submit, mpi, gated, never_stopped, tmp_path):
    """It is stopped in the second run, and goes on with that one."""
    environment = gated[1] if mpi == "mpich" else {}  # under the other it is not stopped
    lines = ["train-allreduce --allreduce ring", "train-allreduce --allreduce gate:gate"]
    sbatch = ["--nodes=2", "--ntasks-per-node=1"]
    options = [*TRAIN[1:], "--seeds", "1"]
    job = submit("compare.sbatch", *options, *lines, nodes=2, sbatch=sbatch, **environment)
    folder = tmp_path / "runs" / f"compare-{job.name}"
    folders = [folder / name / "seed-0" for name in ("1-train-allreduce", "2-train-allreduce")]
    if environment:
        reach(job, environment)
        first = (folders[0] / "summary.json").stat().st_mtime_ns
        job.signal("USR1")
        job.again()
    assert job.ended()["NumNodes"] == "2"
    assert not environment or (folders[0] / "summary.json").stat().st_mtime_ns == first
    assert job.log.count("stopped by a signal; go on with --resume") == bool(environment)
    for run in folders:
        never_stopped(run, submit)  # gate is ring, but for its wait


def test_search(submit, gated, tmp_path):
    """It is stopped in a trial, is requeued, and goes on with that one."""
    environment = gated[1]
    space = ["--space", "lr=log:0.01..0.5", "--trials", "3", "--ranks-per-trial", "2"]
    training = [*TRAIN, "--allreduce", "gate:gate", "--validation", "0.1"]
    job = submit("search.sbatch", *training, *space, sbatch=["--ntasks-per-node=2"], **environment)
    folder = tmp_path / "runs" / f"search-{job.name}"
    reach(job, environment)
    job.signal("USR1")
    job.again()
    job.ended()
    assert job.log.count("stopped by a signal; go on with --resume") == 1
    lines = [json.loads(line) for line in (folder / "journal.jsonl").read_text().splitlines()]
    ended = [line["trial"] for line in lines if line["event"] == "end"]
    assert sorted(ended) == [0, 1, 2] and sum(line["event"] == "leg" for line in lines) == 2
    assert (folder / "best.yaml").exists() and len((folder / "trials.csv").read_text().splitlines()) == 4
    job = submit("search.sbatch", "train-nothing", "--space", "lr=0.1..1")
    job.ended(2)
    assert "unknown program 'train-nothing'" in job.log


@NODES
def test_programs_of_pytorch(submit, venv, mpi, nodes):
    """DDP and FSDP2 over the backend hpcdl: neither an address nor a rank is told, and two tasks are one world."""
    if not any(venv.glob("lib/python*/site-packages/torch")):
        pytest.skip(f"PyTorch is not installed in {venv.name}")
    step = f"srun --mpi={FLAVOUR[mpi]} {venv / 'bin' / 'python'} {ROOT / 'docs' / 'examples'}"
    sbatch = [f"--nodes={nodes}", "--ntasks=2", "--output=torch-%j.log"]
    job = submit(f"--wrap={step}/ddp.py && {step}/fsdp.py", nodes=nodes, sbatch=sbatch, OMP_NUM_THREADS="1")
    found = job.ended()
    assert (found["NumNodes"], found["NumTasks"]) == (str(nodes), "2")
    assert [job.log.count(f"epoch {epoch}: loss") for epoch in (1, 2, 3)] == [1, 1, 1]
    assert re.search(r"^\d+ all-reduces$", job.log, re.MULTILINE)
    assert job.log.count("step 9: loss") == 1
    held, whole = map(int, re.search(r"rank 0 holds (\d+) of (\d+) parameters", job.log).groups())
    assert whole / 2 <= held < 0.6 * whole


# -- the time limit, preemption, the loss of a node ------------------------------------------------------------------


def test_the_time_limit(submit, gated, never_stopped, tmp_path):
    """A signal to the batch shell: a checkpoint, status 85, requeued, resumed, the same bits as if never stopped.
    Meanwhile the node is left as if it had been lost: with a file where PMIx wants the socket of the step that ran."""
    options, environment = gated
    job = submit("train_cpu.sbatch", *options, sbatch=["--ntasks-per-node=2"], **environment)
    reach(job, environment)
    job.signal("USR1")
    job.until("PENDING")
    (job.slurm.folder / "spool.n1" / f"stepd.slurm.pmix.{job.name}.1").touch()
    job.again()
    assert job.ended()["Restarts"] == "1"
    step = int(re.search(r"stopped by a signal after step (\d+) of 400", job.log)[1])
    assert 10 <= step < 400 and f"saved; job {job.name} is requeued" in job.log
    folder = tmp_path / "runs" / f"train-{job.name}"
    steps = [line["step"] for line in lines(folder)]
    assert steps == sorted(steps) and set(range(1, 401)) == set(steps)
    never_stopped(folder, submit)


@ONE_MPI
def test_a_job_that_may_not_be_requeued(submit, gated, tmp_path):
    options, environment = gated
    job = submit("train_cpu.sbatch", *options, sbatch=["--ntasks-per-node=2", "--no-requeue"], **environment)
    reach(job, environment)
    job.signal("USR1")
    assert job.ended(85)["Restarts"] == "0"
    assert f"job {job.name} could not be requeued; go on with --resume" in job.log
    assert saved_at(tmp_path / "runs" / f"train-{job.name}") >= 10


@ONE_MPI
def test_preemption(submit, gated, never_stopped, tmp_path):
    """A more urgent job takes the node: SIGTERM to the ranks, which save; the job waits, and goes on."""
    options, environment = gated
    job = submit("train_cpu.sbatch", *options, sbatch=["--ntasks-per-node=2", "--exclusive"], **environment)
    reach(job, environment)
    urgent = submit("--wrap=true", sbatch=["--partition=urgent", "--exclusive"])
    job.again()
    assert job.ended()["Restarts"] == "1" and "stopped by a signal" in job.log
    urgent.ended()
    never_stopped(tmp_path / "runs" / f"train-{job.name}", submit)


def test_the_loss_of_a_node(submit, slurm, gated, never_stopped, tmp_path):
    """Nothing is told: the rank of the other node is killed, too, and the run goes on from its last checkpoint."""
    options, environment = gated
    sbatch, cluster = ["--nodes=2", "--ntasks-per-node=1"], slurm(2)
    job = submit("train_cpu.sbatch", *options, nodes=2, sbatch=sbatch, **environment)
    reach(job, environment)
    lost = job.nodes()[1]
    cluster.power_off(lost)
    cluster.run("scontrol", "update", f"nodename={lost}", "state=down", "reason=lost")
    folder = tmp_path / "runs" / f"train-{job.name}"
    job.again()
    assert saved_at(folder) == 8
    assert job.ended()["Restarts"] == "1" and "requeued" not in job.log  # by Slurm itself
    assert lost not in job.nodes() and len(job.nodes()) == 2
    never_stopped(folder, submit)
    cluster.power_on(lost)
    cluster.run("scontrol", "update", f"nodename={lost}", "state=resume")
    cluster.until_up()


@ONE_MPI
def test_a_killed_rank(submit, gated, never_stopped, tmp_path):
    """It ends the job; requeued by hand, with nothing saved, the run starts anew, beside what the first try left."""
    _, environment = gated
    options = [*TRAIN, "--allreduce", "gate:gate", "--out", "here/run"]
    sbatch, killed = ["--ntasks-per-node=2"], {"GATE_KILLS": "0", "SLURM_WAIT": "1"}
    job = submit("train_cpu.sbatch", *options, sbatch=sbatch, **killed, **environment)
    job.ended(137)
    job.slurm.run("scontrol", "requeue", job.name)
    job.again()
    job.ended()
    assert (tmp_path / "here" / "run-try-1" / "config.yaml").exists()
    never_stopped(tmp_path / "here" / "run", submit)


@ONE_MPI
def test_a_killed_rank_goes_on_within_the_job(submit, never_stopped, tmp_path):
    """From the last checkpoint, on the same nodes, with the same bits: no requeueing."""
    options = [*TRAIN, "--allreduce", "ring", "--checkpoint-every", "100", "--inject", "kill:rank=1,step=150"]
    job = submit("train_cpu.sbatch", *options, sbatch=["--ntasks-per-node=2"], SLURM_WAIT="1")
    assert job.ended()["Restarts"] == "0" and "restart 1 of 3" in job.log and "from step 100 (" in job.log
    never_stopped(tmp_path / "runs" / f"train-{job.name}", submit)


@ONE_MPI
def test_a_cancelled_job_saves_and_stays_cancelled(submit, gated, tmp_path):
    """Also where its shell lives on after the SIGTERM. And the templates work from a copy of their folder."""
    options, environment = gated
    shutil.copytree(ROOT / "slurm", tmp_path / "copy")
    stubborn = tmp_path / "copy" / "stubborn.sbatch"
    stubborn.write_text(f"#!/bin/bash\ntrap '' TERM\nexec bash {tmp_path}/copy/train_cpu.sbatch \"$@\"\n")
    sbatch = ["--ntasks=2", "--requeue", "--output=%x-%j.log", "--job-name=train"]
    job = submit(stubborn, *options, sbatch=sbatch, **environment)
    reach(job, environment)
    job.cancel()
    assert job.until("CANCELLED")["Restarts"] == "0"
    assert saved_at(tmp_path / "runs" / f"train-{job.name}") >= 10


# -- the environment of the ranks ------------------------------------------------------------------------------------


@pytest.fixture
def standin(venv, tmp_path):
    """A virtual environment in which hpcdl only writes rank-N.json: its environment, cores and arguments."""
    real, bin = venv / "bin" / "python", tmp_path / "venv" / "bin"
    bin.mkdir(parents=True)
    (bin / "python").write_text(f'#!/bin/sh\nexec {real} "$@"\n')
    (bin / "hpcdl").write_text(
        f"#!{real}\nimport json, os, sys\n"
        "with open(f'rank-{os.environ[\"SLURM_PROCID\"]}.json', 'w') as file:\n"
        "    json.dump([dict(os.environ), sorted(os.sched_getaffinity(0)), sys.argv[1:]], file)\n"
    )
    for program in bin.iterdir():
        program.chmod(0o755)
    return {"HPCDL_VENV": str(bin.parent)}


@ONE_MPI
@pytest.mark.parametrize("template, per_node, threads", [("train_cpu", 2, 1), ("train_gpu", 1, 2)])
def test_what_a_rank_finds(submit, mpi, standin, tmp_path, template, per_node, threads):
    """Threads, cores, GPUs and caches on two nodes of two cores."""
    sbatch = ["--nodes=2", f"--ntasks-per-node={per_node}", f"--cpus-per-task={threads}"]
    submit(f"{template}.sbatch", "prepare-data", "a b", nodes=2, sbatch=sbatch, **standin).ended()
    found = [json.loads(path.read_text()) for path in sorted(tmp_path.glob("rank-*.json"))]
    assert len(found) == 2 * per_node
    for rank, (environment, cores, arguments) in enumerate(found):
        assert (environment["SLURMD_NODENAME"] == found[0][0]["SLURMD_NODENAME"]) == (rank < per_node)
        for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS"):
            assert environment[name] == str(threads)
        assert len(cores) == threads or os.cpu_count() < 2
        assert (environment["SLURM_MPI_TYPE"], environment["SLURM_WAIT"]) == (FLAVOUR[mpi], "120")
        cache = Path(environment["NUMBA_CACHE_DIR"])
        assert cache.is_dir() and cache.stat().st_mode & 0o077 == 0
        if template == "train_cpu":
            assert arguments == ["prepare-data", "a b"]  # no training: as they are
        else:
            assert arguments == ["prepare-data", "--device", "cuda", "a b"]
            assert environment["CUDA_VISIBLE_DEVICES"] == "0"  # of each node
    if per_node == 2 and os.cpu_count() >= 2:
        assert found[0][1] != found[1][1]  # a core for each


@ONE_MPI
def test_leftovers_in_shared_memory(submit, slurm, mpi, standin, tmp_path):
    """What killed ranks have left on the nodes is taken away; what is in use, or is nobody's business, stays."""
    code = (
        "import mmap, time; file = open('/dev/shm/mpich_shm_used', 'w+'); file.truncate(4096);"
        "memory = mmap.mmap(file.fileno(), 4096); open('mapped', 'w'); time.sleep(600)"
    )
    other = submit(f'--wrap=exec python3 -c "{code}"', sbatch=["--ntasks=1"])
    one = slurm(1)
    one.until("the other job uses memory", (tmp_path / "mapped").exists)
    one.run("srun", "touch", *(f"/dev/shm/{name}" for name in ("mpich_shm_left", "sm_segment.n1.0.left", "kept")))
    submit("train_cpu.sbatch", "prepare-data", sbatch=["--ntasks-per-node=2"], **standin).ended()
    assert set(one.run("srun", "ls", "/dev/shm").split()) >= {"mpich_shm_used", "kept"}
    assert not {"mpich_shm_left", "sm_segment.n1.0.left"} & set(one.run("srun", "ls", "/dev/shm").split())
    other.cancel()


@ONE_MPI
def test_a_training_that_did_not_run(submit, standin):
    job = submit("train_cpu.sbatch", *TRAIN, sbatch=["--ntasks-per-node=2"], **standin)
    job.ended(1)
    assert f"runs/train-{job.name}/summary.json was not written" in job.log


@ONE_MPI
def test_what_is_wrong_is_said_before_anything_runs(submit):
    for name, value, words in (
        ("HPCDL_VENV", "/nowhere", "HPCDL_VENV=/nowhere: there is no bin/hpcdl"),
        ("HPCDL_SRUN_MPI", "pmi7", "this Slurm has no srun --mpi=pmi7"),
    ):
        job = submit("train_cpu.sbatch", *TRAIN, **{name: value})
        job.ended(2)
        assert words in job.log and len(job.log.splitlines()) == 1
    job = submit("compare.sbatch", "train-nothing")
    job.ended(2)
    assert "line 1, 'train-nothing': unknown program" in job.log
    trials = submit("search_array.sbatch", "@/dev/null", *TRAIN, sbatch=["--array=7"])
    trials.member(7).ended(2)
    assert "/dev/null has no line 7" in trials.member(7).log


def test_the_wrong_flavour_of_srun(submit, mpi):
    """Every rank is a world of its own: doctor ends with 1, a training with 2, and both name the right flavour."""
    both = (["doctor", "--quick"], 1), (TRAIN, 2)
    for script, status in both if mpi == "mpich" else both[:1]:
        job = submit("train_cpu.sbatch", *script, sbatch=["--ntasks-per-node=2"], HPCDL_SRUN_MPI=WRONG[mpi])
        job.ended(status)
        assert f"--mpi={FLAVOUR[mpi]}" in job.log


LITTERED = """
import ctypes, os
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
blocks = [libc.malloc(size) for size in range(64, 1600, 16) for _ in range(32)]
for block in blocks:
    ctypes.memmove(block, os.urandom(64), 64)
    ctypes.memmove(block + libc.malloc_usable_size(ctypes.c_void_p(block)) - 64, os.urandom(64), 64)
for block in blocks[::2]:
    libc.free(block)
from hpcdl.machine import world
world.start()
from mpi4py import MPI
print(MPI.COMM_WORLD.size)
"""


@ONE_MPI
def test_ranks_of_two_nodes_meet_whatever_lies_in_memory(slurm, venv, shared, mpi):
    """Random bytes lie around the free blocks from which MPI takes the memory of its address."""
    command = ["srun", f"--mpi={FLAVOUR[mpi]}", "--nodes=2", "--ntasks=2", venv / "bin" / "python", "-c", LITTERED]
    assert slurm(2).run(*command, **shared).split() == ["2", "2"]


@ONE_MPI
def test_a_sick_node(submit, slurm, venv, tmp_path):
    """One core for the threads of four ranks, and a /dev/shm without room: doctor ends with 1 and names it."""
    one, sbatch = slurm(1), ["--ntasks-per-node=4"]
    bin, real = tmp_path / "venv" / "bin", venv / "bin"
    bin.mkdir(parents=True)
    for name, before in ("python", ""), ("hpcdl", "OMP_NUM_THREADS=2 exec taskset -c 0"):
        (bin / name).write_text(f'#!/bin/sh\n{before} {real / name} "$@"\n')
        (bin / name).chmod(0o755)
    job = submit("train_cpu.sbatch", "doctor", "--quick", sbatch=sbatch, HPCDL_VENV=str(bin.parent))
    job.ended(1)
    assert "would hurt a run: cores" in job.log and "OMP_NUM_THREADS=1" in job.log
    one.run("srun", "mount", "-o", "remount,size=128k", "/dev/shm")
    try:
        job = submit("train_cpu.sbatch", "doctor", "--quick", sbatch=sbatch)
        job.ended(1)
    finally:
        one.run("srun", "mount", "-o", "remount,size=50%", "/dev/shm")
    assert "mount -o remount,size=8g /dev/shm" in job.log and "cores" not in job.log.split("would hurt")[-1]
    job = submit("train_cpu.sbatch", "doctor", "--quick", sbatch=sbatch)
    job.ended()
    assert "4 ranks, started by srun" in job.log and "nothing would hurt a run" in job.log


def test_all_of_the_folder_is_shipped():
    """A wheel puts into share/hpcdl/slurm of the environment what the patterns in setup.cfg find."""
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    files = setup["options.data_files"]
    for folder in (ROOT / "slurm", *(path for path in (ROOT / "slurm").rglob("*") if path.is_dir())):
        patterns = files[f"share/hpcdl/{folder.relative_to(ROOT)}"].split()
        found = {path for pattern in patterns for path in ROOT.glob(pattern)}
        assert found == {path for path in folder.iterdir() if path.is_file() and path.suffix != ".sif"}
