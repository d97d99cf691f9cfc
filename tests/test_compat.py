"""What JAX does not promise and `_compat` is built on: a release that changes it fails here."""

import contextlib
import itertools
import os
import socket
import time
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import SingleDeviceSharding

from hetjax._compat import ListeningServer, source_lines

NUMBERS = itertools.count(1)


def can_listen(host: str, family: socket.AddressFamily) -> bool:
    with contextlib.suppress(OSError), socket.socket(family) as found:
        found.bind((host, 0))
        return True
    return False


def move(sender: ListeningServer, connection) -> None:
    """Send an array over a connection that is there."""
    device, number = jax.devices()[0], next(NUMBERS)
    array = jax.device_put(np.arange(1000, dtype=np.float32), device)
    shape = jax.ShapeDtypeStruct((1000,), np.float32, sharding=SingleDeviceSharding(device))
    sender.server.await_pull(number, [array])
    (found,) = connection.pull(number, [shape])
    np.testing.assert_array_equal(np.asarray(found), np.asarray(array))


def settled_descriptors(within: float = 5.0) -> dict[str, str]:
    """What this process has open, once it has closed what it is closing."""
    deadline, before = time.monotonic() + within, None
    while before != (now := descriptors()):
        assert time.monotonic() < deadline, "descriptors come and go"
        before = now
        time.sleep(0.2)
    return now


def descriptors() -> dict[str, str]:
    """Each of this process's descriptors with what it is, but for the listing's own."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found[name] = os.readlink(f"/proc/self/fd/{name}")
    return found


@pytest.mark.parametrize("folder", ["mine", "jax", "flax", "optax", "jaxlib"])
def test_lines_are_the_users_in_a_folder_of_any_name(folder: str, tmp_path: Path) -> None:
    path, found = tmp_path / folder / "loss.py", {}
    exec(compile("from jax.numpy import sin\ndef loss(x): return sin(x)", path, "exec"), found)
    (equation,) = jax.make_jaxpr(found["loss"])(1.0).eqns
    assert source_lines(equation)[0] == f"{path}:2"


def connect(address: str) -> socket.socket:
    host, _, port = address.rpartition(":")
    return socket.create_connection((host.strip("[]"), int(port)), timeout=5)


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="it looks among Linux's descriptors")
@pytest.mark.parametrize(
    ("host", "family"), [("127.0.0.1", socket.AF_INET), ("[::1]", socket.AF_INET6)]
)
def test_a_server_that_listens_no_more_keeps_its_connections(
    host: str, family: socket.AddressFamily
):
    if not can_listen(host.strip("[]"), family):
        pytest.skip(f"nothing can listen on {host}")
    client = jax.devices()[0].client
    sender, receiver = ListeningServer(client, host), ListeningServer(client, host)
    address = sender.server.address()
    assert address.startswith(host)
    connection = receiver.server.connect(address)
    move(sender, connection)
    connect(address).close()  # It listens.
    before = settled_descriptors()
    for server in (sender, receiver):
        server.stop_listening()
        server.stop_listening()
    after = settled_descriptors()
    assert after.keys() == before.keys(), "no descriptor is left behind, or lost"
    with contextlib.suppress(ConnectionError), connect(address) as stranger:
        stranger.sendall(bytes(4096))  # It would end the process if it were read.
    for _ in range(3):
        move(sender, connection)
    for server in (sender, receiver):
        with pytest.raises(ConnectionRefusedError):
            connect(server.server.address())
