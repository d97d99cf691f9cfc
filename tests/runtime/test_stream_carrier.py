"""The stream carrier alone: who may connect, who hears of a lost connection, and when."""

import socket
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import SingleDeviceSharding

from hetjax import InputError
from hetjax.runtime.instructions.instruction import Route, RouteKind
from hetjax.runtime.moves.carriers import CarrierName, Coming, Delivery
from hetjax.runtime.moves.peers import Peer
from hetjax.runtime.moves.stream_carrier import StreamCarrier
from hetjax.runtime.ray.ray_carriers import joined_both_ways
from hetjax.runtime.ray.ray_worker import HostWorker

ADDRESS = "127.0.0.1"
ONE, OTHER = (0, 0), (1, 0)
NAMES = {ONE: "stage 0, host 0", OTHER: "stage 1, host 0"}
ROUTE = Route(RouteKind.VALUE, 0, 1)


def carrier_of(peer: Peer, secret: bytes = b"of the tests") -> StreamCarrier:
    return StreamCarrier(peer, NAMES, secret, deadline=1.0)


def connect(*carriers: StreamCarrier) -> list[Any]:
    """Have two carriers connect at the same time; whom each did not reach."""
    peers = (ONE, OTHER)
    addresses = [
        each.listen(ADDRESS, [peer])[peer] for each, peer in zip(carriers, peers[::-1], strict=True)
    ]
    found: list[Any] = [None, None]

    def reach(place: int) -> None:
        found[place] = carriers[place].connect({peers[1 - place]: addresses[1 - place]})

    threads = [threading.Thread(target=reach, args=(place,)) for place in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


@pytest.fixture
def joined() -> Iterator[tuple[StreamCarrier, StreamCarrier]]:
    one, other = carrier_of(ONE), carrier_of(OTHER)
    assert connect(one, other) == [{}, {}]
    yield one, other
    one.close()
    other.close()


def asked(carrier: StreamCarrier, delivery: Delivery, *arrays: Any) -> Coming:
    sharding = SingleDeviceSharding(jax.devices()[1])
    shapes = [jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding) for a in arrays]
    return carrier.ask(delivery, shapes, ROUTE)


def test_pieces_come_in_any_number_and_size(joined: tuple[StreamCarrier, StreamCarrier]):
    one, other = joined
    rng = np.random.default_rng(0)
    few = [rng.normal(size=size).astype(np.float32) for size in (0, 1, 2**21, 3)]
    many = [np.full(place % 3, place, np.int16) for place in range(1100)]
    for step, arrays in enumerate((few, many, [])):
        delivery = Delivery(step, 5, ONE, OTHER)
        one.offer(delivery, [jax.numpy.asarray(each) for each in arrays])
        coming = asked(other, delivery, *arrays)
        assert coming.watched.done.wait(20)
        assert coming.watched.error is None
        for found, array in zip(coming.pieces, arrays, strict=True):
            assert found.devices() == {jax.devices()[1]}
            np.testing.assert_array_equal(np.asarray(found), array)


def test_what_cannot_be_computed_is_told_to_who_waits(joined: tuple[StreamCarrier, StreamCarrier]):
    one, other = joined
    gone = jax.numpy.ones(5)
    gone.delete()
    delivery = Delivery(0, 0, ONE, OTHER)
    one.offer(delivery, [gone])
    coming = asked(other, delivery, np.ones(5, np.float32))
    assert coming.watched.done.wait(20)
    assert "deleted" in str(coming.watched.error)


def test_a_lost_connection_is_told_at_once_and_ever_after(
    joined: tuple[StreamCarrier, StreamCarrier],
):
    one, other = joined
    before = asked(other, Delivery(0, 0, ONE, OTHER), np.ones(5))
    one.close()
    assert before.watched.done.wait(5)
    assert "its connection ended" in str(before.watched.error)
    after = asked(other, Delivery(1, 0, ONE, OTHER), np.ones(5))
    assert after.watched.done.is_set()
    assert "its connection ended" in str(after.watched.error)


def test_workers_of_unlike_runs_do_not_join():
    one, other = carrier_of(ONE), carrier_of(OTHER, b"of another run")
    failed = connect(one, other)
    assert "it is none of this run" in str(failed[0][OTHER])
    assert "it is none of this run" in str(failed[1][ONE])
    one.close()
    other.close()


def test_who_accepts_and_says_nothing_is_named_in_time():
    carrier = carrier_of(ONE)
    carrier.listen(ADDRESS, [OTHER])
    began = time.monotonic()
    with socket.create_server((ADDRESS, 0)) as silent:
        failed = carrier.connect({OTHER: f"{ADDRESS}:{silent.getsockname()[1]}"})
    assert time.monotonic() - began < 5
    assert "stage 1, host 0 is lost: no connection to 127.0.0.1" in str(failed[OTHER])
    carrier.close()


def test_strangers_keep_nobody_waiting_and_are_refused_once_all_are_connected():
    one, other = carrier_of(ONE), carrier_of(OTHER)
    address = one.listen(ADDRESS, [OTHER])[OTHER]
    host, _, port = address.rpartition(":")
    with (
        socket.create_connection((host, int(port))),
        socket.create_connection((host, int(port))) as rude,
    ):
        rude.sendall(bytes(4096))
        back = other.listen(ADDRESS, [ONE])[ONE]
        thread = threading.Thread(target=one.connect, args=({OTHER: back},))
        thread.start()
        assert other.connect({ONE: address}) == {}
        thread.join()
    one.stop_listening()
    one.stop_listening()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((host, int(port)), timeout=5)
    one.close()
    other.close()


class NoServer:
    """A wire on a device for which JAX has no transfer server."""

    def listen(self, host: str, partners: Any) -> Any:
        raise InputError("no transfer server")


class Wire:
    """A wire that reaches whom it is told to reach."""

    def listen(self, host: str, partners: Any) -> Any:
        return dict.fromkeys(partners, "nowhere")

    def connect(self, addresses: Any) -> Any:
        return {}


def test_workers_of_which_one_has_no_transfer_server_are_joined_by_streams():
    wires: list[Any] = [NoServer(), Wire()]
    workers = {peer: HostWorker(peer, NAMES[peer]) for peer in (ONE, OTHER)}
    for (peer, worker), wire in zip(workers.items(), wires, strict=True):
        worker.carriers = tuple(CarrierName)[1:]
        worker.listening = {CarrierName.WIRE: wire, CarrierName.STREAM: carrier_of(peer)}
        worker.transport = SimpleNamespace(partners=(OTHER if peer == ONE else ONE,))  # type: ignore
    addresses = {peer: worker.listen(ADDRESS) for peer, worker in workers.items()}
    assert [CarrierName.WIRE in each for each in addresses.values()] == [False, True]
    reached: dict[Peer, Any] = {}

    def reach(peer: Peer) -> None:
        reached[peer] = workers[peer].connect(addresses)

    threads = [threading.Thread(target=reach, args=(peer,)) for peer in workers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    both = (CarrierName.STREAM, CarrierName.HOST)
    assert joined_both_ways(reached) == {ONE: {OTHER: both}, OTHER: {ONE: both}}
    for worker in workers.values():
        worker.listening[CarrierName.STREAM].close()
