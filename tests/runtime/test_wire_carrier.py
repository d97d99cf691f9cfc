import contextlib
import os
import re
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from process_ends import DEVICES, HOST, SECRET, Ends, job_ends, job_placement, sent_arrays

from hetjax.errors import InputError, WorkerLostError
from hetjax.runtime.instructions.instruction import RouteKind, Tag
from hetjax.runtime.instructions.placement import Placement
from hetjax.runtime.moves.carriers import CarrierName, Delivery
from hetjax.runtime.moves.listening import transfer_identifier
from hetjax.runtime.moves.wire_carrier import WireCarrier
from hetjax.runtime.workers.job import transfers


@pytest.fixture(scope="module", autouse=True)
def no_watcher_is_left() -> Iterator[None]:
    """A thread that waits inside XLA when the interpreter ends would abort the process."""
    yield
    waiting = [each for each in threading.enumerate() if each.name.startswith("watch ")]
    for each in waiting:
        each.join(timeout=5)
    assert not [each.name for each in waiting if each.is_alive()]


@pytest.fixture(scope="module")
def placement() -> Placement:
    return job_placement()


@pytest.fixture
def ends(placement: Placement) -> Iterator[Ends]:
    """The transports of both stages, by wire, with a deadline of a second."""
    with job_ends(placement, [CarrierName.WIRE]) as made:
        yield made


def carrier_of(stage: int, secret: bytes = SECRET) -> WireCarrier:
    """One stage's, alone."""
    names = {(each, 0): f"stage {each}, host 0" for each in DEVICES}
    return WireCarrier((stage, 0), DEVICES[stage][0], names, secret, deadline=1.0)


def servers_of(ends: Ends) -> list[Any]:
    """The transfer servers of all workers: each has one for each partner."""
    return [each.server for wire in ends.wires.values() for each in wire._servers.values()]


def test_a_server_that_does_not_answer_names_the_worker():
    (error,) = carrier_of(1).connect({(0, 0): f"{HOST}:1"}).values()
    assert "stage 0, host 0 is lost: no connection to 127.0.0.1:1: " in str(error)


def test_a_server_that_accepts_and_then_says_nothing_names_the_worker():
    carrier = carrier_of(1)
    carrier.listen(HOST, [(0, 0)])
    with socket.create_server((HOST, 0)) as silent:
        failed = carrier.connect({(0, 0): f"{HOST}:{silent.getsockname()[1]}"})
    assert re.search(r"stage 0, host 0 .* did not greet within 1 s", str(failed[0, 0]))


def test_a_server_of_another_run_does_not_greet():
    other, ours = carrier_of(0, b"another"), carrier_of(1)
    ours.listen(HOST, [(0, 0)])
    failed = ours.connect({(0, 0): other.listen(HOST, [(1, 0)])[1, 0]})
    assert re.search(r"stage 0, host 0 .* did not greet within 1 s", str(failed[0, 0]))
    late = jax.device_put(np.zeros(2**16, np.uint8), DEVICES[0][0])
    other._server((1, 0)).await_pull(ours._greeting((0, 0), (1, 0)), [late])


def test_devices_without_a_transfer_server_are_told_what_to_set(monkeypatch: pytest.MonkeyPatch):
    def no_server(*_: Any) -> Any:
        raise jax.errors.JaxRuntimeError("UNIMPLEMENTED: no transfers here\nand more")

    monkeypatch.setattr("hetjax.runtime.moves.wire_carrier.ListeningServer", no_server)
    with pytest.raises(
        InputError,
        match=r"^stage 0, host 0: JAX has no transfer server on cpu \(UNIMPLEMENTED: no transfers "
        r"here\); set runtime.carrier = 'stream', or leave it out$",
    ):
        carrier_of(0).listen(HOST, [(1, 0)])


def test_identifiers_differ_from_run_to_run_and_use_all_bits():
    numbers = [(step, place) for step in range(200) for place in range(5)]
    found = [{transfer_identifier(secret, *each) for each in numbers} for secret in (b"a", b"b")]
    assert len(found[0] | found[1]) == 2 * len(numbers)
    for bit in range(64):
        assert 400 < sum(identifier >> bit & 1 for identifier in found[0]) < 600


def test_what_a_stranger_has_taken_is_missed_within_the_deadline(placement: Placement, ends: Ends):
    """The stranger is connected, and knows the identifier."""
    source, target = ends.transports.values()
    tag = next(t for t in transfers(placement) if t.route.kind == RouteKind.VALUE)
    source.send(0, tag, sent_arrays(placement, tag))
    wire = ends.wires[1, 0]
    delivery = Delivery(0, source._numbers[tag], (0, 0), (1, 0))
    shapes = target._receiving[Tag(tag.route)].requests[0, 0]
    jax.block_until_ready(wire.ask(delivery, shapes, tag.route).pieces)
    target.expect(0, tag)
    with pytest.raises(
        WorkerLostError,
        match=r"^stage 0, host 0 is lost: its value of microbatch \d did not come within 1 s; "
        r"it hangs or is out of reach, or another has taken it",
    ):
        target.receive(0, tag)
    source.send(0, tag, sent_arrays(placement, tag))


def test_strangers_are_refused_once_all_are_connected(placement: Placement, ends: Ends):
    addresses = [each.address().rpartition(":") for each in servers_of(ends)]
    for wire in ends.wires.values():
        wire.stop_listening()
        wire.stop_listening()
    for host, _, port in addresses:
        with (
            contextlib.suppress(ConnectionRefusedError),
            socket.create_connection((host, int(port)), timeout=5) as stranger,
        ):
            stranger.sendall(bytes(4096))  # It would end the process if it were read.
    source, target = ends.transports.values()
    tag = next(t for t in transfers(placement) if t.route.target == 1)
    for step in range(3):
        target.expect(step, tag)
        source.send(step, tag, sent_arrays(placement, tag))
        target.receive(step, tag)
    for host, _, port in addresses:
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((host, int(port)), timeout=5)


def listening_addresses() -> set[str]:
    """The local addresses of this process's listening sockets, as the kernel writes them."""
    mine = {os.readlink(path) for path in Path("/proc/self/fd").iterdir() if path.exists()}
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in mine:
                found.add(fields[1])
    return found


@pytest.mark.skipif(not Path("/proc/self/net/tcp").exists(), reason="it reads Linux's tables")
def test_servers_listen_on_their_own_address_only(ends: Ends):
    ports = {int(address.rpartition(":")[2], 16) for address in listening_addresses()}
    assert {int(each.address().rpartition(":")[2]) for each in servers_of(ends)} <= ports
    assert {address.rpartition(":")[0] for address in listening_addresses()} == {"0100007F"}
