"""A run that starts from values in a file: they are its first ones, whoever holds them; what does not fit is listed."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from in_process import ends
from safetensors.numpy import save_file

from hpcdl.checkpoint.checkpoint_file import Checkpoint
from hpcdl.data import open_data
from hpcdl.errors import UsageError
from hpcdl.inference.pretrained import load_initial_values, read_tensors
from hpcdl.models import for_data
from hpcdl.models.layout import Layout, Tensor
from hpcdl.models.model import Abilities
from hpcdl.models.part import ModelPart
from hpcdl.random import Random

QUIET = ["--progress", "none", "--model", "mlp:5", "--steps", "1", "--batch-size", "4"]


def model():
    return for_data("mlp:5", open_data("digits"), "float32")


@pytest.fixture
def values():
    made = model()
    return {name: each + 0.5 for name, each in made.layout.views(made.initialize(Random(7))).items()}


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def flat(values):
    return np.concatenate([each.ravel() for each in values.values()])


def test_each_kind_of_file_gives_the_same_values(values):
    np.savez("a.npz", **values)
    save_file(values, "a.safetensors")
    for file in ("a.npz", "a.safetensors"):
        made = model()
        load_initial_values(made, file)
        assert np.array_equal(made.initialize(Random(0)), flat(values))
        made.initialize(Random(0))[:] = 0  # whoever has the vector may change it
        assert np.array_equal(made.initialize(Random(0)), flat(values))
        part = ModelPart(made, [range(1, len(made.layers))])
        assert np.array_equal(part.initialize(Random(0)), flat({k: v for k, v in values.items() if "dense2" in k}))


@pytest.mark.parametrize(
    "program", ["allreduce", "gossip", "local_sgd", "model_parallel", "fully_sharded", "sequential", "federated"]
)
def test_a_program_starts_from_a_file_or_from_a_run_by_any_strategy(program, values):
    """At a learning rate of almost nothing the parameters stay what they were."""
    np.savez("a.npz", **values)
    still = [*QUIET, "--lr", "1e-30", "--initial", "a.npz", "--out", "a"]
    if program == "federated":
        still = ["--model", "mlp:5", "--rounds", "1", "--clients", "20", "--fraction", "0.1", *still[-6:]]
    assert ends(f"train_{program}", still) == (0, "")
    assert np.array_equal(Checkpoint.read("a").vectors["parameters"], flat(values))
    if program == "sequential":
        again = [*QUIET, "--lr", "1e-30", "--initial", "a", "--out", "b", "--seed", "3"]
        assert ends("train_fully_sharded", again) == (0, "")
        assert np.array_equal(Checkpoint.read("b").vectors["parameters"], flat(values))
        assert np.array_equal(flat(read_tensors("b/checkpoint.h5")), flat(values))


def test_who_resumes_needs_the_file_no_more(values):
    np.savez("a.npz", **values)
    assert ends("train_allreduce", [*QUIET, "--initial", "a.npz", "--out", "a"]) == (0, "")
    Path("a.npz").unlink()
    assert ends("train_allreduce", ["--resume", "a", "--steps", "2", "--progress", "none"]) == (0, "")
    status, said = ends("train_allreduce", ["--resume", "a", "--steps", "3", "--initial", "a.npz"])
    assert status == 2 and "--initial is for a new run, and --resume continues a run" in said


def test_what_does_not_fit_is_listed(values):
    wrong = dict(values)
    wrong["head.weight"] = wrong.pop("dense2.weight")
    wrong["dense2.bias"] = np.zeros(7, np.float32)
    np.savez("a.npz", **wrong)
    status, said = ends("train_allreduce", [*QUIET, "--initial", "a.npz"])
    words = "does not fit the model: missing: dense2.weight; unexpected: head.weight; of another shape: dense2.bias "
    assert status == 2 and words + "(7, not 10)" in said and said.count("\n") == 1


@pytest.mark.parametrize(
    ("write", "words"),
    [
        (lambda: None, "--initial a.npz: there is no such file"),
        (lambda: Path("a.npz").write_text("x"), "a.npz cannot be read as npz"),
        (lambda: np.savez("a.npz", w=np.zeros(2)), "missing: dense1.weight, dense1.bias, dense2.weight, dense2.bias;"),
        (lambda: np.savez("a.npz", **{f"w{i}": np.zeros(2) for i in range(9)}), "w4, w5 and 3 more"),
    ],
)
def test_bad_files_are_refused_in_a_line(write, words):
    write()
    with pytest.raises(UsageError) as refused:
        load_initial_values(model(), "a.npz")
    assert words in str(refused.value) and "\n" not in str(refused.value)


@pytest.mark.parametrize("name", ["a.txt", "nothing", "a.safetensors", "a.h5"])
def test_files_of_other_kinds(name):
    for each in ("a.txt", "a.safetensors"):
        Path(each).write_text("x")
    with pytest.raises(UsageError):
        read_tensors(name)


def test_values_that_are_no_numbers_of_the_models_type(values):
    np.savez("a.npz", **values | {"dense1.bias": np.full(5, 1e300)})
    with pytest.raises(UsageError, match="some values are not finite in float32"):
        load_initial_values(model(), "a.npz")


def test_what_a_model_holds_beside_its_parameters_has_its_name_too():
    layout = Layout([Tensor("w", (2,), 0, "a")], "float64")
    can, extra = Abilities(buffers=True, module=True), {"n": np.zeros(1, np.int64)}
    made = SimpleNamespace(abilities=can, layout=layout, extra=extra, aliases={"v": "w"})
    np.savez("a.npz", v=np.arange(2.0), n=np.int64(4))
    load_initial_values(made, "a.npz")
    assert made.initialize(Random(0)).tolist() == [0, 1] and made.extra["n"].tolist() == [4]
    np.savez("a.npz", w=np.arange(2.0))
    with pytest.raises(UsageError, match=r"missing: n$"):
        load_initial_values(made, "a.npz")
