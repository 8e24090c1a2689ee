"""One's own model and data, by package.module:name: trained, scored, predicted and gone on with; and as a library."""

import importlib
import json
import re
import sys
from pathlib import Path

import numpy as np
import pytest
import yaml
from in_process import ends

from hpcdl.checkpoint.checkpoint_file import Checkpoint
from hpcdl.comm import Communicator
from hpcdl.data import from_arrays
from hpcdl.models import make_model
from hpcdl.recovery.launch_command import JobLine
from hpcdl.runs import Options, Run
from hpcdl.strategies import all_reduce

FOLDER = Path(__file__).parents[2] / "scripts"
MODULE = """
import numpy as np
from hpcdl.models.layout import Layout, Tensor

class Polynomial:
    def __init__(self, dtype, width=2):
        self.layout = Layout([Tensor("w", (width,), offset=0, layer="all")], dtype)
        self.width = width
    def initialize(self, random):
        return np.zeros(self.width, self.layout.dtype)
    def predict(self, w, x):
        return np.vander(x[:, 0], self.width, increasing=True).astype(x.dtype) @ w
    def loss_and_gradient(self, w, batch, gradient, on_ready=None):
        error = self.predict(w, batch.x) - batch.y
        gradient += np.vander(batch.x[:, 0], self.width, increasing=True).astype(w.dtype).T @ error
        return float(error @ error) / 2

def curve(rows=60):
    x = np.linspace(-1, 1, rows)[:, None]
    return x, 3 - x[:, 0], x[::7], 3 - x[::7, 0]

class Exact(Polynomial):
    # It minds batches without rows, as x.reshape(len(x), -1) does, and knows no on_ready.
    def loss_and_gradient(self, w, batch, gradient):
        assert len(batch.y) and batch.x.reshape(len(batch.x), -1).shape[1] == 1
        return super().loss_and_gradient(w, batch, gradient)

def planes(rows=90, seed=0):
    random = np.random.default_rng(5)
    x = random.standard_normal((rows, 4))
    y = np.tanh(x @ random.standard_normal((4, 2)))
    return x[30:], y[30:], x[:30], y[:30]

class Half:
    def initialize(self, random): pass
    def predict(self, w, x): pass

def function(): pass
"""


@pytest.fixture
def mine(tmp_path, monkeypatch):
    (tmp_path / "shapes_of_mine.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    sys.modules.pop("shapes_of_mine", None)


TOLD = ["--data", "shapes_of_mine:curve,rows=50", "--model", "shapes_of_mine:Polynomial,width=3", "--lr", "0.3"]
TRUST, CONFIG = ["--trust", "a"], ["--config", "a/config.yaml", "--trust", "a"]


def test_trained_scored_predicted_and_gone_on_with(run_on, mine):
    """From the current folder, as with python -m; what it is called is in the run's folder, which has to be trusted."""
    run_on(2, FOLDER / "train_allreduce.py", *TOLD, "--epochs", 5, "--out", "a", check=0)
    config, summary = (yaml.safe_load((mine / "a" / name).read_text()) for name in ("config.yaml", "summary.json"))
    assert (config["data"], config["model"]) == (TOLD[1], TOLD[3]) and summary["model"] == TOLD[3]
    assert summary["data"] == "curve" and summary["parameters"] == 3
    run_on(3, FOLDER / "train_gossip.py", *CONFIG, "--steps", 4, "--out", "none", check=0)
    done = run_on(3, FOLDER / "train_allreduce.py", "--resume", "a", *TOLD[:4], "--epochs", 60, check=0)
    assert re.search(r"model +│ shapes_of_mine:Polynomial,width=3, 3 parameters", done.stdout)
    done = run_on(2, FOLDER / "evaluate.py", "a", *TRUST, check=0)
    assert re.search(r"a, step 120, on 8 rows of shapes_of_mine:curve", done.stdout) and "test_r2 " in done.stdout
    done = run_on(2, FOLDER / "predict.py", "a", "shapes_of_mine:curve,rows=15", "--split", "test", *TRUST, check=0)
    header, first, *_ = done.stdout.splitlines()
    assert header == "row,label,value" and abs(float(first.split(",")[2]) - 4) < 0.2


def test_away_from_its_module_a_run_says_where_it_was_started(mine):
    assert ends("train_sequential", [*TOLD, "--steps", "2", "--out", "a", "--progress", "none"])[0] == 0
    (mine / "shapes_of_mine.py").rename(mine / "moved_shapes.py")
    sys.modules.pop("shapes_of_mine")
    importlib.invalidate_caches()
    status, said = ends("evaluate", ["a", *TRUST])
    assert status == 2 and said.count("\n") == 1
    assert f"No module named 'shapes_of_mine'; its run was started in {mine}" in said
    other = ["--model", "moved_shapes:Polynomial,width=3", "--data", "moved_shapes:curve"]
    assert ends("evaluate", ["a", *other]) == (0, "")


@pytest.mark.parametrize(
    ("told", "words"),
    [
        (["--model", "shapes_of_mine:Half"], "the class has no loss_and_gradient; a model has layout, initialize"),
        (["--model", "shapes_of_mine:function"], "a model is a class, not an object of the type function"),
        (["--model", "shapes_of_mine:Polynomial,depth=2"], "there is no setting 'depth'; it takes dtype, width"),
        (["--model", "shapes_of_mine:Polynomial,width=x"], r"TypeError: .* \(.*, line \d+\)"),
        (
            ["--model", "shapes_of_mine:Polynomial,dtype=float64"],
            "the model's layout has the dtype float64, the run float32; let the class take",
        ),
        (["--data", "shapes_of_mine:absent"], "has no attribute 'absent'"),
    ],
)
def test_refusals(mine, told, words):
    status, said = ends("train_allreduce", [*TOLD, *told])
    assert status == 2 and re.search(words, said) and said.count("\n") == 1


def test_what_a_file_names_is_not_called(mine):
    """The name may be reached through the user's own module: from subprocess import run."""
    (mine / "shapes_of_mine.py").write_text(MODULE + "from subprocess import run\n")
    assert ends("train_allreduce", [*TOLD, "--steps", "2", "--out", "a", "--progress", "none"])[0] == 0
    evil = "shapes_of_mine:run,args=[touch,PWNED]"
    (mine / "evil.yaml").write_text(f"data: '{evil}'\n")
    (mine / "lines.yaml").write_text(f"lines: ['train-allreduce --data {evil}']\n")
    (mine / "space.yaml").write_text(f"data: ['digits', '{evil}']\n")
    (mine / "launcher.yaml").write_text("launcher: touch PWNED\n")
    (mine / "matrix.yaml").write_text(f"- '-n 1: train-allreduce --data {evil}'\n")
    found = Checkpoint.read(mine / "a")
    for name, value in (("source", evil), ("model", f"torch:{evil}")):
        Checkpoint(found.vectors, found.attributes | {name: value}).write(mine / f"{name}.h5")
    search = ["search", ["train-allreduce", "--space-file", "space.yaml", "--out", "s"]]
    for program, given in (
        ("train_sequential", ["--config", "evil.yaml"]),
        ("train_sequential", ["--config", "evil.yaml", "--trust", "shapes_of_mine:curve", "--trust", "a"]),
        ("train_allreduce", ["--resume", "a"]),
        ("train_gossip", ["--config", "a/config.yaml", "--model", "mlp"]),
        ("compare", ["train-allreduce", "--config", "evil.yaml", "--out", "c"]),
        ("compare", ["train-allreduce --config evil.yaml", "--out", "c"]),
        ("compare", ["--config", "lines.yaml", "--out", "c"]),
        ("train_ensemble", ["--config", "evil.yaml", "--out", "e"]),
        search,
        ("search", ["train-allreduce", "--config", "evil.yaml", "--space", "lr=0.1..1", "--out", "s"]),
        ("bench_svrg", ["--config", "evil.yaml"]),
        ("plan", ["memory", "a"]),
        ("plan", ["time", "train-sequential", "--config", "launcher.yaml"]),
        ("plan", ["check", "matrix.yaml"]),
        ("evaluate", ["a"]),
        ("evaluate", ["source.h5", "--trust", "shapes_of_mine:Polynomial"]),
        ("evaluate", ["model.h5", "--data", "digits"]),
        ("predict", ["a", "shapes_of_mine:curve"]),
    ):
        status, said = ends(program, given)
        line = r"[\w-]+: error: .*code that is called only if .*: add --trust .*\n"
        assert status == 2 and re.fullmatch(line, said), said
    assert not (mine / "PWNED").exists()
    (mine / "shapes_of_mine.py").write_text(MODULE)
    for given in (["a", "--trust", "a"], ["a", "--trust", "shapes_of_mine:Polynomial", "--data", TOLD[1]]):
        assert ends("evaluate", given) == (0, "")


def test_what_the_command_line_names_goes_on(mine):
    """A comparison, a search and an ensemble read what they have written, and --resume is told what to trust."""
    told, quiet = ["train-allreduce", *TOLD, "--epochs", "1"], ["--progress", "none"]
    for program, given, file in (
        ("compare", [*told, *quiet, "--seeds", "1"], "config.yaml"),
        ("search", [*told, "--space", "lr=0.1..0.3", "--trials", "1"], "config.yaml"),
        ("train_ensemble", [*told, *quiet, "--members", "1"], "ensemble.yaml"),
    ):
        assert ends(program, [*given, "--out", program]) == (0, ""), program
        status, said = ends(program, ["--resume", program])
        names = f"{program}/{file} names shapes_of_mine:(curve|Polynomial) .*--trust {program}/{file} for all"
        assert status == 2 and re.search(names, said), said
        job = JobLine.read(["hpcdl", program, *given, "--out", program])
        again = job.from_checkpoint(job.folder).own  # as supervise starts it
        assert "--trust=shapes_of_mine:Polynomial" in again and ends(program, [*again, "--progress", "none"])[0] == 0
    best = (mine / "search/best.yaml").read_text()
    assert "--model=shapes_of_mine:Polynomial,width=3" in best
    given = ["train-allreduce", "--config", "search/best.yaml", "--trust", "search", "--seeds", "1"]
    assert ends("compare", [*given, "--out", "again", "--progress", "none"]) == (0, "")
    assert ends("train_ensemble", ["--from", "search", "--best", "1", "--out", "e", "--progress", "none"])[0] == 2
    given = ["--from", "search", "--best", "1", "--trust", "search", "--out", "e", "--progress", "none"]
    assert ends("train_ensemble", given) == (0, "")
    assert ends("evaluate", ["e"])[0] == 2 and ends("evaluate", ["e", "--trust", "e"]) == (0, "")


def test_a_model_of_ones_own_sees_no_batch_without_rows(run_on, mine):
    """Three ranks share batches of two examples; the curve is that of one rank."""
    told = [*TOLD[:2], "--model", "shapes_of_mine:Exact,width=3", "--batch-size", 2, "--steps", 9, "--dtype", "float64"]
    run_on(3, FOLDER / "train_allreduce.py", *told, "--out", "three", check=0)
    assert ends("train_sequential", [*map(str, told), "--out", "one", "--progress", "none"])[0] == 0
    one, three = (json.loads((mine / each / "summary.json").read_text()) for each in ("one", "three"))
    assert three["train_loss"] == pytest.approx(one["train_loss"], rel=1e-10)


def test_values_of_ones_own_function_are_scored_in_their_own_units(mine, capsys):
    """Standardized once, and not twice; in training and evaluation alike."""
    told = ["--data", "shapes_of_mine:planes", "--model", "mlp:8", "--epochs", "3", "--standardize"]
    told += ["--progress", "none"]
    assert ends("train_sequential", [*told, "--out", "s"])[0] == 0
    assert ends("evaluate", ["s", "--predict", "p.csv", "--json", "s.json", "--trust", "s"])[0] == 0
    trained, scored = (json.loads((mine / each).read_text()) for each in ("s/summary.json", "s.json"))
    assert scored["scores"]["loss"] == pytest.approx(trained["test_loss"], rel=1e-5)
    table = np.loadtxt(mine / "p.csv", delimiter=",", skiprows=1)
    assert (mine / "p.csv").read_text().startswith("row,label 0,label 1,value 0,value 1")
    true = __import__("shapes_of_mine").planes()[3]
    np.testing.assert_allclose(table[:, 1:3], true, rtol=1e-6)
    found = np.sqrt(((table[:, 3:] - true) ** 2).mean(axis=0))
    np.testing.assert_allclose([each["rmse"] for each in scored["outputs"]], found, rtol=1e-4)
    assert ends("predict", ["s", "shapes_of_mine:planes", "--out", "q.csv"])[0] == 0
    assert (mine / "q.csv").read_text() == (mine / "p.csv").read_text()


@pytest.mark.parametrize("strategy", ["parameter_server", "fully_sharded", "pipeline", "allreduce"])
def test_several_outputs_under_any_strategy(run_on, mine, strategy):
    """The losses are those of sequential SGD, whoever holds the model and the data."""
    told = ["--data", "shapes_of_mine:planes", "--model", "mlp:8", "--epochs", 2, "--batch-size", 12]
    told += ["--dtype", "float64"]
    more = {"parameter_server": ["--servers", 1], "fully_sharded": ["--stage", 3], "allreduce": ["--data-servers", 1]}
    assert ends("train_sequential", [*map(str, told), "--out", "s", "--progress", "none"])[0] == 0
    run_on(2, FOLDER / f"train_{strategy}.py", *told, *more.get(strategy, []), "--out", "p", check=0)
    one, other = (json.loads((mine / each / "summary.json").read_text()) for each in "sp")
    for name in ("train_loss", "test_loss", "test_rmse"):
        assert other[name] == pytest.approx(one[name], rel=1e-10)


def test_a_library_run_records_what_it_used(world, mpi_tmp_path):
    """Not the options' defaults, mlp and digits."""
    x = np.random.default_rng(0).standard_normal((40, 3))
    data = from_arrays(x, np.arange(40) % 2, name="halves")
    comm = Communicator(world, allreduce="ring")
    for at, model in enumerate((make_model("mlp:4", (3,), 2), type("Theirs", (), {}))):
        if at:
            model = model()
            inner = make_model("softmax", (3,), 2)
            for name in ("layout", "initialize", "loss_and_gradient", "predict"):
                setattr(model, name, getattr(inner, name))
        options = Options(steps=2, out=str(mpi_tmp_path / str(at)), progress="none", lr=0.1)
        with Run(comm, options) as run:
            all_reduce.train(comm, model, data, run.make_optimizer(model, data), run)
        if world.rank == 0:
            name = ("mlp:4", f"{__name__}:Theirs")[at]
            config = yaml.safe_load((mpi_tmp_path / str(at) / "config.yaml").read_text())
            about = Checkpoint.read(mpi_tmp_path / str(at)).attributes
            assert (run.summary["model"], run.summary["data"]) == (config["model"], config["data"]) == (name, "halves")
            assert (about["model"], about["source"]) == (name, "")
            if world.size == 1 and not at:
                status, said = ends("evaluate", [str(mpi_tmp_path / "0")])
                assert status == 2 and "a program's own arrays" in said
    comm.free()
