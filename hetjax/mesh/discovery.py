"""Subclusters found, not written: from the devices of this process, or from a Ray cluster.

What can be found is which devices there are. Links cannot, and are assumed (`PCIE`,
`HOST_MEMORY`, `NETWORK`); a cluster file says them better.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from hetjax.errors import InputError
from hetjax.mesh.host_cpu import HOST_CPU, measure_host_cpu
from hetjax.mesh.jax_devices import JaxDevice, kind_name
from hetjax.mesh.kinds import DeviceKind
from hetjax.mesh.links import Link
from hetjax.mesh.published_kinds import KINDS, kind
from hetjax.mesh.ray_offers import NODE_RESOURCE, Offer, ray_offers, subcluster_names
from hetjax.mesh.subcluster import Subcluster

PCIE = Link(bandwidth=25e9, latency=10e-6)
"""Assumed between the accelerators of a node: PCIe 4.0 x16."""

HOST_MEMORY = Link(bandwidth=5e9, latency=20e-6)
"""Assumed between host CPU devices: a copy in memory, beside other work."""

NETWORK = Link(bandwidth=1.25e9, latency=100e-6)
"""Assumed between nodes: 10 Gbit/s Ethernet."""


# From the devices of this process


def local_subclusters(devices: Sequence[JaxDevice] | None = None) -> tuple[Subcluster, ...]:
    """The devices of this process: a subcluster of one node for each kind.

    Args:
        devices: the devices; `jax.local_devices` unless given.

    Returns:
        Subclusters named after their kinds, in the order in which they come first.

    Raises:
        InputError: a device is of a kind that has no known figures.
    """
    if devices is None:
        # Not at the top: whoever only reads cluster files does not wait for JAX.
        import jax

        devices = jax.local_devices()
    counts = Counter(_known_kind_name(device) for device in devices)
    subclusters = []
    for name, count in counts.items():
        link = HOST_MEMORY if name == HOST_CPU else PCIE
        device_kind = measure_host_cpu(count) if name == HOST_CPU else kind(name)
        subclusters.append(Subcluster(name, device_kind, 1, count, link, link))
    return tuple(subclusters)


def _known_kind_name(device: JaxDevice) -> str:
    name = kind_name(device)
    if name is None:
        raise InputError(
            f"device {device}: {device.device_kind!r} is of no known device kind; "
            f"write a cluster file that gives its figures under 'kinds'. Known: {', '.join(KINDS)}"
        )
    return name


# From a Ray cluster


def ray_subclusters(nodes: Iterable[Mapping[str, Any]]) -> tuple[Subcluster, ...]:
    """The nodes of a Ray cluster: like nodes make a subcluster.

    The kind of a node's devices is read from the first of these that it has:

    - resources ``hetjax:<kind>``, whose amount is the number of devices; a node of two kinds has
      two (``ray start --resources '{"hetjax:RTX3080": 2, "hetjax:RTX4090": 2}'``);
      Ray may give a worker any of its cards, which refuses those of another kind,
    - the label ``hetjax=<kind>``,
    - the resource ``accelerator_type:<type>`` or the label ``ray.io/accelerator-type``, which Ray
      sets by itself.

    A node without accelerators is one device of the kind ``host-cpu``, taken to be as fast as
    this host; one without CPUs too (a head that runs no work) is left out.

    Where a resource, or none, does not tell nodes of unlike accelerators or numbers of them apart,
    each is a subcluster of its own, addressed by the resource ``node:<address>``.

    Args:
        nodes: what ``ray.nodes()`` returns. Nodes that are not alive are left out.

    Returns:
        Subclusters named after their kinds.

    Raises:
        InputError: a node's accelerator is of a kind that is not known, or no node is left.
    """
    alive = [node for node in nodes if node["Alive"]]
    offers = _addressed([(node, offer) for node in alive for offer in ray_offers(node)])
    if not offers:
        raise InputError("ray: no node that is alive offers a CPU or an accelerator")
    # Ray nodes can share a machine, as they do on a laptop: then they share its processor.
    sharing = max(Counter(node.get("NodeManagerAddress") for node in alive).values())
    names = subcluster_names(list(offers))
    return tuple(
        _ray_subcluster(name, offer, count, sharing)
        for name, (offer, count) in zip(names, offers.items(), strict=True)
    )


def _addressed(offers: Sequence[tuple[Mapping[str, Any], Offer]]) -> Counter[Offer]:
    """How many nodes have each offer; where Ray would not find these, one, with its address."""
    unlike = {offer for _, offer in offers if offer.kind != HOST_CPU}
    having = Counter(offer.ray_resource for offer in unlike)
    found: Counter[Offer] = Counter()
    for node, offer in offers:
        if offer.kind != HOST_CPU and (
            having[offer.ray_resource] > 1 or (offer.ray_resource is None and len(unlike) > 1)
        ):
            address = NODE_RESOURCE + node["NodeManagerAddress"]
            offer = replace(offer, ray_resource=address)
        found[offer] += 1
    return found


def _ray_subcluster(name: str, offer: Offer, nodes: int, sharing: int) -> Subcluster:
    on_host = offer.kind == HOST_CPU
    device_kind: DeviceKind = measure_host_cpu(sharing) if on_host else kind(offer.kind)
    intra_node = HOST_MEMORY if on_host else PCIE
    return Subcluster(
        name, device_kind, nodes, offer.num_devices, intra_node, NETWORK, offer.ray_resource
    )
