"""The two ends of a measured link, in one process: what they say to each other is theirs alone."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import numpy as np
import pytest

from hetjax.runtime.moves.listening import transfer_identifier
from hetjax.runtime.moves.watching import Watcher
from hetjax.runtime.ray.ray_measure import NodeProbe

HOST, SIZE, REPEATS = "127.0.0.1", 1000, 3


@pytest.fixture
def probe(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(jax, "local_devices", lambda: jax.devices()[:1])
    return lambda secret: NodeProbe(HOST, secret)


def test_probes_of_one_measurement_hear_each_other(probe: Any):
    ends = probe(b"ours"), probe(b"ours")
    addresses = [each.describe()[1] for each in ends]
    for end, address in zip(ends, reversed(addresses), strict=True):
        end.connect(address)
    with ThreadPoolExecutor(1) as other:
        echo = other.submit(ends[1].echo, addresses[0], 8, SIZE, REPEATS)
        assert len(ends[0].time_messages(addresses[1], 8, SIZE, REPEATS)) == REPEATS
        echo.result(timeout=30)
        ways = other.submit(ends[1].exchange, addresses[0], 21, 20, SIZE, REPEATS)
        assert len(ends[0].exchange(addresses[1], 20, 21, SIZE, REPEATS)) == REPEATS
        ways.result(timeout=30)


def test_a_stranger_who_counts_gets_nothing(probe: Any):
    """He is connected, and asks for the message that is offered by its number."""
    sender, stranger = probe(b"ours"), probe(b"another")
    address = sender.describe()[1]
    stranger.connect(address)
    message = jax.device_put(np.ones(SIZE, np.uint8), jax.devices()[0])
    sender._offer(8, message)
    shape = jax.ShapeDtypeStruct((SIZE,), np.uint8, sharding=message.sharding)
    watcher = Watcher("watch the stranger")
    pulls = [
        watcher.watch(stranger._connections[address].pull(8, [shape])),
        watcher.watch(stranger._pull(address, 8, SIZE)),
    ]
    assert not pulls[0].done.wait(0.5)
    assert not pulls[1].done.is_set()
    # A pull that never ends would outlive the test.
    for identifier in (8, transfer_identifier(b"another", 8)):
        sender._server.await_pull(identifier, [message])
    assert all(each.done.wait(30) for each in pulls)
    watcher.close()


def test_a_probe_that_is_not_there_is_named(probe: Any):
    with pytest.raises(OSError, match=r"no connection to 127\.0\.0\.1:1: .*refused"):
        probe(b"ours").connect(f"{HOST}:1")
