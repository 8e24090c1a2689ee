"""Image files as rows to predict: decoded as prepare-data does it, to the size and the color of the training images."""

import os
from collections.abc import Sequence
from functools import partial

import numpy as np

from hpcdl.data.batch import PredictionRows, RowBlock, in_blocks
from hpcdl.data.samples.image_decoder import SUFFIXES, BrokenError, ImageDecoder
from hpcdl.errors import UsageError, blamed_on
from hpcdl.files import files_below


def image_files(source: str) -> list[str]:
    """Return the images of a source: the file itself, or those below a folder, sorted; [] if it holds none."""

    def is_image(path: str) -> bool:
        return os.path.splitext(path)[1].lower().removeprefix(".") in SUFFIXES

    if os.path.isdir(source):
        with blamed_on(f"{source} cannot be read"):
            return [os.path.join(source, path) for path in files_below(source) if is_image(path)]
    return [source] if is_image(source) and os.path.isfile(source) else []


def image_rows(
    source: str, files: Sequence[str], features: tuple[int, ...], scale: float, ranks: int
) -> PredictionRows:
    """Return files as rows to predict, whose ids are their paths; a broken file is a row with its reason. features,
    scale: of the model's training data. Raises UsageError if these were no images as prepare-data makes them."""
    if features[:1] != features[1:2] or features[2:] not in ((), (3,)) or scale != 1 / 255:
        rows = f"rows of shape {features} and scale {scale:.3g}"
        raise UsageError(f"{source} holds images, but the model was trained on {rows}, not on images of bytes")
    decoder = ImageDecoder(features[0], len(features) == 3)

    def load(part: slice) -> RowBlock:
        paths, reasons = files[part], []
        x = np.zeros((len(paths), *features), np.uint8)
        for at, path in enumerate(paths):
            try:
                x[at], reason = decoder(path), ""
            except BrokenError as error:
                reason = str(error)
            reasons.append(reason)
        ids = [os.fsencode(path).decode("utf-8", "replace") for path in paths]
        return RowBlock(x, np.arange(part.start, part.stop), ids=ids, reasons=reasons)

    blocks = partial(in_blocks, load, len(files), features, ranks)
    return PredictionRows(source, blocks, ids=True, reasons=True, features=features)
