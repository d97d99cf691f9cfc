"""`DataSet`: the batch of any training step, as a pure function of the seed and the step.

Nothing is remembered between batches. To resume is to ask for the next step's batch, and a host
that needs some rows of a batch reads those alone.
"""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from hetjax.data.checks import as_path, check_fraction, check_seed, check_weight, check_whole
from hetjax.data.contents import contents_of
from hetjax.data.corpus import Corpus, StandardLibrary, Synthetic, TextFiles, file_identity
from hetjax.data.hashing import example_keys
from hetjax.data.held_out import HeldOutBatches, in_proportion
from hetjax.data.packing import PackedTokens
from hetjax.errors import InputError, check_count
from hetjax.limits import MAX_SEQUENCE

if TYPE_CHECKING:
    import grain  # Takes a second to import, so it waits for the first batch.

HELD_OUT_FRACTION = 0.05
"""Share of a corpus that is kept for evaluation unless another is asked for."""


@dataclass(frozen=True)
class MixturePart:
    """One corpus of a data set.

    Args:
        corpus: where the tokens come from.
        seed: of the order in which its examples come, anew in each epoch.
        held_out_fraction: share of its tokens, at the end, that is kept for evaluation; in [0, 1).
        weight: its share of the examples is this over the sum of all parts' weights.

    Raises:
        InputError: naming the field, its value and what is allowed.
    """

    corpus: Corpus
    seed: int = 0
    held_out_fraction: float = HELD_OUT_FRACTION
    weight: float = 1.0

    def __post_init__(self):
        check_seed(self.seed)
        check_fraction(self.held_out_fraction)
        check_weight(self.corpus.name, self.weight)

    def sources(self, sequence: int) -> tuple[PackedTokens, PackedTokens]:
        """Read the corpus and pack it: training examples, held-out examples.

        Raises:
            InputError: if there is not one training example.
        """
        tokens = self.corpus.tokens()
        cut = len(tokens) - int(len(tokens) * self.held_out_fraction)
        if cut < sequence + 1:
            raise InputError(
                f"{self.corpus.name} has {cut} tokens to train on, which is not one example: "
                f"sequence {sequence} needs at least {sequence + 1}"
            )
        return PackedTokens(tokens[:cut], sequence), PackedTokens(tokens[cut:], sequence)


@dataclass(frozen=True)
class DataSet:
    """Packed, shuffled, endless batches of tokens. A description: reading waits for first use.

    Made by `text`, `standard_library_text`, `synthetic` and `mixture`.

    Args:
        parts: the corpora, one or more.
        sequence: number of predicted tokens an example.
        seed: of the dropout keys.
        keys: whether training batches give each example a threefry key, for dropout.

    Raises:
        InputError: naming the field, its value and what is allowed.

    Example:
        >>> data = synthetic(vocabulary=11, sequence=8, size=1000)
        >>> data.batch(step=3, batch_size=4)["tokens"].shape
        (4, 9)
        >>> data.batch(step=3, batch_size=4, rows=slice(2, 4))["tokens"].shape
        (2, 9)
    """

    parts: tuple[MixturePart, ...]
    sequence: int
    seed: int = 0
    keys: bool = False

    def __post_init__(self):
        check_seed(self.seed)
        check_whole("sequence", self.sequence, 1, MAX_SEQUENCE)
        _check_apart(self.parts)

    @property
    def vocabulary(self) -> int:
        """Every token is in [0, vocabulary)."""
        return max(part.corpus.vocabulary for part in self.parts)

    @property
    def num_examples(self) -> int:
        """Training examples in one pass over every part. Reads and checks the text.

        Raises:
            InputError: if a text cannot be used.
        """
        return sum(len(training) for training, _ in self._sources)

    @property
    def num_held_out_examples(self) -> int:
        """Held-out examples of all parts. Reads and checks the text.

        Raises:
            InputError: if a text cannot be used.
        """
        return sum(len(held_out) for _, held_out in self._sources)

    def fingerprint(self) -> dict[str, str | int | float | bool]:
        """What tells the stream of examples from all others. Reads the text.

        Where files lie, and what they are called, does not matter. Of tokens that are more than
        `hetjax.data.contents.WHOLE_BYTES`, blocks at even distances are read.

        Returns:
            By name: the seeds, the sequence, and of each part what it holds and how it is used.

        Raises:
            InputError: if a text cannot be used.

        Example:
            >>> synthetic(vocabulary=11, sequence=8, size=1000, seed=3).fingerprint()["seed"]
            3
        """
        found: dict[str, str | int | float | bool] = {"seed": self.seed, "sequence": self.sequence}
        total = sum(part.weight for part in self.parts)
        for index, (part, sources) in enumerate(zip(self.parts, self._sources, strict=True)):
            name = f"text {index}" if len(self.parts) > 1 else "text"
            training, held_out = (source.tokens for source in sources)
            found[f"{name} tokens"] = len(training) + len(held_out)
            found[f"{name} contents"] = f"{contents_of(training)} {contents_of(held_out)}"
            found[f"{name} seed"] = part.seed
            found[f"{name} held_out_fraction"] = part.held_out_fraction
            found[f"{name} share"] = round(part.weight / total, 9)
        return found

    def batch(
        self,
        step: int,
        batch_size: int,
        rows: slice | None = None,
    ) -> dict[str, np.ndarray]:
        """The training batch of a step, or some of its rows.

        Args:
            step: 0 for the first; it holds examples ``step * batch_size`` and following.
            batch_size: examples in the whole batch of every step.
            rows: which of them to read; ``None`` for all.

        Returns:
            ``"tokens"``, int32 [rows, sequence + 1], and ``"keys"``, uint32 [rows, 2], where
            the set has them. The rows of a batch are the same however they are asked for.

        Raises:
            InputError: if a text cannot be used.
        """
        wanted = range(batch_size)[rows if rows is not None else slice(None)]
        examples = np.array([step * batch_size + row for row in wanted], np.int64)
        batch = {"tokens": self._read(examples)}
        if self.keys:
            batch["keys"] = example_keys(self.seed, examples)
        return batch

    def held_out_batches(self, batch_size: int) -> Sequence[dict[str, np.ndarray]]:
        """The batches to evaluate on, always the same ones in the same order.

        Each held-out example of each part comes once. As long as they last, parts have their
        shares of the examples, as they have in training; what other parts hold out beyond that
        comes at the end. Parts whose ``held_out_fraction`` is 0 have no part in it.

        Every batch is whole. Examples that do not fill the last one are left out; where there are
        fewer than one batch, they are repeated to fill it.

        Args:
            batch_size: examples a batch.

        Returns:
            Batches of ``"tokens"``, int32 [batch_size, sequence + 1], each read when it is asked
            for, and ``"keys"``, uint32 [batch_size, 2], where the set has them: zeros, by which
            hetjax's models drop nothing.

        Raises:
            InputError: if nothing is held out, or of a part too little for one example.
        """
        check_count("batch_size", batch_size)
        counts = [len(held_out) for _, held_out in self._sources]
        for part, count in zip(self.parts, counts, strict=True):
            if not count and (part.held_out_fraction or not any(counts)):
                raise InputError(
                    f"held_out_fraction is {part.held_out_fraction:g}; of {part.corpus.name} that "
                    f"is less than one example of {self.sequence + 1} tokens to evaluate on, so "
                    f"raise it or do not evaluate"
                )
        order = in_proportion(counts, [part.weight for part in self.parts])
        return HeldOutBatches(self._read_held_out, order, batch_size)

    def __getstate__(self) -> dict[str, Any]:
        """The description alone: what was read is read again where it is needed."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}

    @functools.cached_property
    def _sources(self) -> list[tuple[PackedTokens, PackedTokens]]:
        return [part.sources(self.sequence) for part in self.parts]

    @functools.cached_property
    def _training(self) -> grain.MapDataset[np.ndarray]:
        import grain

        datasets = [
            grain.MapDataset.source(training).shuffle(seed=part.seed).repeat()
            for part, (training, _) in zip(self.parts, self._sources, strict=True)
        ]
        return grain.MapDataset.mix(datasets, [part.weight for part in self.parts])

    def _read_held_out(self, places: np.ndarray) -> dict[str, np.ndarray]:
        found = [self._sources[part][1][int(example)] for part, example in places]
        batch = {"tokens": np.stack(found)}
        if self.keys:
            batch["keys"] = np.zeros((len(found), 2), np.uint32)
        return batch

    def _read(self, examples: np.ndarray) -> np.ndarray:
        tokens = np.empty((len(examples), self.sequence + 1), np.int32)
        for row, example in enumerate(examples):
            packed = self._training[int(example)]
            assert packed is not None  # None is grain's word for "filtered out".
            tokens[row] = packed
        return tokens


def text(
    paths: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    sequence: int,
    seed: int = 0,
    held_out_fraction: float = HELD_OUT_FRACTION,
    tokenizer: str | os.PathLike[str] | None = None,
) -> DataSet:
    """UTF-8 text files and folders, packed end to end.

    Args:
        paths: files, and folders of which every file is read that is not hidden.
        sequence: number of predicted tokens an example.
        seed: of the order of the examples and of the dropout keys, in [0, 2**32).
        held_out_fraction: share of the text, at its end, that is kept for evaluation.
        tokenizer: path of a Hugging Face ``tokenizer.json`` (the ``tokenizers`` extra); ``None``
            for bytes, a vocabulary of 256.

    Returns:
        The data set.

    Raises:
        InputError: naming the field, its value and what is allowed; on first use also if a file is
            not UTF-8 or there is less than one example.
    """
    several = (paths,) if isinstance(paths, str) or not isinstance(paths, Iterable) else paths
    names = tuple(as_path("paths", path) for path in several)
    return _single(TextFiles(names, _path_of(tokenizer)), sequence, seed, held_out_fraction)


def standard_library_text(
    sequence: int,
    seed: int = 0,
    held_out_fraction: float = HELD_OUT_FRACTION,
    tokenizer: str | os.PathLike[str] | None = None,
) -> DataSet:
    """The source of the top-level modules of Python's standard library: 4.7 MB of real text.

    Args:
        sequence: number of predicted tokens an example.
        seed: of the order of the examples and of the dropout keys, in [0, 2**32).
        held_out_fraction: share of the text, at its end, that is kept for evaluation.
        tokenizer: as in `text`.

    Returns:
        The data set.

    Raises:
        InputError: naming the field, its value and what is allowed.
    """
    return _single(StandardLibrary(_path_of(tokenizer)), sequence, seed, held_out_fraction)


def synthetic(
    vocabulary: int,
    sequence: int,
    size: int,
    seed: int = 0,
    held_out_fraction: float = HELD_OUT_FRACTION,
) -> DataSet:
    """A stream that a model can learn, made from nothing; see `hetjax.data.corpus.Synthetic`.

    Args:
        vocabulary: number of tokens, at least 2.
        sequence: number of predicted tokens an example.
        size: length of the stream, in tokens.
        seed: of the stream, the order of its examples and the dropout keys, in [0, 2**32).
        held_out_fraction: share of the stream, at its end, that is kept for evaluation.

    Returns:
        The data set.

    Raises:
        InputError: naming the field, its value and what is allowed.
    """
    return _single(Synthetic(vocabulary, size, seed), sequence, seed, held_out_fraction)


def mixture(weights: Mapping[DataSet, float], seed: int = 0) -> DataSet:
    """Several data sets as one, interleaved by weight.

    A part starts over when all its examples were seen, whatever the others do. What the parts hold
    out is evaluated once each; see `DataSet.held_out_batches`.

    Args:
        weights: each data set's share of the examples, up to a common factor.
        seed: of the dropout keys; the parts keep their own order of examples.

    Returns:
        The data set; its vocabulary is the largest of the parts'.

    Raises:
        InputError: if there is no part, a weight is not above 0, sequences differ, or two parts
            read one file.

    Example:
        >>> a, b = (synthetic(vocabulary=5, sequence=4, size=100, seed=seed) for seed in (0, 1))
        >>> len(mixture({a: 0.8, b: 0.2}).parts)
        2
    """
    sequences = sorted({dataset.sequence for dataset in weights})
    if len(sequences) != 1:
        raise InputError(
            f"a mixture needs one or more data sets of one sequence; got sequences {sequences}"
        )
    for dataset, weight in weights.items():
        check_weight(", ".join(part.corpus.name for part in dataset.parts), weight)
    parts = tuple(
        dataclasses.replace(part, weight=weight * part.weight / _total_weight(dataset))
        for dataset, weight in weights.items()
        for part in dataset.parts
    )
    return DataSet(parts, sequences[0], seed)


def _single(corpus: Corpus, sequence: int, seed: int, held_out_fraction: float) -> DataSet:
    return DataSet((MixturePart(corpus, seed, held_out_fraction),), sequence, seed)


def _path_of(tokenizer: str | os.PathLike[str] | None) -> str | None:
    return None if tokenizer is None else as_path("tokenizer", tokenizer)


def _total_weight(dataset: DataSet) -> float:
    return sum(part.weight for part in dataset.parts)


def _check_apart(parts: Sequence[MixturePart]) -> None:
    """Refuses a file in two parts: each holds out another stretch of it, and trains on the rest."""
    if len(parts) == 1:
        return
    seen: dict[object, Corpus] = {}
    for part in parts:
        for file in part.corpus.files():
            other = seen.setdefault(file_identity(file), part.corpus)
            if other is not part.corpus:
                raise InputError(
                    f"{file} is in two parts of the mixture, {other.name} and {part.corpus.name}: "
                    f"one would train on what the other holds out; name it once"
                )
