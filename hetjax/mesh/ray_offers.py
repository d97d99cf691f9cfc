"""What the nodes of a Ray cluster offer: devices of a kind, and the resource for them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hetjax.errors import InputError
from hetjax.mesh.host_cpu import HOST_CPU
from hetjax.mesh.published_kinds import KINDS

_RAY_NAMES = {
    # Ray does not say how much memory an A100 or a V100 has: the smaller card is assumed, since a
    # plan that fits it fits the larger one.
    "A100": "A100-40",
    "A100-40G": "A100-40",
    "A100-80G": "A100-80",
    "GeForce-RTX-3080": "RTX3080",
    "GeForce-RTX-3090": "RTX3090",
    "GeForce-RTX-4090": "RTX4090",
    "GeForce-RTX-5090": "RTX5090",
    "AMD-Instinct-MI250X-MI250": "MI250",
    "AMD-Instinct-MI300X-OAM": "MI300X",
    "AMD-Instinct-MI300X-HF": "MI300X",
    "TPU-V4": "TPUv4",
    "TPU-V5LITEPOD": "TPUv5e",
    "TPU-V5P": "TPUv5p",
    "TPU-V6E": "TPUv6e",
}
"""Ray's accelerator types, where they are not our names already."""

NODE_RESOURCE = "node:"
"""What the resource that Ray gives each node of its own begins with; its address follows."""

_MARK = "hetjax"
_RAY_TYPE_RESOURCE = "accelerator_type:"
_RAY_TYPE_LABEL = "ray.io/accelerator-type"


@dataclass(frozen=True)
class Offer:
    """What a Ray node offers: some devices of one kind.

    Args:
        kind: the name of the kind.
        num_devices: how many devices.
        ray_resource: the resource that stands for them; None where there is none.
    """

    kind: str
    num_devices: int
    ray_resource: str | None


def connected_ray_nodes() -> list[dict[str, Any]]:
    """The nodes of the Ray cluster that this process is connected to, as ``ray.nodes()`` has them.

    Raises:
        InputError: this process is not connected.
    """
    # Not at the top: it takes a second, and only this needs it.
    import ray

    if not ray.is_initialized():
        raise InputError("ray: this process is not connected to a Ray cluster; call ray.init first")
    return ray.nodes()


def ray_offers(node: Mapping[str, Any]) -> list[Offer]:
    """What a node offers; see `hetjax.mesh.discovery.ray_subclusters`.

    Args:
        node: one of what ``ray.nodes()`` returns.

    Returns:
        One offer for each kind that the node has; none for a node that runs no work.

    Raises:
        InputError: its accelerator is of a kind that is not known.

    Example:
        >>> ray_offers({"Resources": {"GPU": 2, "accelerator_type:L4": 1}})
        [Offer(kind='L4', num_devices=2, ray_resource='accelerator_type:L4')]
    """
    resources, labels = node.get("Resources", {}), node.get("Labels", {})
    marks = [name for name in resources if name.startswith(f"{_MARK}:")]
    if marks:
        return [_marked_offer(node, mark, int(resources[mark])) for mark in sorted(marks)]
    count = int(resources.get("GPU", 0) or resources.get("TPU", 0))
    if _MARK in labels:
        name = _ray_kind_name(node, f"label {_MARK}", labels[_MARK])
        return [Offer(name, 1 if name == HOST_CPU else max(count, 1), None)]
    if count:
        return [_typed_offer(node, count)]
    return [Offer(HOST_CPU, 1, None)] if resources.get("CPU", 0) >= 1 else []


def _marked_offer(node: Mapping[str, Any], resource: str, amount: int) -> Offer:
    name = _ray_kind_name(node, f"resource {resource}", resource.removeprefix(f"{_MARK}:"))
    if amount < 1:
        raise InputError(
            f"Ray node {node_name(node)}: resource {resource}: its amount is the number of "
            "devices, and must be 1 or more"
        )
    return Offer(name, 1 if name == HOST_CPU else amount, resource)


def _typed_offer(node: Mapping[str, Any], count: int) -> Offer:
    """An offer of the accelerators whose type Ray found."""
    resources, labels = node.get("Resources", {}), node.get("Labels", {})
    types = sorted(name for name in resources if name.startswith(_RAY_TYPE_RESOURCE))
    if types:
        text = types[0].removeprefix(_RAY_TYPE_RESOURCE)
        return Offer(_ray_kind_name(node, "accelerator type", text), count, types[0])
    text = labels.get(_RAY_TYPE_LABEL, "")
    return Offer(_ray_kind_name(node, "accelerator type", text), count, None)


def _ray_kind_name(node: Mapping[str, Any], what: str, text: str) -> str:
    name = _RAY_NAMES.get(text, text)
    if name == HOST_CPU or name in KINDS:
        return name
    raise InputError(
        f"Ray node {node_name(node)}: {what}: {text!r} is of no known device kind; start the node "
        f"with --labels {_MARK}=<kind>. Known: {', '.join((HOST_CPU, *KINDS))}"
    )


def node_name(node: Mapping[str, Any]) -> str:
    """What a node is called in messages, quoted.

    Args:
        node: one of what ``ray.nodes()`` returns.
    """
    for field in ("NodeName", "NodeManagerHostname", "NodeManagerAddress", "NodeID"):
        if node.get(field):
            return repr(node[field])
    return "without a name"


def subcluster_names(offers: Sequence[Offer]) -> list[str]:
    """The name of the kind; from the second subcluster of a kind on, with its number.

    Args:
        offers: what the nodes of each subcluster offer.

    Returns:
        A name for each.
    """
    seen: Counter[str] = Counter()
    names = []
    for offer in offers:
        seen[offer.kind] += 1
        names.append(offer.kind if seen[offer.kind] == 1 else f"{offer.kind}-{seen[offer.kind]}")
    return names
