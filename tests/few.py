"""A data file that is small: 20 training and 6 test rows, 3 features and 3 classes."""

import h5py
import numpy as np


def write_few(folder, classes=3):
    """Write it, as few.h5."""
    random = np.random.default_rng(3)
    with h5py.File(folder / "few.h5", "w") as file:
        for part, rows in (("train", 20), ("test", 6)):
            file[f"{part}/y"] = y = random.integers(0, classes, rows)
            file[f"{part}/x"] = random.standard_normal((rows, 3)) + y[:, None]
        file.attrs["classes"] = classes
