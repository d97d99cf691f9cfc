"""The data: text, packed to a fixed length, in an order that the seed and the step determine."""

from hetjax.data.dataset import DataSet, mixture, standard_library_text, synthetic, text
from hetjax.data.packing import TokenSource
from hetjax.data.prefetch import Prefetcher

__all__ = [
    "DataSet",
    "Prefetcher",
    "TokenSource",
    "mixture",
    "standard_library_text",
    "synthetic",
    "text",
]
