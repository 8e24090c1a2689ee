"""Model specs: what they make, and one clear line for each that is wrong."""

import numpy as np
import pytest

from hpcdl.errors import UsageError
from hpcdl.models import make_model


@pytest.mark.parametrize(
    ("spec", "classes", "widths"),
    [
        ("linear", 0, [1]),
        ("logistic", 2, [1]),
        ("softmax", 2, [2]),
        ("softmax", 10, [10]),
        ("mlp", 10, [128, 10]),
        ("mlp:", 10, [128, 10]),
        ("mlp:256,128", 10, [256, 128, 10]),
        ("mlp:activation=tanh", 3, [128, 3]),
        ("mlp:9,activation=tanh", 3, [9, 3]),
        ("mlp:9,9", 3, [9, 9, 3]),
    ],
)
def test_widths(spec, classes, widths):
    model = make_model(spec, (2, 3), classes)
    biases = [tensor.shape[0] for tensor in model.layout.tensors.values() if len(tensor.shape) == 1]
    assert biases == widths


@pytest.mark.parametrize("dtype", ["float32", "float64", np.float32, np.dtype("float64")])
def test_dtypes(dtype):
    assert make_model("softmax", (3,), 2, dtype).dtype == np.dtype(dtype)


@pytest.mark.parametrize(
    ("spec", "classes", "message"),
    [
        ("mpl", 10, r"unknown model 'mpl' \(did you mean 'mlp'\?\); known: linear, logistic, mlp, softmax"),
        ("", 10, "unknown model ''"),
        ("mlp:0", 10, "positive whole number, not '0'"),
        ("mlp:64,-3", 10, "positive whole number, not '-3'"),
        ("mlp:1.5", 10, "positive whole number, not '1.5'"),
        ("mlp:tanh", 10, "positive whole number, not 'tanh'"),
        ("mlp:activation=tan", 10, r"unknown activation 'tan' \(did you mean 'tanh'\?\)"),
        ("mlp:width=3", 10, "no setting 'width'"),
        ("softmax:10", 10, "no setting '10'"),
        ("linear", 10, "'linear' is for regression, the data has 10 classes"),
        ("logistic", 3, "'logistic' is for 2 classes, the data has 3"),
        ("logistic", 0, "'logistic' is a classifier, the data has no classes"),
        ("softmax", 0, "'softmax' is a classifier, the data has no classes"),
        ("mlp:4", 0, "'mlp' is a classifier, the data has no classes"),
        ("softmax", 1, "'softmax' needs data with at least 2 classes, not 1"),
        ("mlp:4", 1, "'mlp' needs data with at least 2 classes, not 1"),
    ],
)
def test_wrong_specs(spec, classes, message):
    with pytest.raises(UsageError, match=message):
        make_model(spec, (3,), classes)


@pytest.mark.parametrize("dtype", ["float16", "int64", "single precision", None.__class__])
def test_wrong_dtypes(dtype):
    with pytest.raises(UsageError, match=r"unknown dtype .* known: float32, float64"):
        make_model("softmax", (3,), 2, dtype)
