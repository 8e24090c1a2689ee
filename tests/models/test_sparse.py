"""Every model that takes sparse rows computes on them what it computes on the same rows as a dense array."""

from types import SimpleNamespace

import numpy as np
import pytest

from hpcdl.csr import CSR
from hpcdl.errors import UsageError
from hpcdl.models import make_model
from hpcdl.random import Random

FEATURES = 9
CASES = [("linear", 0, {}), ("linear", 0, {"outputs": (3,)}), ("linear", 0, {"loss": "huber:delta=0.5"})]
CASES += [("logistic", 2, {}), ("svm", 2, {}), ("softmax", 4, {}), ("mlp:6", 3, {}), ("mlp:1", 0, {})]
CASES += [("mlp:6,5,activation=tanh", 3, {}), ("mlp:6,activation=gelu", 0, {"outputs": (2,), "loss": "huber"})]


def batches(rows, classes, outputs=(), dtype="float64", **_):
    """Return a batch, and the same with x sparse: a view of a larger CSR, of which some rows have no element."""
    random = np.random.default_rng(rows)
    x = (random.standard_normal((rows + 5, FEATURES)) * (random.random((rows + 5, FEATURES)) < 0.3)).astype(dtype)
    x[3:5] = x[:, 2] = 0
    y = random.integers(0, classes, rows) if classes else random.standard_normal((rows, *outputs)).astype(dtype)
    return SimpleNamespace(x=x[3 : 3 + rows], y=y), SimpleNamespace(x=CSR.of(x)[3 : 3 + rows], y=y)


@pytest.mark.parametrize("rows", [0, 1, 40])
@pytest.mark.parametrize("spec, classes, options", CASES)
@pytest.mark.parametrize("dtype, tolerance", [("float64", 1e-12), ("float32", 1e-4)])
def test_as_on_the_dense_rows(spec, classes, options, rows, dtype, tolerance):
    model = make_model(spec, (FEATURES,), classes, dtype, sparse=True, **options)
    dense, sparse = batches(rows, classes, dtype=dtype, **options)
    w = model.initialize(Random(2))
    w += 0.1
    gradients = np.zeros((2, model.size), dtype)
    found = [model.loss_and_gradient(w, each, g) for each, g in zip((dense, sparse), gradients, strict=True)]
    assert found[1] == pytest.approx(found[0], rel=tolerance, abs=tolerance)
    np.testing.assert_allclose(gradients[1], gradients[0], rtol=tolerance, atol=tolerance)
    np.testing.assert_allclose(model.predict(w, sparse.x), model.predict(w, dense.x), rtol=tolerance, atol=tolerance)
    assert model.evaluate(w, sparse) == pytest.approx(model.evaluate(w, dense), rel=tolerance, abs=tolerance)
    assert not model.layout.view(gradients[1], "dense1.weight")[2].any()  # a feature that no row has


def test_features_that_no_row_has_are_not_read():
    """NaN there changes nothing: a parameter server's worker holds only the parameters that its batch needs."""
    model = make_model("softmax", (FEATURES,), 3, "float64")
    _, sparse = batches(20, 3)
    w, gradient = model.initialize(Random(0)), np.zeros(model.size)
    model.layout.view(w, "dense1.weight")[2] = np.nan
    assert np.isfinite(model.loss_and_gradient(w, sparse, gradient)) and np.isfinite(gradient).all()


def test_rows_that_do_not_fit_are_refused():
    model, (_, sparse) = make_model("softmax", (FEATURES + 1,), 3, "float64"), batches(20, 3)
    w = model.initialize(Random(0))
    with pytest.raises(UsageError, match=r"x is a float64 array of shape \(20, 9\); this model wants"):
        model.predict(w, sparse.x)
    narrow = make_model("softmax", (FEATURES,), 3, "float32")
    with pytest.raises(UsageError, match="x is a float64 array"):
        narrow.predict(narrow.initialize(Random(0)), sparse.x)
