"""Measuring a Ray cluster: how fast each node's processor is, and each link between two nodes.

One actor a node measures. Links are measured with the transport that training uses, from the
moment that a message is sent to the moment that it is there: the sender sends, and the receiver
answers with a few bytes whose time, that of the smallest message, is taken off again. Where the
processors at a link's ends are to train, they then compute while messages go over it: what they
compute less is what the messages cost them.
"""

from __future__ import annotations

import itertools
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from statistics import median
from typing import Any

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

from hetjax._compat import ListeningServer
from hetjax.errors import WorkerLostError
from hetjax.mesh.cluster import Cluster
from hetjax.mesh.host_cpu import HOST_CPU, HOST_DEVICES, HostCpu, machine_name, measure_host
from hetjax.mesh.link_fit import fit_link
from hetjax.mesh.links import Link
from hetjax.mesh.measured import ProcessorLoad, measured_cluster, measured_nodes
from hetjax.mesh.ray_offers import connected_ray_nodes, ray_offers
from hetjax.runtime.moves.listening import SECRET_BYTES, transfer_identifier
from hetjax.runtime.workers.waiting import tell_of_late

START_SECONDS = 120.0
"""How long the actors may take to start."""

CALL_SECONDS = 60.0
"""How long one measurement may take."""

CONNECT_SECONDS = 10.0
"""How long a node may take to accept a connection from another."""

_TOKEN_BYTES = 4
_SIZES = tuple(4**power for power in range(7, 13))  # 16 KiB to 16 MiB.
_FEWEST_SIZES = 2
_REPEATS = 3
_LONGEST_SECONDS = 0.5
"""A size whose message would take longer is left out, unless too few would be left."""

_SHORT_BYTES, _LONG_BYTES = 2**12, 2**20
"""What is sent while a processor computes, again and again: short messages, and then long ones."""

_LOAD_SECONDS = 0.5
"""For about so long."""

_ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "XLA_FLAGS": f"{HOST_DEVICES}=1",
}


def measure_cluster(say: Callable[[str], None] = lambda _: None) -> Cluster:
    """The Ray cluster that this process is connected to, measured.

    Nothing else should run on it meanwhile. A node takes about half a second, a link less than
    seven, or fifteen where it carries no more than 10 Mbit/s; links are measured one after another,
    since two may share a wire.

    Args:
        say: is told what is being measured.

    Returns:
        The cluster; see `hetjax.mesh.measured.measured_cluster`. A link is as slow as the slower
        one of its directions, and as both are at the same time.

    Raises:
        InputError: this process is not connected to Ray, a node's accelerator is of a kind that is
            not known, or no node offers devices.
        WorkerLostError: a node or a link does not answer in time.
    """
    nodes = measured_nodes(connected_ray_nodes())
    hosts = [node["NodeID"] for node in nodes if _is_host(node)]
    say(f"measuring {len(nodes)} nodes")
    with _Probes(nodes, say) as probes:
        processors = probes.processors(hosts)
        pairs = list(itertools.combinations([node["NodeID"] for node in nodes], 2))
        links, loads = {}, {node: list[ProcessorLoad]() for node in hosts}
        for place, (a, b) in enumerate(pairs, start=1):
            names = f"{probes.names[a]} and {probes.names[b]}"
            say(f"measuring link {place} of {len(pairs)}, between {names}")
            links[frozenset((a, b))] = probes.link(a, b)
            for node, load in probes.loads(a, b, links[frozenset((a, b))]):
                loads.get(node, []).append(load)
    typical = {
        node: ProcessorLoad(*map(median, zip(*found, strict=True)))
        for node, found in loads.items()
        if found
    }
    return measured_cluster(nodes, processors, links, typical)


def _is_host(node: Mapping[str, Any]) -> bool:
    return any(offer.kind == HOST_CPU for offer in ray_offers(node))


class NodeProbe:
    """One node's end of the measurements; runs in an actor of its own.

    Args:
        host: the node's own address, the only one that it listens on.
        secret: what only the probes of the measurement have; messages are named by it.
    """

    def __init__(self, host: str, secret: bytes):
        (self._device,) = jax.local_devices()
        self._secret = secret
        self._server = ListeningServer(self._device.client, host).server
        self._connections: dict[str, Any] = {}
        self._computing = Computing(self._device)

    def describe(self) -> tuple[str, str]:
        """The machine that it runs on, and the address where other probes reach it."""
        return machine_name(), self._server.address()

    def processor(self) -> HostCpu:
        """Measure the processor."""
        return measure_host()

    def connect(self, address: str) -> None:
        """Connect to another probe.

        Raises:
            OSError: nothing answers there; JAX would wait for ever.
        """
        if address not in self._connections:
            host, _, port = address.rpartition(":")
            place = host.strip("[]"), int(port)
            try:
                socket.create_connection(place, timeout=CONNECT_SECONDS).close()
            except OSError as error:
                raise OSError(f"no connection to {address}: {error}") from None
            self._connections[address] = self._server.connect(address)

    def echo(self, peer: str, first: int, size: int, repeats: int) -> None:
        """Receive messages, and answer each one with a few bytes as soon as it is there.

        Args:
            peer: the address of the probe that sends.
            first: the number of the first message, which no other has; answers are counted too.
            size: bytes of a message.
            repeats: how many there are.
        """
        answer, last = self._array(_TOKEN_BYTES), first + 2 * (repeats - 1)
        message = self._pull(peer, first, size)
        for number in range(first, last + 1, 2):
            jax.block_until_ready(message)
            # The next one is asked for before its sender may send it, as in training.
            message = self._pull(peer, number + 2, size) if number < last else None
            self._offer(number + 1, answer)

    def time_messages(self, peer: str, first: int, size: int, repeats: int) -> list[float]:
        """Send messages to a probe that runs `echo` with the same arguments.

        Returns:
            For each message the seconds until its answer was there.
        """
        message, seconds = self._array(size), []
        for number in range(first, first + 2 * repeats, 2):
            answer = self._pull(peer, number + 1, _TOKEN_BYTES)
            start = time.perf_counter()
            self._offer(number, message)
            jax.block_until_ready(answer)
            seconds.append(time.perf_counter() - start)
        return seconds

    def exchange(self, peer: str, mine: int, theirs: int, size: int, repeats: int) -> list[float]:
        """Send messages while the peer sends as many, which does the same at the same time.

        Args:
            peer: the address of the probe at the other end.
            mine: the number of the first message that is sent; the next ones have every second one.
            theirs: that of the first message that comes.
            size: bytes of a message.
            repeats: how many go each way.

        Returns:
            The seconds from one message that has come to the next.
        """
        message, seconds = self._array(size), []
        for place in range(repeats):
            start = time.perf_counter()
            coming = self._pull(peer, theirs + 2 * place, size)
            self._offer(mine + 2 * place, message)
            jax.block_until_ready(coming)
            seconds.append(time.perf_counter() - start)
        return seconds

    def lost_to_messages(self, does: str, peer: str, first: int, size: int, repeats: int) -> float:
        """What messages cost this node's processor.

        Args:
            does: what this end does, ``"echo"`` or ``"time_messages"``; the peer does the other.
            peer: the address of the probe at the other end.
            first: the number of the first message.
            size: bytes of a message.
            repeats: how many there are.

        Returns:
            Seconds of computing lost for each message with its answer; 0 where it is too little to
            be seen.
        """
        alone = self._computing.rate_during(lambda: time.sleep(_LOAD_SECONDS))
        seconds = time.perf_counter()
        beside = self._computing.rate_during(
            lambda: getattr(self, does)(peer, first, size, repeats)
        )
        seconds = time.perf_counter() - seconds
        return max(0.0, seconds * (1 - beside / alone)) / repeats

    def _array(self, size: int) -> jax.Array:
        return jax.block_until_ready(jax.device_put(np.ones(size, np.uint8), self._device))

    def _offer(self, number: int, message: jax.Array) -> None:
        self._server.await_pull(transfer_identifier(self._secret, number), [message])

    def _pull(self, peer: str, number: int, size: int) -> Any:
        sharding = SingleDeviceSharding(self._device)
        shape = jax.ShapeDtypeStruct((size,), np.uint8, sharding=sharding)
        return self._connections[peer].pull(transfer_identifier(self._secret, number), [shape])


class Computing:
    """Matrix products, one after another, on a thread of their own.

    Args:
        device: where.
    """

    def __init__(self, device: Any):
        self._matrix = jax.device_put(np.ones((256, 256), np.float32), device)
        self._product = jax.jit(lambda x: x @ x)
        jax.block_until_ready(self._product(self._matrix))

    def rate_during(self, work: Callable[[], None]) -> float:
        """How many products a second are computed while something else is done."""
        ends, count = threading.Event(), 0

        def compute() -> None:
            nonlocal count
            while not ends.is_set():
                jax.block_until_ready(self._product(self._matrix))
                count += 1

        thread = threading.Thread(target=compute, daemon=True)
        began = time.perf_counter()
        thread.start()
        try:
            work()
        finally:
            ends.set()
            thread.join()
        return count / (time.perf_counter() - began)


class _Probes:
    """A probe on every node, from `with` to its end."""

    def __init__(self, nodes: Sequence[Mapping[str, Any]], say: Callable[[str], None]):
        self._say = say
        self.names = {node["NodeID"]: node["NodeManagerAddress"] for node in nodes}
        self._actors: dict[str, Any] = {}
        self._machines: dict[str, str] = {}
        self._addresses: dict[str, str] = {}
        self._numbers = itertools.count(step=2 * (_REPEATS + 1))

    def __enter__(self) -> _Probes:
        try:
            self._start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        import ray

        for actor in self._actors.values():
            ray.kill(actor)

    def _start(self) -> None:
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        actor_class, secret = ray.remote(NodeProbe), secrets.token_bytes(SECRET_BYTES)
        for node, address in self.names.items():
            self._actors[node] = actor_class.options(
                num_cpus=0,
                scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False),
                runtime_env={"env_vars": _ENVIRONMENT},
            ).remote(address, secret)
        calls = {node: actor.describe.remote() for node, actor in self._actors.items()}
        late = {self.names[node]: call for node, call in calls.items()}
        tell_of_late(late, "to start a process that measures", START_SECONDS, self._say)
        for node, (machine, address) in self._wait(calls, START_SECONDS).items():
            self._machines[node], self._addresses[node] = machine, address

    def processors(self, nodes: Sequence[str]) -> dict[str, HostCpu]:
        """Measure the processors of nodes, no two on one machine at the same time."""
        found: dict[str, HostCpu] = {}
        waiting = list(nodes)
        while waiting:
            turn = {self._machines[node]: node for node in reversed(waiting)}
            calls = {node: self._actors[node].processor.remote() for node in turn.values()}
            found |= self._wait(calls, CALL_SECONDS)
            waiting = [node for node in waiting if node not in found]
        return found

    def link(self, a: str, b: str) -> Link:
        """Measure the link between two nodes in both directions."""
        calls = {
            one: self._actors[one].connect.remote(self._addresses[other])
            for one, other in ((a, b), (b, a))
        }
        self._wait(calls, 2 * CONNECT_SECONDS)
        there, back = self._direction(a, b), self._direction(b, a)
        latency = max(there.latency, back.latency)
        slower = min(there.bandwidth, back.bandwidth)
        return Link(self._both_ways(a, b, Link(slower, latency)), latency)

    def _both_ways(self, a: str, b: str, link: Link) -> float:
        """Bytes/s of each direction while the other one is as busy, which is how training is."""
        longest = max(link.bandwidth * _LONGEST_SECONDS / 2, _SIZES[0])
        size, repeats = max(each for each in _SIZES if each <= longest), _REPEATS + 1
        first = next(self._numbers)
        ways = ((a, b, first, first + 1), (b, a, first + 1, first))
        calls = {
            node: self._actors[node].exchange.remote(
                self._addresses[peer], mine, theirs, size, repeats
            )
            for node, peer, mine, theirs in ways
        }
        seconds = max(median(found[1:]) for found in self._wait(calls, CALL_SECONDS).values())
        return size / max(seconds - link.latency, size / link.bandwidth)

    def loads(self, a: str, b: str, link: Link) -> Iterator[tuple[str, ProcessorLoad]]:
        """What messages between two nodes cost the processors at both ends."""
        for sender, receiver in ((a, b), (b, a)):
            short = self._lost(sender, receiver, _SHORT_BYTES, link)
            long = self._lost(sender, receiver, _LONG_BYTES, link)
            for node in (sender, receiver):
                each = max(0.0, long[node] - short[node]) / (_LONG_BYTES - _SHORT_BYTES)
                # A message and its answer are two.
                yield node, ProcessorLoad(each, max(0.0, short[node] - each * _SHORT_BYTES) / 2)

    def _lost(self, sender: str, receiver: str, size: int, link: Link) -> dict[str, float]:
        """Seconds that both ends lose to a message with its answer."""
        seconds = size / link.bandwidth + 2 * link.latency
        repeats = int(np.clip(_LOAD_SECONDS / seconds, 2, 256))
        first, *_ = (next(self._numbers) for _ in range(repeats + 1))
        calls = {
            receiver: self._actors[receiver].lost_to_messages.remote(
                "echo", self._addresses[sender], first, size, repeats
            ),
            sender: self._actors[sender].lost_to_messages.remote(
                "time_messages", self._addresses[receiver], first, size, repeats
            ),
        }
        return self._wait(calls, CALL_SECONDS)

    def _direction(self, sender: str, receiver: str) -> Link:
        half = self._fastest(sender, receiver, _TOKEN_BYTES) / 2
        sizes, seconds = [_TOKEN_BYTES], [half]
        for size in _SIZES:
            expected = seconds[-1] * size / sizes[-1]
            if len(sizes) > _FEWEST_SIZES and expected > _LONGEST_SECONDS:
                break
            # A time below that of the smallest message is a measurement gone wrong.
            seconds.append(max(half, self._fastest(sender, receiver, size) - half))
            sizes.append(size)
        return fit_link(sizes, seconds)

    def _fastest(self, sender: str, receiver: str, size: int) -> float:
        """The least time from sending a message to having its answer.

        The first message is not counted: it pays for memory, and a link that lets a burst through
        has let it through.
        """
        first, repeats = next(self._numbers), _REPEATS + 1
        calls = {
            receiver: self._actors[receiver].echo.remote(
                self._addresses[sender], first, size, repeats
            ),
            sender: self._actors[sender].time_messages.remote(
                self._addresses[receiver], first, size, repeats
            ),
        }
        return min(self._wait(calls, CALL_SECONDS)[sender][1:])

    def _wait(self, calls: Mapping[str, Any], deadline: float) -> dict[str, Any]:
        """Wait for calls to nodes.

        Raises:
            WorkerLostError: one of them failed or took too long.
        """
        import ray
        from ray.exceptions import GetTimeoutError, RayError

        names = " and ".join(self.names[node] for node in calls)
        worker = f"the measurement on {names}"
        try:
            results = ray.get(list(calls.values()), timeout=deadline)
        except GetTimeoutError:
            raise WorkerLostError(worker, f"it took longer than {deadline:g} s") from None
        except RayError as error:
            reason = str(getattr(error, "cause", None) or error).strip().splitlines()[-1]
            raise WorkerLostError(worker, reason) from None
        return dict(zip(calls, results, strict=True))
