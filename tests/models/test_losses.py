"""Losses: predictions at outputs of any size, several rows of outputs an example, classes that ranks share."""

import numpy as np
import pytest

from hpcdl.errors import UsageError
from hpcdl.models.group import IdentityGroup
from hpcdl.models.losses import Hinge, Logistic, SoftmaxCrossEntropy, Squared
from hpcdl.models.pool import Pool


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_predictions_do_not_overflow(dtype, recwarn):
    pool, z = Pool(dtype), np.array([[-1e30], [-200], [0], [200], [1e30]], dtype)
    p = Logistic(pool).predict(z)
    q = SoftmaxCrossEntropy(pool, 2).predict(np.concatenate([0 * z, z], axis=1))
    assert not recwarn.list
    np.testing.assert_allclose(p, [0, np.exp(np.array(-200, dtype)), 0.5, 1, 1], rtol=1e-5)
    np.testing.assert_allclose(q, np.stack([1 - p, p], axis=1), atol=1e-6)
    assert p.dtype == q.dtype == dtype


def test_nan_is_predicted_without_a_warning(recwarn):
    z = np.array([[np.nan, 0], [0, np.inf], [0, 0]])
    q = SoftmaxCrossEntropy(Pool("float64"), 2).predict(z)
    p = Logistic(Pool("float64")).predict(z[:, :1])
    assert not recwarn.list
    assert np.isnan(q[0]).all() and np.isnan(q[1]).any() and (q[2] == 0.5).all()
    np.testing.assert_array_equal(p, [np.nan, 0.5, 0.5])


def test_several_rows_an_example_count_as_their_mean():
    pool, random = Pool("float64"), np.random.default_rng(0)
    z, y = random.standard_normal((12, 5)), random.integers(0, 5, 12)
    (total, score), dz = SoftmaxCrossEntropy(pool, 5).forward((), z, IdentityGroup(), y)
    (mean, hits), scaled = SoftmaxCrossEntropy(pool, 5, per=4).forward((), z, IdentityGroup(), y)
    assert mean == pytest.approx(total / 4, rel=1e-14) and hits == score / 4
    np.testing.assert_allclose(scaled, dz / 4, rtol=1e-14)


class Recorded:
    """A group whose all-reduces change nothing, as if other ranks had no classes; records their operations."""

    def __init__(self):
        self.asked = []

    def all_reduce(self, array, op="sum"):
        self.asked.append((op, array.shape))


def test_shared_classes_take_two_sums_of_one_and_two_numbers_a_row():
    random, group = np.random.default_rng(0), Recorded()
    z, y = random.standard_normal((6, 5)), random.integers(0, 5, 6)
    whole = SoftmaxCrossEntropy(Pool("float64"), 5)
    part = whole.cut(0, 2, divided=True)
    part.own = slice(0, 5)
    (total, score), dz = part.forward((), z, group, y)
    (wanted, hits), gradient = whole.forward((), z, IdentityGroup(), y)
    assert group.asked == [("max", (6,)), ("sum", (6, 2))]
    assert total == pytest.approx(wanted, rel=1e-13) and score == hits
    np.testing.assert_allclose(dz, gradient, rtol=1e-12, atol=1e-15)
    part.release(dz)
    assert sum(map(len, part.pool.free.values())) == 4 - 1  # the gradient of the whole is still lent


def test_which_classes_a_rank_has():
    whole = SoftmaxCrossEntropy(Pool("float64"), 7)
    assert [whole.cut(part, 3, True).own for part in range(3)] == [slice(0, 3), slice(3, 5), slice(5, 7)]
    assert whole.cut(1, 3, False) is whole and whole.cut(0, 1, True) is whole  # all outputs are here


@pytest.mark.parametrize("loss", [Logistic, Squared])
def test_one_output_cannot_be_shared(loss):
    made = loss(Pool("float64"))
    assert made.cut(0, 2) is made and made.cut(0, 1, True) is made
    with pytest.raises(UsageError, match=r"ranks cannot share the outputs of the loss \w+; add a hidden layer"):
        made.cut(1, 2, True)


def test_labels_of_shared_classes_are_checked_against_all():
    part = SoftmaxCrossEntropy(Pool("float64"), 4).cut(0, 2, True)
    with pytest.raises(UsageError, match="outside of the classes 0 to 3"):
        part.forward((), np.zeros((1, 2)), Recorded(), np.array([4]))


@pytest.mark.parametrize("kind", ["softmax", "shared", "logistic", "hinge"])
def test_class_weights_multiply_losses_and_gradients_in_training_alone(kind):
    random, group = np.random.default_rng(0), Recorded() if kind == "shared" else IdentityGroup()
    classes = 3 if kind in ("softmax", "shared") else 2
    z, y = random.standard_normal((9, classes if classes == 3 else 1)), random.integers(0, classes, 9)
    pool = Pool("float64")
    loss = {"logistic": Logistic, "hinge": Hinge}[kind](pool) if classes == 2 else SoftmaxCrossEntropy(pool, 3)
    if kind == "shared":
        loss = loss.cut(0, 2, divided=True)
        loss.own = slice(0, 3)
    rows = [loss.forward((), z[i : i + 1], group, y[i : i + 1]) for i in range(9)]
    (plain, hits), _ = loss.forward((), z, group, y)
    loss.class_weights = np.array([0.5, 3.0, 2.0])[:classes]
    factors, scored = loss.class_weights[y], []
    (total, score), dz = loss.forward((), z, group, y)
    assert total == pytest.approx(sum(f * of for f, ((of, _), _) in zip(factors, rows, strict=True)), rel=1e-13)
    np.testing.assert_allclose(dz, np.concatenate([f * slope for f, (_, slope) in zip(factors, rows, strict=True)]))
    loss.watch = lambda *batch: scored.append(batch)
    assert loss.forward((), z, group, y, keep=False)[0] == (plain, hits) and score == hits
    assert scored[0][0] is y
    np.testing.assert_allclose(scored[0][1], loss.predict(z), rtol=1e-13)
