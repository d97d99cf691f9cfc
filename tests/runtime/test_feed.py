import contextlib
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import numpy as np
import pytest

from hetjax.errors import InputError
from hetjax.runtime.workers import waiting
from hetjax.runtime.workers.feed import BatchReader, feed_of

SIZE = 6
SHAPES = {
    "tokens": jax.ShapeDtypeStruct((SIZE, 3), np.dtype(np.int32)),
    "weights": jax.ShapeDtypeStruct((SIZE,), np.dtype(np.float32)),
}


class Source:
    """Counts what is read."""

    def __init__(self):
        self.reads: list[tuple[int, slice | None]] = []
        self.changed = threading.Condition()

    def batch(self, step: int, batch_size: int, rows: slice | None = None) -> Any:
        with self.changed:
            self.reads.append((step, rows))
            self.changed.notify_all()
        if step == 9:
            raise OSError("the file is gone")
        rng = np.random.default_rng(step)
        tokens = rng.integers(0, 99, (batch_size, 3), np.int32)
        batch = {"tokens": tokens, "weights": rng.random(batch_size, np.float32)}
        return jax.tree.map(lambda leaf: leaf[rows or slice(None)], batch)

    def held_out_batches(self, batch_size: int) -> Iterator[Any]:
        return (self.batch(step, batch_size) for step in (100, 101))


@pytest.fixture
def source() -> Source:
    return Source()


@pytest.fixture
def reader(source: Source) -> Iterator[BatchReader]:
    reader = BatchReader(source, SIZE, SHAPES, 300.0)
    yield reader
    reader.close()


def test_rows_are_those_of_the_source(source: Source, reader: BatchReader):
    for step in (0, 1, 2, 7, 8, 3):
        feed = reader.training(step * SIZE)
        for first, end in ((0, 2), (2, 4), (4, 6)):
            rows = source.batch(step, SIZE, slice(first, end))
            for found, expected in zip(feed(first, end), jax.tree.leaves(rows), strict=True):
                np.testing.assert_array_equal(found, expected)


def test_who_has_no_share_of_the_examples_reads_none(source: Source, reader: BatchReader):
    tokens, weights = reader.training(SIZE)(2, 2)
    np.testing.assert_array_equal(tokens, np.zeros((0, 3), np.int32), strict=True)
    np.testing.assert_array_equal(weights, np.zeros(0, np.float32), strict=True)
    reader.close()
    assert not source.reads


class Reusing(Source):
    """Fills the same arrays anew for all that it returns."""

    def __init__(self):
        super().__init__()
        self.held = {name: np.empty(shape.shape, shape.dtype) for name, shape in SHAPES.items()}

    def batch(self, step: int, batch_size: int, rows: slice | None = None) -> Any:
        batch = super().batch(step, batch_size, rows)
        for name, leaf in batch.items():
            self.held[name][: len(leaf)] = leaf
        return {name: self.held[name][: len(leaf)] for name, leaf in batch.items()}


def test_a_source_may_use_its_arrays_again():
    with contextlib.closing(BatchReader(Reusing(), SIZE, SHAPES, 300.0)) as reader:
        spans = ((0, 0, 3), (0, 3, 6), (SIZE, 0, 3), (SIZE, 3, 6), (9, 0, 6))
        fed = [reader.training(first)(row, end) for first, row, end in spans]
        for (first, row, end), rows in zip(spans, fed, strict=True):
            both = [Source().batch(first // SIZE + more, SIZE) for more in (0, 1)]
            start = first % SIZE
            for found, *leaves in zip(rows, *map(jax.tree.leaves, both), strict=True):
                expected = np.concatenate(leaves)[start + row : start + end]
                np.testing.assert_array_equal(found, expected)
        held_out = [reader.held_out(index) for index in range(2)]
    for index, feed in enumerate(held_out):
        tokens, weights = feed(0, SIZE)
        expected = Source().batch(100 + index, SIZE)
        np.testing.assert_array_equal(tokens, expected["tokens"])
        np.testing.assert_array_equal(weights, expected["weights"])


class Held(Source):
    """Reads on when it is released; tells how many are in it at once."""

    def __init__(self):
        super().__init__()
        self.inside = self.most = 0
        self.release = threading.Event()

    def batch(self, step: int, batch_size: int, rows: slice | None = None) -> Any:
        with self.changed:
            self.inside += 1
            self.most = max(self.most, self.inside)
            self.changed.notify_all()
        assert self.release.wait(30)
        batch = super().batch(step, batch_size, rows)
        with self.changed:
            self.inside -= 1
        return batch


@pytest.mark.parametrize("is_the_same", [True, False], ids=["one reader", "two readers"])
def test_a_source_is_asked_for_one_batch_at_a_time(is_the_same: bool):
    source = Held()
    with (
        contextlib.closing(BatchReader(source, SIZE, SHAPES, 300.0)) as reader,
        contextlib.closing(BatchReader(source, SIZE, SHAPES, 300.0)) as another,
        ThreadPoolExecutor(2) as threads,
    ):
        first = threads.submit(reader.training(0), 0, SIZE)
        with source.changed:
            assert source.changed.wait_for(lambda: source.inside == 1, timeout=30)
        second = threads.submit(lambda: (reader if is_the_same else another).held_out(0)(0, SIZE))
        with source.changed:
            assert not source.changed.wait_for(lambda: source.inside == 2, timeout=0.1)
        source.release.set()
        for rows, step in ((first, 0), (second, 100)):
            np.testing.assert_array_equal(rows.result()[0], Source().batch(step, SIZE)["tokens"])
    assert source.most == 1


def test_held_out_batches_do_not_wait_for_ever_for_a_source_that_hangs():
    source = Held()
    with (
        contextlib.closing(BatchReader(source, SIZE, SHAPES, 0.1)) as reader,
        ThreadPoolExecutor(1) as threads,
    ):
        threads.submit(reader.training(0), 0, SIZE)
        with source.changed:
            assert source.changed.wait_for(lambda: source.inside == 1, timeout=30)
        with pytest.raises(InputError, match=r"source: held-out batches were not .* within 0.09 s"):
            reader.held_out(0)
        source.release.set()


def test_the_next_step_is_read_ahead_and_only_once(source: Source, reader: BatchReader):
    reader.training(0)(0, 3)
    with source.changed:
        assert source.changed.wait_for(lambda: len(source.reads) == 2, timeout=30)
    reader.training(SIZE)(0, 3)
    with source.changed:
        assert source.changed.wait_for(lambda: len(source.reads) == 3, timeout=30)
    assert source.reads == [(step, slice(0, 3)) for step in range(3)]


def test_an_error_of_the_source_comes_when_its_step_does(reader: BatchReader):
    reader.training(8 * SIZE)(0, 3)
    with pytest.raises(OSError, match="the file is gone"):
        reader.training(9 * SIZE)(0, 3)


def test_a_source_that_has_ended_names_its_batch():
    class Ending(Source):
        def batch(self, step: int, batch_size: int, rows: slice | None = None) -> Any:
            return next(iter(()))

    message = r"source: batch 3 of 6 examples is not there: StopIteration\(\); .* every step"
    with (
        contextlib.closing(BatchReader(Ending(), SIZE, SHAPES, 300.0)) as reader,
        pytest.raises(InputError, match=message),
    ):
        reader.training(3 * SIZE)(0, 3)


def test_a_source_that_hangs_is_told_and_then_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(waiting, "TELL_SECONDS", 0.0)
    release, said = threading.Event(), []

    class Hanging(Source):
        def batch(self, step: int, batch_size: int, rows: slice | None = None) -> Any:
            release.wait(30)
            return super().batch(step, batch_size, rows)

    with contextlib.closing(BatchReader(Hanging(), SIZE, SHAPES, 0.1, said.append)) as reader:
        with pytest.raises(InputError, match=r"source: examples 8 to 11 were not .* within 0.09 s"):
            reader.training(SIZE)(2, 6)
        assert said == ["waiting for the source to read examples 8 to 11: 0 s of at most 0.09"]
        release.set()


def test_held_out_batches_are_those_of_the_source(source: Source, reader: BatchReader):
    assert reader.num_held_out == 2
    for index in (1, 0):
        expected = jax.tree.leaves(source.batch(100 + index, SIZE, slice(2, 5)))
        for found, leaf in zip(reader.held_out(index)(2, 5), expected, strict=True):
            np.testing.assert_array_equal(found, leaf)


def test_held_out_batches_that_lack_a_leaf_are_refused():
    class Lacking(Source):
        def held_out_batches(self, batch_size: int) -> Iterator[Any]:
            yield {"tokens": self.batch(100, batch_size)["tokens"]}

    message = r"held-out batch has leaves \['tokens'\], .* for \['tokens', 'weights'\]"
    with (
        contextlib.closing(BatchReader(Lacking(), SIZE, SHAPES, 300.0)) as reader,
        pytest.raises(InputError, match=message),
    ):
        reader.held_out(0)


def test_held_out_batches_of_a_sequence_are_read_when_they_are_evaluated_on():
    read: list[int] = []

    class Batches(Sequence[Any]):
        def __len__(self) -> int:
            return 3

        def __getitem__(self, index: Any) -> Any:
            read.append(index)
            return Source().batch(index, SIZE)

    class Lazy(Source):
        def held_out_batches(self, batch_size: int) -> Any:
            return Batches()

    reader = BatchReader(Lazy(), SIZE, SHAPES, 300.0)
    assert reader.num_held_out == 3
    tokens, _ = reader.held_out(1)(2, 5)
    np.testing.assert_array_equal(tokens, Source().batch(1, SIZE)["tokens"][2:5])
    assert read == [1]
    reader.close()


def test_a_feed_of_a_batch_gives_its_rows():
    batch = Source().batch(0, SIZE)
    tokens, weights = feed_of(batch, SHAPES, SIZE)(1, 4)
    np.testing.assert_array_equal(tokens, batch["tokens"][1:4])
    np.testing.assert_array_equal(weights, batch["weights"][1:4])


def test_numbers_that_the_planned_dtype_holds_are_taken():
    batch = Source().batch(0, SIZE)
    given = {"tokens": batch["tokens"].astype(np.int64), "weights": np.arange(SIZE)}
    tokens, weights = feed_of(given, SHAPES, SIZE)(1, 4)
    np.testing.assert_array_equal(tokens, batch["tokens"][1:4], strict=True)
    np.testing.assert_array_equal(weights, np.arange(1, 4, dtype=np.float32), strict=True)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"weights": None}, r"leaves \['tokens'\], .* for \['tokens', 'weights'\]"),
        ({"labels": np.zeros(SIZE)}, r"leaves \['labels', 'tokens', 'weights'\]"),
        ({"weights": np.zeros(5)}, r"'weights' has shape \(5,\); \(6,\) is wanted"),
        ({"tokens": np.zeros((SIZE, 4))}, r"'tokens' has shape \(6, 4\); \(6, 3\) is wanted"),
        ({"weights": np.float32(1)}, r"'weights' has shape \(\)"),
        (
            {"tokens": np.full((SIZE, 3), 1.5)},
            "'tokens' has dtype float64; .* made for int32, which",
        ),
        (
            {"tokens": np.full((SIZE, 3), 2**40)},
            "'tokens' has numbers from 1099511627776 to .* made for int32",
        ),
        ({"weights": np.array(["1"] * SIZE)}, "'weights' has dtype <U1; .* made for float32"),
    ],
)
def test_a_batch_of_another_form_is_refused(changes: dict[str, Any], message: str):
    batch = {**Source().batch(0, SIZE), **changes}
    with pytest.raises(InputError, match=message):
        feed_of(batch, SHAPES, SIZE)
