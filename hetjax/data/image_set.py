"""`ImageSet`: the images of any training step, as a pure function of the seed and the step."""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from hetjax.data.checks import as_path, check_fraction, check_seed
from hetjax.data.dataset import HELD_OUT_FRACTION
from hetjax.data.hashing import hash64
from hetjax.data.held_out import HeldOutBatches
from hetjax.data.image_sources import ImageFolder, ImageSource, LabelledImages, Shapes
from hetjax.errors import InputError, check_count

if TYPE_CHECKING:
    import grain  # Takes a second to import, so it waits for the first batch.

_HELD_OUT_STREAM = 7


@dataclass(frozen=True)
class ImageSet:
    """Shuffled, endless batches of labelled images. A description: reading waits for first use.

    Made by `images` and `shapes`. Whether an image is held out for evaluation depends on its place
    and on the fraction alone: no seed trains on what another one evaluates, and images that are
    added at the end leave those before them where they were.

    Args:
        source: the images.
        seed: of the order in which they come, anew in each epoch, in [0, 2**32).
        held_out_fraction: share of them that is kept for evaluation, in [0, 1).

    Raises:
        InputError: naming the field, its value and what is allowed.

    Example:
        >>> data = shapes(size=1000, image_size=16)
        >>> data.batch(step=3, batch_size=4)["images"].shape
        (4, 16, 16, 3)
        >>> data.batch(step=3, batch_size=4, rows=slice(2, 4))["labels"].shape
        (2,)
    """

    source: ImageSource
    seed: int = 0
    held_out_fraction: float = HELD_OUT_FRACTION

    def __post_init__(self):
        check_seed(self.seed)
        check_fraction(self.held_out_fraction)

    @property
    def num_examples(self) -> int:
        """Training images in one pass. Opens and checks the source.

        Raises:
            InputError: if the images cannot be used.
        """
        return len(self._places[0])

    @property
    def num_held_out_examples(self) -> int:
        """Images that are held out. Opens and checks the source.

        Raises:
            InputError: if the images cannot be used.
        """
        return len(self._places[1])

    def fingerprint(self) -> dict[str, str | int | float | bool]:
        """What tells the stream of images from all others. Opens and reads the source.

        Of images that are more than `hetjax.data.contents.WHOLE_BYTES` together, blocks at even
        distances are read.

        Returns:
            By name: the seed, what is held out, how many images there are and what they hold.

        Raises:
            InputError: if the images cannot be used.
        """
        return {
            "seed": self.seed,
            "held_out_fraction": self.held_out_fraction,
            "images": len(self._images),
            "image_size": self.source.image_size,
            "contents": self._images.contents(),
        }

    def batch(self, step: int, batch_size: int, rows: slice | None = None) -> dict[str, np.ndarray]:
        """The training batch of a step, or some of its rows.

        Args:
            step: 0 for the first.
            batch_size: images in the whole batch of every step.
            rows: which of them to read; ``None`` for all.

        Returns:
            ``"images"``, uint8 [rows, H, W, 3], and ``"labels"``, int32 [rows]. The rows of a batch
            are the same however they are asked for.

        Raises:
            InputError: if the images cannot be used.
        """
        wanted = range(batch_size)[rows if rows is not None else slice(None)]
        return self._read(self._training[step * batch_size + row] for row in wanted)

    def held_out_batches(self, batch_size: int) -> Sequence[dict[str, np.ndarray]]:
        """The batches to evaluate on, always the same ones in the same order.

        Every batch is whole. Images that do not fill the last one are left out; where there are
        fewer than one batch, they are repeated to fill it.

        Args:
            batch_size: images a batch.

        Returns:
            Batches like those of `batch`, each read when it is asked for.

        Raises:
            InputError: if nothing is held out.
        """
        check_count("batch_size", batch_size)
        held_out = self._places[1]
        if not len(held_out):
            raise InputError(
                f"held_out_fraction is {self.held_out_fraction:g}; of {self.source.name} that is "
                f"less than one image to evaluate on, so raise it or do not evaluate"
            )
        return HeldOutBatches(self._read, held_out, batch_size)

    def __getstate__(self) -> dict[str, Any]:
        """The description alone: what was opened is opened again where it is needed."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}

    @functools.cached_property
    def _images(self) -> LabelledImages:
        return self.source.open()

    @functools.cached_property
    def _places(self) -> tuple[np.ndarray, np.ndarray]:
        """Which images are trained on, and which are held out."""
        count = len(self._images)
        held_out = _held_out_places(count, self.held_out_fraction)
        if count == len(held_out):
            raise InputError(f"{self.source.name} has no image to train on")
        is_trained = np.ones(count, bool)
        is_trained[held_out] = False
        return np.flatnonzero(is_trained), held_out

    @functools.cached_property
    def _training(self) -> grain.MapDataset[Any]:
        import grain

        places: Any = self._places[0]
        return grain.MapDataset.source(places).shuffle(seed=self.seed).repeat()

    def _read(self, places: Iterable[Any]) -> dict[str, np.ndarray]:
        size = self.source.image_size
        found = [self._images[int(place)] for place in places]
        images = np.empty((len(found), size, size, 3), np.uint8)
        for row, (image, _) in enumerate(found):
            images[row] = image
        return {"images": images, "labels": np.array([label for _, label in found], np.int32)}


def _held_out_places(count: int, fraction: float) -> np.ndarray:
    """Which of so many images are held out: one of each 1 / fraction, a hash says which.

    It is in the later half of these, so that a few images, of which the fraction is none, keep all.
    """
    if 2 * count * fraction < 1:  # All are in the first half of the first run.
        return np.zeros(0, np.int64)
    runs = np.arange(int(count * fraction) + 2)
    starts = np.ceil(runs / fraction).astype(np.int64)
    lengths = np.diff(starts)
    halves = lengths // 2
    drawn = hash64(0, _HELD_OUT_STREAM, runs[:-1]) % (lengths - halves).astype(np.uint64)
    places = starts[:-1] + halves + drawn.astype(np.int64)
    return places[places < count]


def images(
    path: str | os.PathLike[str],
    image_size: int,
    classes: int,
    seed: int = 0,
    held_out_fraction: float = HELD_OUT_FRACTION,
) -> ImageSet:
    """Images from a folder that holds ``images.npy`` and ``labels.npy``.

    ``images.npy`` is uint8 [N, H, W, 3] and ``labels.npy`` integers [N], as `numpy.save` writes
    them. Images are read when a batch needs them.

    Args:
        path: the folder.
        image_size: height and width that the images have, in pixels.
        classes: every label is below this.
        seed: of the order of the images, in [0, 2**32).
        held_out_fraction: share of them that is kept for evaluation.

    Returns:
        The data set.

    Raises:
        InputError: naming the field, its value and what is allowed; on first use also if a file is
            not there or not as it must be.
    """
    return ImageSet(
        ImageFolder(as_path("path", path), image_size, classes), seed, held_out_fraction
    )


def shapes(
    size: int,
    image_size: int,
    seed: int = 0,
    held_out_fraction: float = HELD_OUT_FRACTION,
) -> ImageSet:
    """Shapes that a model can learn to tell, made from nothing; see `image_sources.Shapes`.

    Args:
        size: number of images.
        image_size: height and width, in pixels, at least 8.
        seed: of the images and of their order, in [0, 2**32).
        held_out_fraction: share of them that is kept for evaluation.

    Returns:
        The data set, of eight classes.

    Raises:
        InputError: naming the field, its value and what is allowed.
    """
    return ImageSet(Shapes(size, image_size, seed), seed, held_out_fraction)
