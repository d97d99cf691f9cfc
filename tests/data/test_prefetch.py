import itertools
import threading

import pytest

from hetjax.data import Prefetcher, synthetic


def test_batches_come_in_order_from_the_start_step():
    with Prefetcher(lambda step: step, start=5) as batches:
        assert list(itertools.islice(batches, 4)) == [5, 6, 7, 8]


def test_resuming_gives_the_batches_that_would_have_come():
    data = synthetic(11, sequence=4, size=400)
    with Prefetcher(lambda step: data.batch(step, 3)) as batches:
        whole = [batch["tokens"].tolist() for batch in itertools.islice(batches, 6)]
    with Prefetcher(lambda step: data.batch(step, 3), start=4) as batches:
        resumed = [batch["tokens"].tolist() for batch in itertools.islice(batches, 2)]
    assert whole[4:] == resumed


def test_no_more_than_depth_batches_are_made_ahead():
    made: list[int] = []
    third = threading.Event()

    def batch_of(step: int) -> int:
        made.append(step)
        if step == 2:
            third.set()
        return step

    batches = Prefetcher(batch_of, depth=2)
    assert next(batches) == 0
    assert third.wait(timeout=30)
    batches.close()
    assert made == [0, 1, 2]


def test_an_error_is_raised_in_its_turn_and_closes():
    def batch_of(step: int) -> int:
        if step == 2:
            raise ValueError("step 2 cannot be read")
        return step

    batches = Prefetcher(batch_of)
    assert [next(batches), next(batches)] == [0, 1]
    with pytest.raises(ValueError, match="step 2 cannot be read"):
        next(batches)
    with pytest.raises(StopIteration):
        next(batches)


def test_closing_ends_the_thread():
    name = "prefetch"
    batches = Prefetcher(lambda step: step)
    assert any(thread.name.startswith(name) for thread in threading.enumerate())
    batches.close()
    batches.close()
    assert not any(thread.name.startswith(name) for thread in threading.enumerate())
    assert list(batches) == []
