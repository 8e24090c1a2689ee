"""A Dataset as data: the same rows in the same order on any number of ranks and workers, drawn anew in each epoch."""

import random
import sys

import h5py
import numpy as np
import pytest
import torch
from in_process import ends
from torch.utils.data import Dataset, IterableDataset, Subset, TensorDataset, default_collate

from hpcdl.data import from_arrays, hdf5, open_data
from hpcdl.errors import LoneError, UsageError
from hpcdl.torch import from_dataset

ROWS = 29


class Images(Dataset):
    """2 x 3 images, moved at random: by torch's generator, by numpy's and by Python's."""

    classes = ("cat", "dog", "emu")

    def __init__(self, rows=ROWS, moved=True, bad=None):
        self.x = torch.arange(rows * 6.0).view(rows, 2, 3)
        self.targets = [each % 3 for each in range(rows)]
        self.moved, self.bad = moved, bad

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        if self.bad is not None and i == self.bad[0]:
            return self.bad[1]() if callable(self.bad[1]) else self.bad[1]
        noise = torch.rand(()) + float(np.random.random()) + random.random() if self.moved else 0.0  # noqa: NPY002
        return self.x[i] + noise, self.targets[i]


def broken():
    raise OSError(5, "the disk is gone")


def batches(data, size, epoch=0):
    """The rows of the shares of an epoch, all together by step."""
    shares = [
        [(each.x.copy(), each.y.copy(), each.index.copy()) for each in data.batches(epoch, 7, (rank, size))]
        for rank in range(size)
    ]
    return [[np.concatenate(part) for part in zip(*step, strict=True)] for step in zip(*shares, strict=True)]


def alike(one, other):
    return all(np.array_equal(*pair) for a, b in zip(one, other, strict=True) for pair in zip(a, b, strict=True))


def test_it_is_as_the_same_arrays_are():
    still = Images(moved=False)
    data, arrays = from_dataset(still, still), from_arrays(still.x.numpy(), np.array(still.targets), seed=0)
    assert (data.features, data.classes, data.outputs, data.examples) == ((2, 3), 3, (), ROWS)
    assert data.schema.labels == Images.classes and data.test.examples == ROWS
    assert alike(batches(data, 1), batches(arrays, 1))
    assert np.array_equal(data.test.rows(2, 4)[0], still.x[2:4].view(2, 6))
    assert data.steps_per_epoch(7) == 5 and data.scales is None


@pytest.mark.parametrize("window", [1, 3])
def test_streamed_it_has_the_order_of_a_file_with_the_same_rows(tmp_path, monkeypatch, window):
    monkeypatch.setattr(hdf5, "SLAB_BYTES", 100)  # 4 rows
    still = Images(moved=False)
    with h5py.File(tmp_path / "d.h5", "w") as file:
        file["train/x"], file["train/y"] = still.x.numpy(), np.array(still.targets, np.int32)
        file.attrs["classes"] = 3
    how = {"placement": "streamed", "shuffle_window": window, "validation": 0.3, "seed": 7}
    data, of_file = from_dataset(still, **how), open_data(str(tmp_path / "d.h5"), **how)
    assert data.order == of_file.order and data.examples == of_file.examples < ROWS
    for epoch in range(2):
        one = batches(data, 1, epoch)
        assert alike(one, batches(of_file, 1, epoch)) and alike(one, batches(data, 3, epoch))
    assert not alike(one, batches(from_dataset(still, validation=0.3, seed=7), 1, 1))
    of_file.close()


def test_transforms_draw_by_the_seed_the_epoch_and_the_row():
    data = from_dataset(Images())
    one = batches(data, 1)
    assert all(alike(one, batches(from_dataset(Images()), size)) for size in (2, 3))
    later = {int(i): row for x, _, index in batches(data, 1, 1) for i, row in zip(index, x, strict=True)}
    first = {int(i): row for x, _, index in one for i, row in zip(index, x, strict=True)}
    assert not any(np.array_equal(first[i], later[i]) for i in first)
    assert not alike(one, batches(from_dataset(Images(), seed=1), 1))
    assert np.array_equal(data.train.rows(0, 3)[0], data.train.rows(0, 3)[0])


def test_generators_go_on_as_if_no_example_had_been_made():
    data = from_dataset(Images())

    def drawn():
        torch.manual_seed(3)
        random.seed(3)
        np.random.seed(3)  # noqa: NPY002
        yield
        yield torch.rand(()).item(), random.random(), float(np.random.random())  # noqa: NPY002

    before, after = drawn(), drawn()
    next(before)
    wanted = next(before)
    next(after)
    batches(data, 1)
    assert next(after) == wanted


def test_workers_make_the_same_rows_beside_the_rank():
    with_workers = from_dataset(Images(), workers=2)
    assert alike(batches(with_workers, 2), batches(from_dataset(Images()), 2))
    assert with_workers.train.source.workers.pool is not None
    with_workers.close()
    assert with_workers.train.source.workers.pool is None


def test_a_function_puts_examples_together():
    def turned(examples):
        x, y = default_collate(examples)
        return x.transpose(1, 2), y

    assert from_dataset(Images(), collate_fn=turned).features == (3, 2)


def test_labels_are_known_from_targets_also_of_a_part_and_of_tensors():
    part = Subset(Images(), range(5, 25))
    data = from_dataset(part, validation=0.25, partition="by-label")
    assert (data.examples, data.validation.examples, data.classes) == (15, 5, 3)
    assert np.bincount(data.validation.rows(0, 5)[1], minlength=3).max() == 2
    assert data.schema.labels == Images.classes
    tensors = TensorDataset(torch.ones(8, 2), torch.arange(8) % 4)
    assert from_dataset(tensors, partition="by-label").classes == 4
    mine = [batch.y.tolist() for batch in from_dataset(tensors, partition="by-label").batches(0, 4, (0, 2))]
    assert sorted([*mine[0], *mine[1]]) == [0, 0, 1, 1]


def test_a_regression():
    data = from_dataset(TensorDataset(torch.ones(8, 2), torch.ones(8, 3)), validation=0.25)
    assert (data.classes, data.outputs, data.examples) == (0, (3,), 6)
    assert from_dataset(TensorDataset(torch.ones(8), torch.ones(8))).features == (1,)


def test_its_digest_tells_other_examples_and_its_options_are_the_runs():
    data = from_dataset(Images())
    other = Images()
    other.targets[2] = 1
    assert data.digest == from_dataset(Images()).digest != from_dataset(other).digest
    again = data.reopened(dtype="float64", seed=4, validation=0.5)
    assert again.dtype == np.float64 and again.validation and not alike(batches(again, 1), batches(data, 1))


class NoLength(Dataset):
    def __getitem__(self, i):
        return torch.zeros(2), 0


class Stream(IterableDataset):
    def __iter__(self):
        return iter([])


class Untold(NoLength):
    def __len__(self):
        return 4


@pytest.mark.parametrize(
    ("dataset", "options", "words"),
    [
        (Stream(), {}, "Stream has no examples by number, [i]; take a map-style Dataset"),
        (NoLength(), {}, "NoLength has no examples, or does not say how many"),
        (Images(0), {}, "has no examples"),
        (Untold(), {}, "give from_dataset(..., classes=N)"),
        (Untold(), {"classes": 3, "validation": 0.5}, "validation goes by the labels of all rows: give Untold"),
        (Images(), {"classes": 2}, "targets go from 0 to 2, and there are 2 classes"),
        (Images(), {"augment": "flip"}, "--augment: a Dataset of PyTorch changes examples by its own transforms"),
        (Images(), {"standardize": True}, "--standardize: a Dataset of PyTorch changes examples by its own transforms"),
        (Images(), {"workers": -1}, "workers=-1: give 0 or more processes"),
        (Images(), {"workers": 1, "collate_fn": lambda each: default_collate(each)}, "cannot pickle the data set"),
        (Images(bad=(0, broken)), {}, "the first example of Images cannot be made: OSError: the disk is gone"),
        (Images(bad=(0, torch.ones(2, 3))), {}, "collated examples must be (x, y), and are a Tensor"),
        (Images(bad=(0, (object(), 0))), {}, "the first example of Images cannot be made: TypeError: default_collate"),
        (Images(bad=(0, (torch.full((2, 3), float("nan")), 0))), {}, "an example holds NaN or an infinite number"),
        (Images(), {"partition": "column:a"}, "partition 'column:a': Images has no columns"),
    ],
)
def test_what_is_no_such_data_set_is_refused_in_a_line(dataset, options, words):
    with pytest.raises(UsageError) as refused:
        from_dataset(dataset, **options)
    assert words in str(refused.value) and "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (broken, "an example of Images cannot be made: OSError: the disk is gone (test_dataset.py, line"),
        ((torch.ones(2, 3), 7), "labels are integers below 3, not 7 to 7"),
        ((torch.ones(3, 2), 1), "an example has shape (3, 2), and the first one (2, 3)"),
    ],
)
def test_an_example_that_cannot_be_made_ends_the_run_in_a_line(bad, words):
    data = from_dataset(Images(bad=(11, bad), moved=False))
    with pytest.raises(LoneError) as ended:
        data.train.rows(11, 12)
    assert words in str(ended.value) and "\n" not in str(ended.value)


MODULE = """
import torch
from torch.utils.data import TensorDataset
from hpcdl.torch import from_dataset

def shapes(rows=60):
    x = torch.randn(rows, 2, 2, generator=torch.Generator().manual_seed(3))
    y = (x.sum((1, 2)) > 0).long()
    return from_dataset(TensorDataset(x, y), TensorDataset(x[:20], y[:20]))
"""


def test_from_the_command_line(tmp_path, monkeypatch, capsys):
    (tmp_path / "my_dataset.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    told = ["--data", "my_dataset:shapes,rows=50", "--model", "mlp:4", "--progress", "none", "--epochs", "6"]
    assert ends("train_allreduce", [*told, "--validation", "0.2", "--out", "a"]) == (0, "")
    assert ends("train_allreduce", ["--resume", "a", "--trust", "a", "--epochs", "7", "--progress", "none"]) == (0, "")
    assert ends("evaluate", ["a", "--trust", "a", "--json", "a.json"]) == (0, "")
    assert ends("evaluate", ["a", "--trust", "a", "--split", "train"]) == (0, "")
    assert ends("predict", ["a", "my_dataset:shapes", "--out", "p.csv"])[0] == 0
    assert len((tmp_path / "p.csv").read_text().splitlines()) == 21
    federated = ["--clients", "4", "--rounds", "2", "--partition", "dirichlet:1", "--out", "b"]
    assert ends("train_federated", [*told[:-2], *federated]) == (0, "")
    status, said = ends("train_hogwild", [*told, "--model", "logistic"])
    assert status == 2 and "this needs all training rows in memory, and a Dataset of PyTorch makes" in said
    streamed = [*told[:-2], "--placement", "streamed", "--shuffle-window", "2", "--out", "c", "--epochs"]
    assert ends("train_allreduce", [*streamed, "1"]) == (0, "")
    assert ends("train_allreduce", ["--resume", "c", "--trust", "c", "--epochs", "2", "--progress", "none"]) == (0, "")
    for other, words in (
        ("partitioned", "take placement shared or streamed"),
        ("streamed --partition by-label", "every block"),
    ):
        status, said = ends("train_allreduce", [*told, "--placement", *other.split()])
        assert status == 2 and words in said
    sys.modules.pop("my_dataset", None)
