"""What feeds workers: rows of batches, read where they are used and ahead of their use.

A source numbers the training examples: batch ``k`` of ``n`` holds examples ``k n`` to
``(k + 1) n - 1``. A run that goes on with another batch size reads on at the example after the last
one that it has seen.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, Protocol, runtime_checkable
from weakref import WeakValueDictionary

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from hetjax.errors import InputError
from hetjax.pipeline.program.loss import host_array, host_shape, path_names
from hetjax.runtime.workers.waiting import Awaited
from hetjax.runtime.workers.worker import Feed

_OF_DEADLINE = 0.9
"""Whoever waits for the source gives up before those who wait for it, and so is what is told."""


class BatchSource(Protocol):
    """Batches as a pure function of their number, so that to resume is to remember a number.

    `hetjax.data.DataSet` and `hetjax.data.ImageSet` are such. On Ray they are sent to every worker,
    so they must be picklable. In a process a source is asked for one batch at a time, by however
    many trainers, and what it returns is copied before it is asked again, so it may use its arrays
    again. Each trainer, or worker on Ray, reads training batches in one thread, the next step's
    rows while this step computes, and held-out batches in the one that evaluates. One that is a
    `FingerprintedSource` too is recognized when a run resumes.
    """

    def batch(self, step: int, batch_size: int, rows: slice | None = None) -> PyTree[np.ndarray]:
        """Examples ``step * batch_size`` to ``(step + 1) * batch_size - 1``, or some of them."""
        ...

    def held_out_batches(self, batch_size: int) -> Iterable[PyTree[np.ndarray]]:
        """The batches to evaluate on, always the same, with all leaves of a training batch.

        Those of a sequence are read one by one, when they are evaluated on; any others once, and
        kept.
        """
        ...


@runtime_checkable
class FingerprintedSource(Protocol):
    """A source that tells its data from all others, so that checkpoints can."""

    def fingerprint(self) -> Mapping[str, str | int | float | bool]:
        """What tells the stream of examples from others, by name: contents, seed, and so on."""
        ...


_TURNS: WeakValueDictionary[int, threading.Lock] = WeakValueDictionary()
"""For each source that is read here, by its id, what its readers have in turn, and keep alive."""

_TURNS_LOCK = threading.Lock()


def _turn_of(source: BatchSource) -> threading.Lock:
    with _TURNS_LOCK:
        return _TURNS.setdefault(id(source), threading.Lock())


class BatchReader:
    """Reads a source's rows for a worker, those of the next step while this one computes.

    Args:
        source: the batches.
        batch_size: examples in a step.
        batch: pytree of shapes, of a training batch; held-out batches have the same leaves.
        deadline: seconds after which other workers give up who wait for what is made of the rows.
        say: is told what is waited for long; see `Awaited`.
    """

    def __init__(
        self,
        source: BatchSource,
        batch_size: int,
        batch: PyTree,
        deadline: float,
        say: Callable[[str], None] | None = None,
    ):
        self._source, self._batch_size = source, batch_size
        self._seconds, self._say = _OF_DEADLINE * deadline, say
        self._names = path_names(batch)
        self._shapes = [host_shape(shape) for shape in jax.tree.leaves(batch)]
        self._ahead: dict[tuple[int, int, int], Future[list[np.ndarray]]] = {}
        self._held_out: Sequence[PyTree] | None = None
        self._lock = threading.Lock()
        self._turn = _turn_of(source)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="read")

    def training(self, first_example: int) -> Feed:
        """A feed of a training step's rows.

        Args:
            first_example: the number of the step's first example.

        Returns:
            The feed; it raises an `InputError` where the source takes too long.
        """
        return lambda first, end: self.read(first_example, [(first, end)])[0]

    def read(
        self, first_example: int, spans: Sequence[tuple[int, int]]
    ) -> list[Sequence[np.ndarray]]:
        """Read rows of a training step; those of the next step are read from then on.

        Args:
            first_example: the number of the step's first example.
            spans: the first row of each reading, and the one after the last.

        Returns:
            Each reading's leaves, which are kept for the step's feed.

        Raises:
            InputError: the source takes too long, has ended, or gives what was not planned.
        """
        with self._lock:
            self._ahead = {k: v for k, v in self._ahead.items() if k[0] >= first_example}
            readings = [self._submit(first_example, *span) for span in spans]
            for span in spans:
                self._submit(first_example + self._batch_size, *span)
        for reading, (first, end) in zip(readings, spans, strict=True):
            examples = f"examples {first_example + first} to {first_example + end - 1}"
            self._wait(_end_of(reading).wait, examples)
        return [reading.result() for reading in readings]

    def _wait(self, comes: Callable[[float], bool], what: str) -> None:
        """Wait for what the source has to do first: `comes` waits some seconds, and tells."""
        awaited = Awaited(self._seconds, self._say, hint="")
        silent = min(awaited.silence, self._seconds)
        if comes(silent):
            return
        awaited.tell(f"the source to read {what}")
        if not comes(self._seconds - silent):
            raise InputError(
                f"source: {what} were not read within {self._seconds:g} s; a source that takes "
                f"longer, or is read for others meanwhile, needs a larger deadline"
            )

    def _submit(self, first_example: int, first: int, end: int) -> Future[list[np.ndarray]]:
        key = (first_example, first, end)
        known = self._ahead.get(key)
        # What could not be read ahead may be there by now.
        if known is None or (known.done() and known.exception() is not None):
            self._ahead[key] = self._thread.submit(
                self._read, first_example + first, first_example + end
            )
        return self._ahead[key]

    def _read(self, example: int, end: int) -> list[np.ndarray]:
        """Examples of the stream; they lie in two of its batches where the batch size changed.

        They are copied, since the source may use its arrays again while these are still needed.
        """
        first, count = example, end - example
        rows = [np.empty((count, *shape.shape[1:]), shape.dtype) for shape in self._shapes]
        while example < end:
            step, row = divmod(example, self._batch_size)
            stop = min(self._batch_size, row + end - example)
            place = slice(example - first, example - first + stop - row)
            with self._turn:
                batch = self._batch(step, slice(row, stop))
                read = _checked(batch, self._names, self._shapes, stop - row, "the source's ")
                for mine, given in zip(rows, read, strict=True):
                    mine[place] = given
            example += stop - row
        return rows

    def _batch(self, step: int, rows: slice) -> PyTree:
        try:
            return self._source.batch(step, self._batch_size, rows)
        except StopIteration as error:  # It would end whatever generator asks for the step.
            raise InputError(
                f"source: batch {step} of {self._batch_size} examples is not there: {error!r}; a "
                f"source has a batch for every step"
            ) from error

    def held_out(self, index: int) -> Feed:
        """A feed of a held-out batch's rows.

        Args:
            index: which batch.

        Returns:
            The feed.

        Raises:
            InputError: the batch is not as planned, or the source is still reading something else.
        """
        with self._held_out_turn():
            batch = self._held_out_batches()[index]
            read = _checked(batch, self._names, self._shapes, self._batch_size, "held-out ")
            kept = [np.array(leaf, x.dtype) for leaf, x in zip(read, self._shapes, strict=True)]
        return lambda first, end: [leaf[first:end] for leaf in kept]

    @property
    def num_held_out(self) -> int:
        """How many held-out batches there are."""
        with self._held_out_turn():
            return len(self._held_out_batches())

    @contextmanager
    def _held_out_turn(self) -> Iterator[None]:
        """The source's turn to read held-out batches, which may take long once it has come."""
        self._wait(lambda seconds: self._turn.acquire(timeout=seconds), "held-out batches")
        try:
            yield
        finally:
            self._turn.release()

    def _held_out_batches(self) -> Sequence[PyTree]:
        if self._held_out is None:
            batches = self._source.held_out_batches(self._batch_size)
            self._held_out = (
                batches
                if isinstance(batches, Sequence)
                else [jax.tree.map(_copied, batch) for batch in batches]
            )
        return self._held_out

    def close(self) -> None:
        """End the reading thread."""
        self._thread.shutdown(wait=False, cancel_futures=True)


def _end_of(reading: Future[Any]) -> threading.Event:
    """Is set when a reading has ended, or `close` has cancelled it: `wait` misses the latter."""
    end = threading.Event()
    reading.add_done_callback(lambda _: end.set())
    return end


def feed_of(batch: PyTree, shapes: PyTree, batch_size: int) -> Feed:
    """A feed of one batch that is at hand.

    Args:
        batch: pytree of arrays.
        shapes: what it must look like.
        batch_size: examples that it must have.

    Returns:
        The feed.

    Raises:
        InputError: it has other leaves, another number of examples, or numbers that the planned
            dtype does not hold.
    """
    wanted = [host_shape(shape) for shape in jax.tree.leaves(shapes)]
    checked = _checked(batch, path_names(shapes), wanted, batch_size)
    planned = [
        leaf.astype(shape.dtype, copy=False) for leaf, shape in zip(checked, wanted, strict=True)
    ]
    return lambda first, end: [leaf[first:end] for leaf in planned]


def _copied(leaf: Any) -> np.ndarray:
    return np.array(host_array(leaf))


def _checked(
    batch: PyTree,
    names: Sequence[str],
    shapes: Sequence[jax.ShapeDtypeStruct],
    num_examples: int,
    whose: str = "",
) -> list[np.ndarray]:
    """The leaves of a batch, which has those and as many examples as were planned, as given."""
    if path_names(batch) != tuple(names):
        raise InputError(
            f"{whose or 'the '}batch has leaves {list(path_names(batch))}, the plan was made for "
            f"{list(names)}"
        )
    leaves = zip(names, jax.tree.leaves(batch), shapes, strict=True)
    return [_as_wanted(name, leaf, shape, num_examples, whose) for name, leaf, shape in leaves]


def _as_wanted(
    name: str, leaf: Any, shape: jax.ShapeDtypeStruct, num_examples: int, whose: str
) -> np.ndarray:
    """A leaf as given, of the planned shape and of a dtype that the planned one has room for."""
    array, wanted = host_array(leaf), (num_examples, *shape.shape[1:])
    if array.shape != wanted:
        raise InputError(f"{whose}batch leaf {name!r} has shape {array.shape}; {wanted} is wanted")
    _check_dtype(name, array, shape.dtype)
    return array


_KINDS = (np.bool_, np.integer, np.floating, np.complexfloating)
"""Kinds of numbers: each may be given for those behind it."""


def _check_dtype(name: str, leaf: np.ndarray, dtype: Any) -> None:
    """Check that the dtype that the plan was made for has room for a leaf's numbers."""
    given, wanted = (
        next((place for place, kind in enumerate(_KINDS) if jnp.issubdtype(each, kind)), -1)
        for each in (leaf.dtype, dtype)
    )
    if not 0 <= given <= wanted:
        raise InputError(
            f"batch leaf {name!r} has dtype {leaf.dtype}; the plan was made for {np.dtype(dtype)}, "
            "which does not hold such numbers"
        )
    if leaf.dtype != dtype and jnp.issubdtype(dtype, np.integer) and given and leaf.size:
        limits = jnp.iinfo(dtype)
        least, most = int(leaf.min()), int(leaf.max())
        if least < limits.min or most > limits.max:
            raise InputError(
                f"batch leaf {name!r} has numbers from {least} to {most}; the plan was made for "
                f"{np.dtype(dtype)}, from {limits.min} to {limits.max}"
            )
