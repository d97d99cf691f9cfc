"""The data: packed text, labelled images, in an order that the seed and the step determine."""

from hetjax.data.dataset import DataSet, mixture, standard_library_text, synthetic, text
from hetjax.data.image_set import ImageSet, images, shapes
from hetjax.data.packing import TokenSource
from hetjax.data.prefetch import Prefetcher

__all__ = [
    "DataSet",
    "ImageSet",
    "Prefetcher",
    "TokenSource",
    "images",
    "mixture",
    "shapes",
    "standard_library_text",
    "synthetic",
    "text",
]
