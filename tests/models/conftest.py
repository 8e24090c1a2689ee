"""Shared by the tests of the models: the independent reference, and batches of random examples."""

import importlib.util
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest


@pytest.fixture(scope="session")
def reference():
    """The module reference.py of this folder."""
    spec = importlib.util.spec_from_file_location("models_reference", Path(__file__).with_name("reference.py"))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def make_batch():
    """make_batch(rows, features, classes, dtype, seed=0): a batch of random x with labels (values for classes 0).

    tokens: x holds class numbers, too.
    """

    def make(rows, features, classes, dtype, seed=0, tokens=False):
        random = np.random.default_rng(seed)
        x = random.integers(0, classes, (rows, features)) if tokens else random.standard_normal((rows, features))
        x = x.astype(dtype)
        y = random.integers(0, classes, rows) if classes else random.standard_normal(rows).astype(dtype)
        return SimpleNamespace(x=x, y=y)

    return make
