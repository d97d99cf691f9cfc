"""Where images come from: a folder of two arrays, or shapes that are drawn when they are read.

A source is a small picklable description; reading happens in `ImageSource.open`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from hetjax.data.array_file import ArrayFile
from hetjax.data.checks import check_seed, check_whole
from hetjax.data.contents import contents_of
from hetjax.data.hashing import hash64
from hetjax.errors import InputError
from hetjax.limits import MAX_MADE_EXAMPLES, MAX_WIDTH

IMAGES_FILE, LABELS_FILE = "images.npy", "labels.npy"


class LabelledImages(Protocol):
    """Images by index, each with its class."""

    def __len__(self) -> int:
        """Number of images."""
        ...

    def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
        """Image ``index``, uint8 [H, W, 3], and its class."""
        ...

    def contents(self) -> str:
        """What tells these images and classes from others."""
        ...


class ImageSource(Protocol):
    """Labelled images, described."""

    @property
    def name(self) -> str:
        """What to call it in a message."""
        ...

    @property
    def image_size(self) -> int:
        """Height and width of the images, in pixels."""
        ...

    @property
    def classes(self) -> int:
        """Every label is below this."""
        ...

    def open(self) -> LabelledImages:
        """The images."""
        ...


@dataclass(frozen=True)
class ImageFolder:
    """A folder with ``images.npy``, uint8 [N, H, W, 3], and ``labels.npy``, integers [N].

    Images are read from the disk when they are asked for, and not before. Once it is open, a file
    that changes is refused; one that is replaced is read on as it was.

    Args:
        path: the folder.
        image_size: height and width that they must have, in pixels.
        classes: how many classes there are; every label is below that.

    Raises:
        InputError: naming the field, its value and what is allowed.
    """

    path: str
    image_size: int
    classes: int

    def __post_init__(self):
        check_whole("image_size", self.image_size, 1, MAX_WIDTH)
        check_whole("classes", self.classes, 1, MAX_WIDTH)

    @property
    def name(self) -> str:
        """The folder."""
        return self.path

    def open(self) -> LabelledImages:
        """Open the arrays and check them.

        Returns:
            The images.

        Raises:
            InputError: a file is not there, is no array, or has a wrong type, shape or label.
        """
        images_file, labels_file = Path(self.path) / IMAGES_FILE, Path(self.path) / LABELS_FILE
        images, classes = ArrayFile(images_file), ArrayFile(labels_file)
        size = self.image_size
        if images.dtype != np.uint8 or images.shape[1:] != (size, size, 3):
            raise InputError(
                f"{images_file} is {images.dtype}{list(images.shape)}; it must be uint8 [images, "
                f"{size}, {size}, 3] for images of {size} x {size} pixels"
            )
        if classes.dtype.kind not in "iu" or classes.shape != images.shape[:1]:
            raise InputError(
                f"{labels_file} is {classes.dtype}{list(classes.shape)}; it must be integers "
                f"[{len(images)}], one for each image"
            )
        labels = classes[:]  # They are few beside the images, and all of them are checked.
        wrong = np.flatnonzero((labels < 0) | (labels >= self.classes))
        if len(wrong):
            raise InputError(
                f"{labels_file} has {labels[wrong[0]]} for image {wrong[0]}; labels must be at "
                f"least 0 and below the number of classes, {self.classes}"
            )
        return _Arrays(images, labels)


@dataclass(frozen=True)
class _Arrays:
    images: ArrayFile
    labels: np.ndarray

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
        return self.images[index : index + 1][0], int(self.labels[index])

    def contents(self) -> str:
        return f"{contents_of(self.images)} {contents_of(self.labels)}"


@dataclass(frozen=True)
class Shapes:
    """Coloured shapes before coloured grounds, with noise: eight classes.

    A class is a shape (a disc, a square, a ring, a cross) and whether it is brighter than its
    ground. Place, size and colours are drawn, so that no single pixel tells the class. An image is
    a pure function of the seed and its index, computed when it is read.

    Args:
        size: number of images.
        image_size: height and width, in pixels, at least 8; a shape needs so many.
        seed: of all that is drawn.

    Raises:
        InputError: naming the field, its value and what is allowed.
    """

    size: int
    image_size: int
    seed: int = 0

    def __post_init__(self):
        check_whole("size", self.size, 1, MAX_MADE_EXAMPLES)
        check_whole("image_size", self.image_size, 8, MAX_WIDTH)
        check_seed(self.seed)

    @property
    def name(self) -> str:
        """What it is."""
        return f"{self.size} drawn shapes"

    @property
    def classes(self) -> int:
        """Four shapes, brighter than their ground or darker."""
        return 8

    def open(self) -> LabelledImages:
        """The images, of which none is drawn yet."""
        return _Drawn(self)


_SHAPE_STREAM, _NOISE_STREAM = 5, 6
_NUM_DRAWN = 8


@dataclass(frozen=True)
class _Drawn:
    shapes: Shapes

    def __len__(self) -> int:
        return self.shapes.size

    def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
        size, seed = self.shapes.image_size, self.shapes.seed
        places = np.arange(_NUM_DRAWN) + index * _NUM_DRAWN
        numbers = hash64(seed, _SHAPE_STREAM, places)
        label = int(numbers[0] % np.uint64(self.shapes.classes))
        drawn = (numbers[1:] >> np.uint64(11)).astype(np.float64) / 2.0**53
        radius = size * (0.2 + 0.15 * drawn[0])
        row, column = radius + (size - 2 * radius) * drawn[1:3]
        inside = _inside(label // 2, size, float(row), float(column), float(radius))
        dark, step = 30 + 80 * drawn[3:6], 60 + 60 * drawn[6]
        image = dark + step * (inside == bool(label % 2))[..., None]
        pixels = np.arange(size * size * 3) + index * size * size * 3
        noise = (hash64(seed, _NOISE_STREAM, pixels) % np.uint64(31)).astype(np.float64) - 15
        return (image + noise.reshape(size, size, 3)).astype(np.uint8), label

    def contents(self) -> str:
        return f"shapes drawn with seed {self.shapes.seed}"


def _inside(shape: int, size: int, row: float, column: float, radius: float) -> np.ndarray:
    """Which pixels a shape covers, bool [size, size]."""
    up, left = np.arange(size)[:, None] - row, np.arange(size)[None, :] - column
    if shape == 0:
        return up**2 + left**2 <= radius**2
    if shape == 1:
        return np.maximum(abs(up), abs(left)) <= 0.85 * radius
    if shape == 2:
        return abs(np.hypot(up, left) - 0.75 * radius) <= 0.25 * radius
    covered = np.minimum(abs(up), abs(left)) <= 0.25 * radius
    return covered & (np.maximum(abs(up), abs(left)) <= radius)
