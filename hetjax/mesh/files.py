"""Cluster files: YAML that people write, checked field by field, read into a `Cluster`.

    name: home laboratory
    kinds:                          # optional: kinds of one's own
      tired: {like: RTX3080, speed: 0.8, memory: 9 GB}
    subclusters:
      - name: new
        kind: RTX4090
        nodes: 2
        devices_per_node: 2
        intra_node: {bandwidth: 25 GB/s, latency: 10 us}
        inter_node: {bandwidth: 10 Gbit/s, latency: 50 us}
      - name: old
        kind: tired
        nodes: 1
        devices_per_node: 2
        intra_node: {bandwidth: 25 GB/s, latency: 10 us}
        price_per_device_hour: 0.2  # optional; in any currency, the same for all
        max_tensor_parallelism: 2  # optional; devices of a tensor axis, at most
        network_cards: 2  # optional; cards of a node, each of as many devices; or their devices
        host_memory: 64 GB          # optional; of a node, for what is offloaded
        host_link: {bandwidth: 12 GB/s, latency: 10 us}  # optional; from a device to it
    links:                          # one for every pair of subclusters, or a default_link
      - {between: [new, old], bandwidth: 10 Gbit/s, latency: 50 us}

Plain numbers are bytes, seconds, FLOP/s and bytes/s. A kind is defined whole (``peak_flops``,
``memory``, ``memory_bandwidth``, ``source``, ``platform``) or ``like`` another, with ``speed`` as a
factor on its FLOP/s and memory bandwidth. Either may say ``product_shares``, by dtype the share of
the peak that a matrix product of the best shape was measured to reach, and ``product_source``. The
kind ``host-cpu`` is this host's processor, measured, and shared evenly by all host devices of the
file. `Cluster.to_json_dict` writes the same layout.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, cast

import pydantic

from hetjax.checked_files import Record, first_problem
from hetjax.errors import InputError, shown, unknown_name
from hetjax.limits import (
    MAX_DEVICES_PER_NODE,
    MAX_NODES,
    MAX_QUANTITY,
    MAX_SUBCLUSTERS,
    MIN_QUANTITY,
    Name,
    Text,
)
from hetjax.mesh import units
from hetjax.mesh.host_cpu import HOST_CPU, measure_host_cpu
from hetjax.mesh.kinds import DeviceKind
from hetjax.mesh.links import Link
from hetjax.mesh.published_kinds import KINDS
from hetjax.mesh.published_kinds import kind as known_kind
from hetjax.mesh.subcluster import Links, Subcluster, cards_in_turn


def _quantity(
    allowed: Mapping[str, float], *, allow_zero: bool = False
) -> pydantic.BeforeValidator:
    def quantity(value: object) -> float:
        found = units.parse_quantity(value, allowed, allow_zero=allow_zero)
        least = 0.0 if allow_zero else MIN_QUANTITY
        if not least <= found <= MAX_QUANTITY:
            raise ValueError(
                f"{found:.3g} is not allowed; it must be from {least:g} to {MAX_QUANTITY:g}"
            )
        return found

    return pydantic.BeforeValidator(quantity)


_Bandwidth = Annotated[float, _quantity(units.BYTES_PER_SECOND)]
_Latency = Annotated[float, _quantity(units.SECONDS, allow_zero=True)]
_Memory = Annotated[float, _quantity(units.BYTES)]
_Flops = Annotated[float, _quantity(units.FLOPS_PER_SECOND)]
_Positive = Annotated[float, pydantic.Field(gt=0)]
_Load = Annotated[float, pydantic.Field(ge=0)]
_Devices = Annotated[int, pydantic.Field(ge=1, le=MAX_DEVICES_PER_NODE)]


def _cards(value: object) -> int | list[list[int]]:
    """A number of network cards, or the devices of each."""
    is_number = type(value) is int and 1 <= value <= MAX_DEVICES_PER_NODE
    is_list = isinstance(value, list) and all(
        isinstance(devices, list) and all(type(device) is int for device in devices)
        for devices in value
    )
    if is_number or is_list:
        return cast("int | list[list[int]]", value)
    raise ValueError(
        f"{shown(value)} is not allowed: it must be a number of cards, from 1 to "
        f"{MAX_DEVICES_PER_NODE}, or for each card the list of its devices"
    )


_Cards = Annotated[Any, pydantic.PlainValidator(_cards)]


class _LinkRecord(Record):
    bandwidth: _Bandwidth
    latency: _Latency

    def link(self) -> Link:
        return Link(self.bandwidth, self.latency)


class _PairRecord(_LinkRecord):
    between: Annotated[list[Name], pydantic.Field(min_length=2, max_length=2)]


class _KindRecord(Record):
    like: Text | None = None
    speed: _Positive | None = None
    peak_flops: dict[Name, _Flops] | None = None
    memory: _Memory | None = None
    memory_bandwidth: _Bandwidth | None = None
    source: Text | None = None
    platform: Text | None = None
    product_shares: dict[Name, _Positive] | None = None
    product_source: Text | None = None


class _SubclusterRecord(Record):
    name: Name
    kind: Text
    nodes: Annotated[int, pydantic.Field(ge=1, le=MAX_NODES)]
    devices_per_node: Annotated[int, pydantic.Field(ge=1, le=MAX_DEVICES_PER_NODE)]
    intra_node: _LinkRecord
    inter_node: _LinkRecord | None = None
    ray_resource: Text | None = None
    price_per_device_hour: _Positive | None = None
    transfer_load: _Load = 0.0
    message_load: _Load = 0.0
    max_tensor_parallelism: _Devices | None = None
    host_memory: _Memory | None = None
    host_link: _LinkRecord | None = None
    network_cards: _Cards | None = None


class ClusterRecord(Record):
    """A cluster file, field by field."""

    name: Text
    kinds: dict[Name, _KindRecord] = pydantic.Field(default={})
    subclusters: Annotated[
        list[_SubclusterRecord], pydantic.Field(min_length=1, max_length=MAX_SUBCLUSTERS)
    ]
    links: list[_PairRecord] = pydantic.Field(default=[])
    default_link: _LinkRecord | None = None


def checked_record(content: object) -> ClusterRecord:
    """Checks the fields of a cluster file's content, each by itself.

    Args:
        content: dicts, lists, texts and numbers, as YAML or JSON give them.

    Returns:
        The content as it is in the file.

    Raises:
        InputError: a field is missing, unknown or wrong; the message names the field, its value and
            what is allowed.
    """
    try:
        return ClusterRecord.model_validate(content)
    except pydantic.ValidationError as error:
        raise InputError(first_problem(error, ClusterRecord)) from None


def subclusters_of(record: ClusterRecord) -> tuple[Subcluster, ...]:
    """The subclusters that a file tells of, with the figures of their kinds.

    Args:
        record: the content of the file.

    Raises:
        InputError: a kind is unknown or defined in part, or a link between nodes is missing.
    """
    for name, own in record.kinds.items():
        _check_kind(f"kinds.{name}", own)
    kinds = _build_kinds(record)
    return tuple(
        _build_subcluster(f"subclusters[{index}]", sub, kinds[sub.kind])
        for index, sub in enumerate(record.subclusters)
    )


def links_of(record: ClusterRecord) -> Links:
    """The links that a file gives, then the default link for the pairs that have none.

    Args:
        record: the content of the file.
    """
    links = [(pair.between[0], pair.between[1], pair.link()) for pair in record.links]
    linked = {frozenset((a, b)) for a, b, _ in links}
    if record.default_link is not None:
        for a, b in itertools.combinations([sub.name for sub in record.subclusters], 2):
            if a != b and frozenset((a, b)) not in linked:
                links.append((a, b, record.default_link.link()))
    return tuple(links)


def content_of(name: str, subclusters: Sequence[Subcluster], links: Links) -> dict[str, Any]:
    """What a file that tells of a cluster holds, in SI units.

    Args:
        name: the cluster's name.
        subclusters: its subclusters.
        links: the links between them.

    Returns:
        Dicts, lists, texts and numbers only, its kinds defined whole.
    """
    return {
        "name": name,
        "kinds": {s.kind.name: _kind_to_json(s.kind) for s in subclusters},
        "subclusters": [_subcluster_to_json(s) for s in subclusters],
        "links": [{"between": [a, b], **_link_to_json(link)} for a, b, link in links],
    }


def _build_subcluster(field: str, record: _SubclusterRecord, kind: DeviceKind) -> Subcluster:
    if record.inter_node is None and record.nodes > 1:
        raise InputError(f"{field}.inter_node: it is missing, and {record.nodes} nodes need one")
    return Subcluster(
        name=record.name,
        kind=kind,
        nodes=record.nodes,
        devices_per_node=record.devices_per_node,
        intra_node=record.intra_node.link(),
        inter_node=(record.inter_node or record.intra_node).link(),
        ray_resource=record.ray_resource,
        price_per_device_hour=record.price_per_device_hour,
        transfer_load=record.transfer_load,
        message_load=record.message_load,
        max_tensor_parallelism=record.max_tensor_parallelism,
        network_cards=_build_cards(field, record),
        host_memory_bytes=None if record.host_memory is None else round(record.host_memory),
        host_link=None if record.host_link is None else record.host_link.link(),
    )


def _build_cards(field: str, record: _SubclusterRecord) -> tuple[tuple[int, ...], ...]:
    """The devices of each network card of a node; nothing where no card is told of."""
    cards = record.network_cards
    if cards is None:
        return ()
    if isinstance(cards, list):
        return tuple(tuple(devices) for devices in cards)
    if cards > record.devices_per_node:
        raise InputError(
            f"{field}.network_cards: {cards} is not allowed: a node has "
            f"{record.devices_per_node} device(s), and a card serves one or more"
        )
    return cards_in_turn(cards, record.devices_per_node)


def _check_kind(field: str, own: _KindRecord) -> None:
    """Checks that a kind is defined in one of the two ways, and that what it is like is known."""
    if own.like is None:
        missing = [f for f in ("peak_flops", "memory", "memory_bandwidth") if not getattr(own, f)]
        if missing:
            raise InputError(
                f"{field}.{missing[0]}: it is missing: a kind is defined whole, or 'like' another"
            )
        if own.speed is not None:
            raise InputError(f"{field}.speed: {own.speed} is of no use without 'like'")
        return
    for f in ("peak_flops", "memory_bandwidth", "platform"):
        if getattr(own, f) is not None:
            raise InputError(f"{field}.{f}: it is not allowed beside 'like'; use 'speed'")
    if own.like != HOST_CPU and own.like not in KINDS:
        allowed = (HOST_CPU, *KINDS)
        raise InputError(f"{field}.like: {unknown_name('device kind', own.like, allowed)}")


def _build_kinds(record: ClusterRecord) -> dict[str, DeviceKind]:
    """The kinds that the subclusters use, by name; a kind of the file's own goes before ours."""
    origins = {name: own.like for name, own in record.kinds.items()}
    for index, sub in enumerate(record.subclusters):
        known = (HOST_CPU, *KINDS, *record.kinds)
        if sub.kind not in known:
            message = unknown_name("device kind", sub.kind, known)
            raise InputError(f"subclusters[{index}].kind: {message}")
    num_host_devices = sum(
        sub.nodes * sub.devices_per_node
        for sub in record.subclusters
        if origins.get(sub.kind, sub.kind) == HOST_CPU
    )

    def base(name: str) -> DeviceKind:
        return measure_host_cpu(num_host_devices) if name == HOST_CPU else known_kind(name)

    def build(name: str) -> DeviceKind:
        own = record.kinds.get(name)
        if own is None:
            return base(name)
        return _whole_kind(name, own) if own.like is None else _like(name, own, base(own.like))

    return {sub.kind: build(sub.kind) for sub in record.subclusters}


def _whole_kind(name: str, own: _KindRecord) -> DeviceKind:
    assert own.peak_flops
    assert own.memory
    assert own.memory_bandwidth
    source = "the cluster file" if own.source is None else own.source
    return DeviceKind(
        name=name,
        peak_flops=own.peak_flops,
        memory_bytes=round(own.memory),
        memory_bandwidth=own.memory_bandwidth,
        source=source,
        platform=own.platform or "gpu",
        product_shares=own.product_shares or {},
        product_source=own.product_source or "",
    )


def _like(name: str, own: _KindRecord, base: DeviceKind) -> DeviceKind:
    speed = 1.0 if own.speed is None else own.speed
    return DeviceKind(
        name=name,
        peak_flops={dtype: speed * rate for dtype, rate in base.peak_flops.items()},
        memory_bytes=base.memory_bytes if own.memory is None else round(own.memory),
        memory_bandwidth=speed * base.memory_bandwidth,
        source=own.source or f"the cluster file: {speed:g} x {base.name} ({base.source})",
        platform=base.platform,
        product_shares=own.product_shares or base.product_shares,
        product_source=own.product_source or ("" if own.product_shares else base.product_source),
    )


def _link_to_json(link: Link) -> dict[str, Any]:
    return {"bandwidth": link.bandwidth, "latency": link.latency}


def _kind_to_json(kind: DeviceKind) -> dict[str, Any]:
    return {
        "peak_flops": dict(kind.peak_flops),
        "memory": kind.memory_bytes,
        "memory_bandwidth": kind.memory_bandwidth,
        "source": kind.source,
        "platform": kind.platform,
        **({"product_shares": dict(kind.product_shares)} if kind.product_shares else {}),
        **({"product_source": kind.product_source} if kind.product_source else {}),
    }


def _subcluster_to_json(subcluster: Subcluster) -> dict[str, Any]:
    price, host_link = subcluster.price_per_device_hour, subcluster.host_link
    host_memory = subcluster.host_memory_bytes
    return {
        "name": subcluster.name,
        "kind": subcluster.kind.name,
        "nodes": subcluster.nodes,
        "devices_per_node": subcluster.devices_per_node,
        "intra_node": _link_to_json(subcluster.intra_node),
        "inter_node": _link_to_json(subcluster.inter_node),
        "ray_resource": subcluster.ray_resource,
        **({} if price is None else {"price_per_device_hour": price}),
        **{
            field: load
            for field in ("transfer_load", "message_load")
            if (load := getattr(subcluster, field))
        },
        **_limits_to_json(subcluster),
        **({} if host_memory is None else {"host_memory": host_memory}),
        **({} if host_link is None else {"host_link": _link_to_json(host_link)}),
    }


def _limits_to_json(subcluster: Subcluster) -> dict[str, Any]:
    """What a file says of tensor parallelism and network cards; nothing where nothing is said."""
    widest, cards = subcluster.max_tensor_parallelism, subcluster.network_cards
    return {
        **({} if widest is None else {"max_tensor_parallelism": widest}),
        **({"network_cards": [list(devices) for devices in cards]} if cards else {}),
    }
