"""A module as a model is that module under plain PyTorch, step by step; and it holds no copy of what it trains."""

import functools
import pickle
import subprocess
import sys

import numpy as np
import pytest
import torch
import torch_nets
from mpi4py import MPI
from torch import nn

from hpcdl.comm import Communicator
from hpcdl.data import Batch, from_arrays
from hpcdl.errors import UsageError
from hpcdl.inference.trained_model import TrainedModel
from hpcdl.models import for_data, make_model
from hpcdl.random import Random
from hpcdl.runs import Options, Run
from hpcdl.strategies import sequential
from hpcdl.torch import TorchModel
from hpcdl.torch.buffers import statistics_of

ROWS = 13


@pytest.fixture
def rows():
    random = np.random.default_rng(4)
    y = random.integers(0, 3, 29)
    return random.standard_normal((29, 6)) + y[:, None], y


def model(name="mlp", dtype="float64", **settings):
    spec = "".join([f"torch:torch_nets:{name}", *(f",{key}={value}" for key, value in settings.items())])
    return make_model(spec, (6,), 3, dtype)


def batch_of(x, y, start=0, stop=None, step=0, epoch=0):
    part = slice(start, stop)
    return Batch(x[part], y[part], len(y[part]), epoch, step, np.arange(len(y))[part])


def gradient_of(made, w, batch, on_ready=None):
    gradient = np.zeros_like(w)
    return made.loss_and_gradient(w, batch, gradient, on_ready), gradient


def plain_gradient(made, w, x, y):
    """By PyTorch alone, on a module of its own."""
    module = made.make().double()
    module.load_state_dict({name: torch.tensor(view) for name, view in made.layout.views(w).items()}, strict=False)
    loss = nn.CrossEntropyLoss(reduction="sum")(module(torch.tensor(x)), torch.tensor(y))
    loss.backward()
    grads = dict(module.named_parameters())
    return loss.item(), np.concatenate([grads[name].grad.numpy().reshape(-1) for name in made.layout.tensors])


@pytest.mark.parametrize("name", ["linear", "mlp", "branches"])
def test_loss_and_gradient_are_those_of_pytorch_and_are_added(name, rows):
    made = model(name)
    w = made.initialize(Random(1))
    loss, gradient = gradient_of(made, w, batch_of(*rows))
    wanted, expected = plain_gradient(made, w, *rows)
    assert loss == pytest.approx(wanted, rel=1e-12)
    np.testing.assert_allclose(gradient, expected, rtol=1e-10, atol=1e-12)
    made.loss_and_gradient(w, batch_of(*rows), gradient)
    np.testing.assert_allclose(gradient, 2 * expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("rule", ["sgd", "momentum", "adam"])
def test_step_by_step_as_plain_pytorch(rule, rows):
    x, y = rows
    data = from_arrays(x, y, dtype="float64")
    made = for_data("torch:torch_nets:mlp", data, "float64")
    options = Options(batch_size=ROWS, epochs=3, optimizer=rule, lr=0.05, schedule="constant", dtype="float64",
                      progress="none", seed=5)  # fmt: skip
    path = []
    with Run(Communicator(MPI.COMM_SELF), options) as run:
        run.observe(lambda run, *_: path.append(run.parameters.copy()))
        sequential.train(run.comm, made, data, run.make_optimizer(made, data), run)

    module = made.make().double()
    torch.nn.utils.vector_to_parameters(torch.tensor(made.initialize(Random(5))), module.parameters())
    rules = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam}
    rules["momentum"] = lambda parameters, lr: torch.optim.SGD(parameters, lr, momentum=0.9)
    theirs = rules[rule](module.parameters(), lr=0.05)
    steps = 0
    for epoch in range(3):
        for batch in data.batches(epoch, ROWS):
            theirs.zero_grad()
            nn.functional.cross_entropy(module(torch.tensor(batch.x)), torch.tensor(batch.y)).backward()
            theirs.step()
            wanted = torch.nn.utils.parameters_to_vector(module.parameters()).detach().numpy()
            np.testing.assert_allclose(path[steps], wanted, rtol=1e-10, atol=1e-10)
            steps += 1
    assert steps == len(path) == 9


def test_a_mean_counts_its_rows_and_shares_may_be_empty(rows):
    made = make_model("torch:torch_nets:values", (6,), 0, "float64", outputs=(2,))
    x, y = rows[0], rows[0][:, :2] ** 2
    w = made.initialize(Random(0))
    loss, gradient = gradient_of(made, w, batch_of(x, y))
    assert loss == pytest.approx(29 * ((made.predict(w, x) - y) ** 2).mean(), rel=1e-12)
    total, summed = 0.0, np.zeros_like(w)
    for part in ((0, 4), (4, 4), (4, 28), (28, 29)):
        total += made.loss_and_gradient(w, batch_of(x, y, *part), summed)
    assert total == pytest.approx(loss, rel=1e-12)
    np.testing.assert_allclose(summed, gradient, rtol=1e-10, atol=1e-12)


def test_nothing_is_copied_and_vectors_may_change(rows):
    made = model()
    w = made.initialize(Random(0))
    loss, gradient = gradient_of(made, w, batch_of(*rows))
    weight = made.module[0].weight
    assert np.shares_memory(weight.detach().numpy(), w) and np.shares_memory(weight.grad.numpy(), gradient)
    w *= 2  # in place: the module sees it
    changed, _ = gradient_of(made, w, batch_of(*rows))
    other = w.copy()
    assert changed != loss and gradient_of(made, other, batch_of(*rows))[0] == changed
    assert np.shares_memory(weight.detach().numpy(), other)
    for _ in range(50):  # vectors that come and go, at addresses that come again
        vector = made.initialize(Random(0))
        assert gradient_of(made, vector, batch_of(*rows))[0] == loss
        np.testing.assert_array_equal(gradient_of(made, vector[:], batch_of(*rows))[1], gradient)


def test_bound_once_while_the_vectors_stay(rows, monkeypatch):
    made = model()
    w, bound = made.initialize(Random(0)), []
    views = made.bound._views
    monkeypatch.setattr(made.bound, "_views", lambda vector: bound.append(1) or views(vector))
    gradient = np.zeros_like(w)
    for _ in range(5):
        made.loss_and_gradient(w[:], batch_of(*rows), gradient[:])  # other arrays, the same memory
        made.evaluate(w, batch_of(*rows))
    assert len(bound) == 2


@pytest.mark.parametrize("name", ["mlp", "tied", "branches"])
def test_each_slice_is_final_once_and_when_it_is_told(name, rows):
    made = model(name)
    w = made.initialize(Random(0))
    for part in ((0, None), (0, 1), (3, 3)):  # of no rows: all at once
        gradient, told = np.zeros_like(w), []

        def ready(part, gradient=gradient, told=told):
            told.append((part, gradient[part].copy()))

        made.loss_and_gradient(w, batch_of(*rows, *part), gradient, ready)
        assert sorted(part.start for part, _ in told) == [each.offset for each in made.layout.tensors.values()]
        assert all(np.array_equal(values, gradient[part]) for part, values in told)
        assert sum(part.stop - part.start for part, _ in told) == made.size
    assert gradient_of(made, w, batch_of(*rows))[1].any()
    assert not made.bound.hooks  # they cost nothing where nobody listens


def test_the_last_layer_is_told_first(rows):
    made, told = model(), []
    gradient_of(made, made.initialize(Random(0)), batch_of(*rows), lambda part: told.append(part.start))
    assert told[0] >= made.layout.tensors["6.weight"].offset and told[-1] < made.layout.tensors["3.weight"].offset


def test_tied_once_frozen_never_unused_zero(rows):
    made = model("tied")
    names = set(made.layout.tensors)
    assert "first.weight" in names and not names & {"second.weight", "frozen.weight", "mask", "count"}
    w = made.initialize(Random(0))
    loss, gradient = gradient_of(made, w, batch_of(*rows))
    assert not made.layout.view(gradient, "unused.weight").any() and made.layout.view(gradient, "first.weight").any()
    frozen = made.module.frozen.weight.detach().numpy().copy()
    made.initialize(Random(0))
    assert np.array_equal(made.module.frozen.weight.detach().numpy(), frozen)
    other = made.initialize(Random(1))
    assert not np.array_equal(made.module.frozen.weight.detach().numpy(), frozen)
    assert gradient_of(made, other, batch_of(*rows))[0] != loss


def test_initial_values_follow_the_seed():
    a, b, c = (model().initialize(Random(seed)) for seed in (1, 1, 2))
    assert np.array_equal(a, b) and not np.array_equal(a, c)
    fixed = TorchModel(torch_nets.mlp((6,), 3), features=(6,), classes=3)  # without a function that makes it
    wanted = torch.nn.utils.parameters_to_vector(fixed.module.parameters()).detach().numpy()
    for seed in (1, 2):
        assert np.array_equal(fixed.initialize(Random(seed)), wanted)


def test_scores_and_predictions(rows):
    x, y = rows
    made = model(dropout=0.5)
    w = made.initialize(Random(0))
    predicted = made.predict(w, x)
    assert predicted.shape == (29, 3) and np.allclose(predicted.sum(1), 1)
    loss, right = made.evaluate(w, batch_of(x, y))
    assert right == (predicted.argmax(1) == y).sum()
    assert loss == pytest.approx(-np.log(predicted[np.arange(29), y]).sum(), rel=1e-10)
    assert made.evaluate(w, batch_of(x, y, 0, 0)) == (0.0, 0.0)


def test_the_module_is_given_back(rows):
    made = model()
    w = made.initialize(Random(0))
    gradient_of(made, w, batch_of(*rows))
    module = made.release(w)
    before = module(torch.tensor(rows[0])).detach().numpy()
    w[:] = 0
    assert module[0].weight.grad is None and np.array_equal(module(torch.tensor(rows[0])).detach().numpy(), before)
    assert gradient_of(made, w, batch_of(*rows))[0] == pytest.approx(29 * np.log(3))


WITHOUT_HPCDL = """
import pickle, sys

class Refuses:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "hpcdl":
            raise ImportError("hpcdl is not installed")

sys.meta_path.insert(0, Refuses())
with open(sys.argv[1], "rb") as file:
    module, values, outputs = pickle.load(file)
import torch
for rows, wanted in outputs.items():
    torch.manual_seed(rows)
    output = module(values[:rows])
    assert torch.allclose(output, wanted), rows  # other threads may add in another order
    output.sum().backward()
torch.optim.SGD(module.parameters(), 0.1).step()
assert not any(name.startswith("hpcdl") for name in sys.modules)
"""


def test_a_module_that_is_given_back_needs_no_hpcdl(alone, rows, tmp_path):
    x = torch.tensor(rows[0])

    def network():
        torch.manual_seed(0)
        layers = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(), nn.Dropout1d(), nn.AlphaDropout(), nn.Linear(8, 3)
        layers[3].forward = functools.partial(nn.functional.dropout, p=0.25)  # one of the user's own
        return nn.Sequential(*layers).double()

    ready = []
    made = TorchModel(network(), features=(6,), classes=3, dtype="float64", make=network)
    w = made.initialize(Random(0))
    trained, _ = gradient_of(made, w, batch_of(*rows, stop=7), on_ready=ready.append)  # as --overlap has it
    module, plain = made.release(w), network()
    plain.load_state_dict(module.state_dict())
    outputs = {}
    for count in (7, 29):  # as many rows as the last step had, and others
        torch.manual_seed(count)
        outputs[count] = plain(x[:count]).detach()
    ready.clear()
    module(x).sum().backward()
    assert not ready  # gradients are told to nobody
    (tmp_path / "module").write_bytes(pickle.dumps((module, x, outputs)))
    program = [sys.executable, "-I", "-c", WITHOUT_HPCDL, tmp_path / "module"]
    done = subprocess.run(program, capture_output=True, text=True, timeout=100)
    assert not done.returncode, done.stderr
    module.load_state_dict(made.make().state_dict())  # for another run it is hpcdl's again
    again = made.initialize(Random(0))
    assert gradient_of(made, again, batch_of(*rows, stop=7))[0] == trained


def test_float32_stays_and_is_widened():
    assert model(dtype="float32").initialize(Random(0)).dtype == np.float32
    norm = model("normed").module[1]
    assert norm.running_mean.dtype == torch.float64 and norm.num_batches_tracked.dtype == torch.int64


@pytest.mark.parametrize(
    "name, dtype, said",
    [
        ("absent", "float32", "module 'torch_nets' has no attribute 'absent'"),
        ("no_module", "float32", "the function returns a int, not a torch.nn.Module"),
        ("raising", "float32", "ValueError: no such width"),
        ("lazy", "float32", "parameter 0.weight gets its shape from the first batch"),
        ("narrow", "float32", "parameter weight is of torch.bfloat16, and the run computes in torch.float32"),
        ("narrow", "float64", "parameter weight is of torch.bfloat16"),
        ("wide", "float32", "parameter weight is of torch.float64, and the run computes in torch.float32"),
        ("elsewhere", "float32", "parameter weight is on meta"),
        ("untrained", "float32", "no parameters to train"),
        ("vector_loss", "float32", "the loss is a tensor of shape (2,), and should be one number"),
        ("unreduced", "float32", "reduction='none'; take reduction='sum'"),
        ("weighted", "float32", "take reduction='sum'"),
        ("narrow_output", "float32", "for 2 rows the module returns (2, 2), not (2, 3)"),
        ("unfitting", "float32", "the module cannot evaluate two rows of 6 value(s): RuntimeError: mat1 and mat2"),
        ("complex_buffer", "float32", "phase is of torch.complex64, which a checkpoint cannot hold"),
    ],
)
def test_what_cannot_be_trained_is_refused_in_one_line(name, dtype, said):
    with pytest.raises(UsageError) as refused:
        model(name, dtype)
    assert said in str(refused.value) and str(refused.value).startswith(f"--model torch:torch_nets:{name}")
    assert "\n" not in str(refused.value)


def test_what_only_a_step_shows(rows):
    made = model("growing")
    with pytest.raises(UsageError, match=r"replaces its parameter head\.weight while it computes"):
        gradient_of(made, made.initialize(Random(0)), batch_of(*rows))


def test_batch_norm_of_one_row_is_refused_in_one_line(rows):
    made = model("normed")
    w = made.initialize(Random(0))
    with pytest.raises(UsageError, match=r"batch norm cannot normalize a single row.*; choose the batch size"):
        gradient_of(made, w, batch_of(*rows, stop=1))
    made.turn(training=True)
    with pytest.raises(UsageError, match="batch norm cannot normalize a single row"):
        made.layers[1].through(torch.zeros(1, 6, dtype=torch.float64))
    assert gradient_of(made, w, batch_of(*rows, stop=2))[0] > 0 and len(made.predict(w, rows[0][:1])) == 1
    with pytest.raises(ValueError, match="one of the user's own"), statistics_of([made.module], 2):
        raise ValueError("one of the user's own")


def test_in_bfloat16_it_computes_as_autocast_with_parameters_of_float32(rows):
    x, y = rows[0].astype("float32"), rows[1]
    made, exact = model(dtype="bfloat16"), model(dtype="float32")
    w = made.initialize(Random(0))
    assert w.dtype == made.layout.dtype == np.float32 and np.array_equal(w, exact.initialize(Random(0)))
    loss, gradient = gradient_of(made, w, batch_of(x, y))
    module = exact.release(w)
    with torch.autocast("cpu", torch.bfloat16):
        output = module(torch.tensor(x))
    assert output.dtype is torch.bfloat16
    wanted = nn.CrossEntropyLoss(reduction="sum")(output.float(), torch.tensor(y))
    wanted.backward()
    assert loss == wanted.item()
    np.testing.assert_array_equal(gradient, np.concatenate([each.grad.reshape(-1) for each in module.parameters()]))
    _, precise = gradient_of(exact, w, batch_of(x, y))
    assert gradient.dtype == np.float32 and 0 < np.abs(gradient - precise).max() < 0.05 * np.abs(precise).max()
    predicted = made.predict(w, x)
    assert predicted.dtype == np.float32 and np.allclose(predicted.sum(1), 1) and made.evaluate(w, batch_of(x, y))[0]


def test_what_was_computed_in_bfloat16_is_scored_so(rows, tmp_path):
    data = from_arrays(*rows, *rows, dtype="bfloat16")
    made = for_data("torch:torch_nets:mlp", data, "bfloat16")
    options = Options(dtype="bfloat16", epochs=2, progress="none", out=str(tmp_path / "run"))
    with Run(Communicator(MPI.COMM_SELF), options) as run:
        w = sequential.train(run.comm, made, data, run.make_optimizer(made, data), run)
    found = TrainedModel(str(tmp_path / "run"))
    x = rows[0].astype("float32")
    predicted = found.model("torch:torch_nets:mlp").predict(found.parameters, x)
    assert np.array_equal(predicted, made.predict(w, x))
    assert not np.array_equal(predicted, model(dtype="float32").predict(w, x))


def test_bfloat16_is_for_modules():
    with pytest.raises(UsageError, match=r"--dtype bfloat16 is only for PyTorch modules \(--model torch:...\)"):
        make_model("mlp:5", (6,), 3, "bfloat16")


def test_class_weights_are_those_of_pytorch_and_leave_scores_alone(rows):
    x, y = rows
    weights = np.array([1.0, 5.0, 0.5])
    made, weighted = model(), make_model("torch:torch_nets:mlp", (6,), 3, "float64", class_weights=weights)
    w = made.initialize(Random(1))
    loss, gradient = gradient_of(weighted, w, batch_of(x, y))
    parts = [gradient_of(made, w, batch_of(x[y == k], y[y == k])) for k in range(3)]
    assert loss == pytest.approx(sum(factor * part[0] for factor, part in zip(weights, parts, strict=True)), rel=1e-12)
    summed = sum(factor * part[1] for factor, part in zip(weights, parts, strict=True))
    np.testing.assert_allclose(gradient, summed, rtol=1e-10, atol=1e-12)
    assert weighted.evaluate(w, batch_of(x, y)) == made.evaluate(w, batch_of(x, y))
    with pytest.raises(UsageError, match="the module has a loss of its own"):
        TorchModel(nn.Linear(6, 3), nn.CrossEntropyLoss(), features=(6,), classes=3, class_weights=weights)
