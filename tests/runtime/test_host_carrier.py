"""The host carrier alone: who waits, who hears of failures, and what is written over."""

import threading
import time
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import SingleDeviceSharding

from hetjax.runtime.instructions.instruction import Route, RouteKind
from hetjax.runtime.moves.carriers import Delivery
from hetjax.runtime.moves.host_carrier import HostCarrier

DELIVERY = Delivery(3, 0, (0, 0), (1, 0))
ROUTE = Route(RouteKind.VALUE, 0, 1)


class Post:
    """Brings bytes from one carrier to another one.

    Attributes:
        open: what is posted waits for it.
        broken: what is raised instead.
    """

    def __init__(self) -> None:
        self.open = threading.Event()
        self.open.set()
        self.broken: Exception | None = None
        self.target = HostCarrier(self)
        self.posted: list[Any] = []

    def __call__(self, delivery: Delivery, pieces: Any) -> None:
        self.open.wait()
        if self.broken is not None:
            raise self.broken
        self.posted.append(pieces)
        self.target.take(delivery, pieces)


@pytest.fixture
def post() -> Iterator[Post]:
    post = Post()
    yield post
    post.target.close()


def shape_of(array: Any) -> list[jax.ShapeDtypeStruct]:
    sharding = SingleDeviceSharding(jax.devices()[1])
    return [jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding)]


def test_who_gives_waits_for_nobody(post: Post):
    post.open.clear()
    source = HostCarrier(post)
    source.offer(DELIVERY, [jax.numpy.ones(5)])
    coming = post.target.ask(DELIVERY, shape_of(np.ones(5, np.float32)), ROUTE)
    assert not coming.watched.done.wait(0.05)
    post.open.set()
    assert coming.watched.done.wait(20)
    assert coming.watched.error is None
    np.testing.assert_array_equal(np.asarray(coming.pieces[0]), np.ones(5))
    source.close()


@pytest.mark.parametrize("shape", [(), (0, 3), (4, 3)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "bool", "int8", "float8_e4m3fn"])
def test_pieces_of_every_type_come_as_they_were(post: Post, shape: tuple[int, ...], dtype: str):
    source, rng = HostCarrier(post), np.random.default_rng(0)
    value = jax.numpy.asarray(rng.normal(size=shape), dtype)
    source.offer(DELIVERY, [value])
    coming = post.target.ask(DELIVERY, shape_of(value), ROUTE)
    assert coming.watched.done.wait(20)
    (found,) = coming.pieces
    assert (found.shape, found.dtype, found.devices()) == (shape, dtype, {jax.devices()[1]})
    assert np.asarray(found).tobytes() == np.asarray(value).tobytes()
    source.close()


@pytest.mark.parametrize("start", [0, 16])
def test_what_has_come_is_no_longer_the_memory_that_brought_it(post: Post, start: int):
    """JAX takes over memory that is aligned as it wants it, even where it is told not to."""
    size = 1 << 16
    room = np.zeros(size + 128, np.uint8)
    brought = room[-room.ctypes.data % 64 + start :][:size]
    brought[:] = 7
    post.target.take(DELIVERY, [brought])
    coming = post.target.ask(DELIVERY, shape_of(brought), ROUTE)
    jax.block_until_ready(coming.pieces)
    brought[:] = 0
    assert np.asarray(coming.pieces[0])[-1] == 7


def test_what_cannot_be_computed_is_told_to_both_ends(post: Post):
    source = HostCarrier(post)
    gone = jax.numpy.ones(5)
    gone.delete()
    source.offer(DELIVERY, [gone])
    coming = post.target.ask(DELIVERY, shape_of(np.ones(5, np.float32)), ROUTE)
    assert coming.watched.done.wait(20)
    assert "deleted" in str(coming.watched.error)
    with pytest.raises(RuntimeError, match="deleted"):
        source.offer(DELIVERY, [gone])
    source.close()


def test_what_cannot_be_posted_is_told_to_who_gives(post: Post):
    post.broken = OSError("no memory for objects")
    source = HostCarrier(post)

    def give_again_and_again() -> None:
        end = time.monotonic() + 20
        while time.monotonic() < end:
            source.offer(DELIVERY, [jax.numpy.ones(5)])
            time.sleep(0.01)

    with pytest.raises(OSError, match="no memory for objects"):
        give_again_and_again()
    assert not post.posted
    source.close()


def test_pieces_of_another_size_are_refused(post: Post):
    post.target.take(DELIVERY, [np.zeros(3, np.uint8)])
    coming = post.target.ask(DELIVERY, shape_of(np.ones(5, np.float32)), ROUTE)
    assert coming.watched.done.is_set()
    assert coming.watched.error is not None


def test_the_thread_ends_when_all_has_been_given(post: Post):
    before = set(threading.enumerate())
    source = HostCarrier(post)
    (thread,) = set(threading.enumerate()) - before
    source.offer(DELIVERY, [jax.numpy.ones(5)])
    source.close()
    thread.join(timeout=20)
    assert not thread.is_alive()
    assert len(post.posted) == 1
