"""Programs start in `main`: help without MPI, signals before MPI, and nothing at import."""

import dataclasses
import inspect
import json
import os
import subprocess
import sys

import pytest

from hpcdl.launch import start
from hpcdl.programs import files, script
from hpcdl.strategies.description import SAME

HEAVY = ("numba", "mpi4py.MPI", "h5py", "torch")
IMPORTED = "import json, sys; print(json.dumps([name for name in {heavy} if name in sys.modules]))"
BEGIN = [*(name for name in files() if name.startswith("train-")), "search", "compare", "doctor"]
ACTS = ("train-dqn", "train-gorila", "train-apex")  # theirs takes environments, too


def shown(*arguments, **more):
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, check=True, timeout=60, **more)


def test_to_import_a_program_that_trains_imports_nothing_heavy(alone):
    code = "".join(f"import hpcdl.scripts.{name.replace('-', '_')}\n" for name in BEGIN)
    assert json.loads(shown("-c", code + IMPORTED.format(heavy=HEAVY)).stdout) == []


def test_help_imports_nothing_heavy(alone):
    code = "from hpcdl import cli\ntry:\n    cli.main(['train-allreduce', '--lr', '0.1', '--help'])\n"
    code += f"except SystemExit as end:\n    print(end.code)\n{IMPORTED.format(heavy=HEAVY)}"
    lines = shown("-c", code).stdout.splitlines()
    assert lines[0] == "usage: hpcdl train-allreduce [OPTIONS]"
    assert lines[-2:] == ["0", "[]"]


def test_the_list_imports_neither_numpy_nor_a_program(alone):
    code = "from hpcdl import cli\ncli.main(['--help'])\n" + IMPORTED.format(
        heavy=(*HEAVY, "mpi4py", "numpy", "ast", "argparse")
    )
    code += "\nprint([name for name in sys.modules if name.startswith('hpcdl.scripts.')])"
    assert shown("-c", code).stdout.splitlines()[-2:] == ["[]", "[]"]


def test_one_process_prints_help(alone):
    for number, printed in (("0", True), ("1", False)):
        done = shown("-m", "hpcdl", "train-allreduce", "--help", env=os.environ | {"PMI_RANK": number})
        assert bool(done.stdout) is printed and not done.stderr


@pytest.mark.parametrize("arguments", [["--help"], ["train-allreduce", "--help"]])
def test_who_reads_help_may_leave(alone, arguments):
    reader, writer = os.pipe()
    os.close(reader)
    code = f"from hpcdl import cli; cli.main({arguments})"
    done = subprocess.run([sys.executable, "-c", code], stdout=writer, stderr=subprocess.PIPE, text=True, timeout=60)
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_refusal_before_help_is_that_of_all_ranks(run_on):
    done = run_on(2, files()["train-allreduce"], "--lr", "--help", check=2)
    assert done.stderr.count("train-allreduce: error: argument --lr: expected one argument") == 1
    assert not done.stdout


def test_signals_are_taken_over_before_mpi_starts(monkeypatch):
    order = []
    monkeypatch.setattr(start.signals, "install", lambda: order.append("signals"))
    monkeypatch.setattr(start, "start", lambda status: order.append(f"MPI, else {status}"))
    monkeypatch.setattr("hpcdl.comm.failure.install", lambda: order.append("the end of all"))
    start.start_mpi()
    assert order == ["signals", "MPI, else 2", "the end of all"]
    order.clear()
    start.start_mpi(stoppable=False, status=1)
    assert order == ["MPI, else 1", "the end of all"]


def test_each_program_bears_its_name_and_its_loop_takes_nothing_but_options():
    for name in BEGIN:
        main = script(name).main
        if isinstance(main, start.TrainingProgram):
            assert main.strategy.program == name
            arguments = list(inspect.signature(main.strategy.loop).parameters)[SAME:]
            options = {field.name for field in dataclasses.fields(main.options_class)}
            renamed = main.strategy.renamed
            assert name in ACTS or set(arguments) <= options | set(renamed), name
            assert set(renamed) <= set(arguments), name
            assert all(each in options or hasattr(main.options_class, each) for each in renamed.values()), name
        else:
            assert main.name == name


def test_a_signal_in_the_first_imports_stops_the_run_in_good_order(alone, tmp_path):
    """It comes when the handlers are there, and what trains is yet to be imported."""
    code = (
        "import os, signal, sys\n"
        "from hpcdl.launch import start\n"
        "from hpcdl.scripts import train_sequential\n"
        "begin = start.start\n"
        "def interrupted(status):\n    os.kill(os.getpid(), signal.SIGTERM)\n    begin(status)\n"
        "start.start = interrupted\n"
        "train_sequential.main(['--epochs', '3', '--out', 'none', '--progress', 'none'])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 85, done.stderr
