"""The command line of a job, read and changed."""

import shlex

import pytest

from hpcdl.errors import UsageError
from hpcdl.recovery.launch_command import Host, JobLine

END = " hpcdl train-allreduce --lr 0.1 --out runs/a"


def line(text):
    return JobLine.read(shlex.split(text))


@pytest.mark.parametrize(
    "text, program, ranks, launcher",
    [
        ("mpiexec -n 4 hpcdl train-gossip --out a", "train-gossip", 4, ["mpiexec", "-n", "4"]),
        ("mpirun -np 4 python -m hpcdl train_gossip --out=a", "train-gossip", 4, ["mpirun", "-np", "4"]),
        ("/x/mpiexec.hydra -n 4 python3.12 s/train_svrg.py --out a", "train-svrg", 4, ["/x/mpiexec.hydra", "-n", "4"]),
        ("srun --ntasks=4 --mpi=pmi2 v/hpcdl search train-svrg --out a", "search", 4, None),
        ("srun -n4 v/bin/hpcdl compare train-svrg --resume a", "compare", 4, ["srun", "-n4"]),
        ("env A=1 mpiexec -n 2 env B=2 hpcdl train-svrg --out a", "train-svrg", 2, None),
        ("hpcdl train-sequential --out a", "train-sequential", None, []),
        ("mpiexec -n 2 hpcdl train-svrg --out a -n 7", "train-svrg", 2, ["mpiexec", "-n", "2"]),
    ],
)
def test_what_is_started(text, program, ranks, launcher):
    found = line(text)
    assert (found.program, found.ranks, str(found.folder)) == (program, ranks, "a")
    if launcher is not None:
        assert found.starting("true") == [*launcher, "true"]


def test_what_it_is_gone_on_with_by():
    job = line("mpiexec -n 4" + END + " --force --initial w.npz --resume old --config c.yaml --inject=kill:rank=1")
    assert not job.goes_on and line("mpiexec" + END + " --resume runs/a/checkpoint-000000010.h5").goes_on
    again = job.from_checkpoint(job.folder)
    own = "--lr 0.1 --config c.yaml --inject=kill:rank=1 --resume runs/a --out runs/a"
    assert shlex.join(again.words) == f"mpiexec -n 4 hpcdl train-allreduce {own}" and again.goes_on
    assert again.from_checkpoint(again.folder) == again
    for program, kept in (("search", "--time-limit=9 "), ("compare", ""), ("train-ensemble", "--time-limit=9 ")):
        whole = line(f"mpiexec -n 4 hpcdl {program} train-svrg --seed 3 --time-limit 9 --out a")
        assert shlex.join(whole.from_checkpoint(None).words) == f"mpiexec -n 4 hpcdl {program} {kept}--resume a"


def test_what_a_restart_is_to_trust():
    """What the line names or trusts; its folder only where it trusts a file, whose names that folder repeats."""
    for text, trust in (
        ("compare 'train-svrg --model a:B,w=3' \"train-gossip --data='c:d'\"", "--trust=a:B --trust=c:d "),
        ("search train-svrg --space 'model=mlp:8|a:B' --space=allreduce=ring|c:d", "--trust=a:B --trust=c:d "),
        ("train-ensemble --vary model=a:B|mlp --trust x.yaml", "--trust=a:B --trust=x.yaml --trust=a "),
        ("search train-svrg --space optimizer=torch:Adam|sgd --method random:sobol", ""),
    ):
        again = line(f"mpiexec -n 4 hpcdl {text} --out a").from_checkpoint(None)
        assert set(again.own) == {*trust.split(), "--resume", "a"}
    job = line("mpiexec -n 4 hpcdl train-svrg --resume old --trust old --out a")
    again = job.from_checkpoint(job.folder)
    assert shlex.join(again.own) == "--trust old --trust=a --resume a --out a"
    assert again.from_checkpoint(again.folder) == again


@pytest.mark.parametrize("flag", ["-n 4", "-np 4", "--ntasks=4", "-n4"])
def test_fewer_ranks(flag):
    job = line(f"mpiexec {flag}{END} -n 4").with_ranks(3)
    assert job.ranks == 3 and job.words[-1] == "4" and job.folder.name == "a"
    assert shlex.join(job.words).startswith(f"mpiexec {flag.replace('4', '3')} hpcdl")


def test_fewer_hosts(tmp_path):
    hosts = tmp_path / "hosts"
    hosts.write_text("a:3  # the first\n\nb slots=2\n")
    for told, names, left in (
        ("-hosts a,b", [Host("a"), Host("b")], "mpiexec -hosts b -n 2"),
        ("--host a:3,b:2", [Host("a", 3), Host("b", 2)], "mpiexec --host b:2 -n 2"),
        (f"-f {hosts}", [Host("a", 3), Host("b", 2)], "mpiexec --host b:2 -n 2"),
        ("--host a,a,b", [Host("a"), Host("b")], "mpiexec --host b -n 2"),
    ):
        job = line(f"mpiexec {told} -n 5{END}")
        assert job.hosts == names
        assert shlex.join(job.on_hosts(names[1:]).words) == left + END
        assert job.on_hosts(names).ranks == 5
    assert line("srun -w a,b -n 4" + END).hosts == []
    with pytest.raises(UsageError, match="the hosts in nowhere cannot be read"):
        _ = line("mpiexec -f nowhere -n 5" + END).hosts


@pytest.mark.parametrize(
    "text, said",
    [
        ("bash job.sh", "'bash job.sh' starts no program of hpcdl"),
        ("mpiexec -n 4 hpcdl evaluate a", "evaluate cannot be resumed"),
        ("mpiexec -n 4 hpcdl train-kmeans --out a", "train-kmeans cannot be resumed"),
        ("mpiexec -n 4 hpcdl train-svrg", "give train-svrg an --out FOLDER"),
        ("mpiexec -n 4 hpcdl train-svrg --out none", "give train-svrg an --out FOLDER"),
        ("mpiexec -n 4 hpcdl search train-svrg --out a --only 3", "--only trains one trial"),
    ],
)
def test_refusals(text, said):
    with pytest.raises(UsageError, match=said):
        line(text)
