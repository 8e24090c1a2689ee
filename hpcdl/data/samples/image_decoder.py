"""Images as arrays of bytes, decoded by Pillow (extra `images`).

    file -> first frame -> turned as its EXIF says -> transparent parts on white -> grey (ITU-R 601), or RGB
         -> the largest square about the centre, resized to SIZE x SIZE (bicubic over all pixels) -> uint8

So the shorter side becomes SIZE, and the longer side is cut to SIZE at both ends. Of 16-bit grey the higher 8 bits are
taken. Only raster formats are tried: for some of the others Pillow starts other programs."""

import io
import os
import stat
import warnings
from typing import Any

import numpy as np

from hpcdl.data.hdf5 import FilePath
from hpcdl.errors import UsageError, reason

FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "PPM", "TIFF", "JPEG2000", "AVIF")
SIZE = 64  # pixels of a side, by default
SUFFIXES = frozenset(
    ["jpg", "jpeg", "png", "webp", "gif", "bmp", "ppm", "pgm", "pbm", "pnm", "tif", "tiff", "jp2", "avif"]
)


class BrokenError(Exception):
    """An image, or another sample, that cannot be decoded; the message is the reason."""


class ImageDecoder:
    """Decodes image files to (size, size) or, with color, (size, size, 3) bytes."""

    def __init__(self, size: int, color: bool):
        """Raise UsageError if Pillow is missing, or for a size below 1."""
        if size < 1:
            raise UsageError(f"--size is the side of the images in pixels, 1 or more, not {size}")
        try:
            from PIL import Image, ImageOps
        except ImportError:
            raise UsageError("images need the package pillow: pip install 'hpcdl[images]'") from None
        self.size, self.color, self.image, self.operations = size, color, Image, ImageOps
        Image.init()
        self.formats = [each for each in FORMATS if each in Image.OPEN]  # older versions of Pillow have fewer
        self.shape = (size, size, 3) if color else (size, size)

    def __call__(self, file: "FilePath | bytes") -> np.ndarray:
        """Return the pixels of a file, given by its path or its content. Raises BrokenError."""
        try:
            if not isinstance(file, bytes) and not stat.S_ISREG(os.stat(file).st_mode):
                raise BrokenError("it is no regular file")  # to open a pipe would wait for its writer
            if not (len(file) if isinstance(file, bytes) else os.path.getsize(file)):
                raise BrokenError("it is empty")
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # on odd metadata
                warnings.simplefilter("error", self.image.DecompressionBombWarning)
                source = io.BytesIO(file) if isinstance(file, bytes) else file
                with self.image.open(source, formats=self.formats) as image:
                    return self._pixels(image)
        except (self.image.DecompressionBombWarning, self.image.DecompressionBombError):
            most = self.image.MAX_IMAGE_PIXELS
            raise BrokenError(f"it has more than {most:,} pixels, as decompression bombs have") from None
        except self.image.UnidentifiedImageError:
            raise BrokenError("it is no image of a known format") from None
        except BrokenError:
            raise
        except Exception as error:  # damaged files raise many types
            raise BrokenError(reason(error)) from None

    def _pixels(self, image: Any) -> np.ndarray:
        image.load()
        image = self.operations.exif_transpose(image)
        if image.mode.startswith("I;16"):
            image = self.image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
        if image.mode in ("I", "F"):
            raise BrokenError("its pixels are 32-bit numbers; convert them to 8 bits")
        if image.has_transparency_data:
            image = image.convert("RGBA")
            white = self.image.new("RGBA", image.size, "white")
            image = self.image.alpha_composite(white, image)
        image = image.convert("RGB" if self.color else "L")
        return np.asarray(self.operations.fit(image, (self.size, self.size)))
