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
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import pydantic

from hetjax.checked_files import Record, first_problem, read_yaml
from hetjax.errors import InputError, unknown_name
from hetjax.limits import MAX_DEVICES_PER_NODE, MAX_NODES, MAX_SUBCLUSTERS, Name, Text
from hetjax.mesh import units
from hetjax.mesh.cluster import Cluster, Subcluster
from hetjax.mesh.host_cpu import HOST_CPU, measure_host_cpu
from hetjax.mesh.kinds import KINDS, DeviceKind
from hetjax.mesh.kinds import kind as known_kind
from hetjax.mesh.links import Link


def _quantity(
    allowed: Mapping[str, float], *, allow_zero: bool = False
) -> pydantic.BeforeValidator:
    return pydantic.BeforeValidator(
        lambda value: units.parse_quantity(value, allowed, allow_zero=allow_zero)
    )


_Bandwidth = Annotated[float, _quantity(units.BYTES_PER_SECOND)]
_Latency = Annotated[float, _quantity(units.SECONDS, allow_zero=True)]
_Memory = Annotated[float, _quantity(units.BYTES)]
_Flops = Annotated[float, _quantity(units.FLOPS_PER_SECOND)]
_Positive = Annotated[float, pydantic.Field(gt=0)]
_Load = Annotated[float, pydantic.Field(ge=0)]


class _LinkEntry(Record):
    bandwidth: _Bandwidth
    latency: _Latency

    def link(self) -> Link:
        return Link(self.bandwidth, self.latency)


class _PairEntry(_LinkEntry):
    between: Annotated[list[Name], pydantic.Field(min_length=2, max_length=2)]


class _KindEntry(Record):
    like: Text | None = None
    speed: _Positive | None = None
    peak_flops: dict[Name, _Flops] | None = None
    memory: _Memory | None = None
    memory_bandwidth: _Bandwidth | None = None
    source: Text | None = None
    platform: Text | None = None
    product_shares: dict[Name, _Positive] | None = None
    product_source: Text | None = None


class _SubclusterEntry(Record):
    name: Name
    kind: Text
    nodes: Annotated[int, pydantic.Field(ge=1, le=MAX_NODES)]
    devices_per_node: Annotated[int, pydantic.Field(ge=1, le=MAX_DEVICES_PER_NODE)]
    intra_node: _LinkEntry
    inter_node: _LinkEntry | None = None
    ray_resource: Text | None = None
    price_per_device_hour: _Positive | None = None
    transfer_load: _Load = 0.0
    message_load: _Load = 0.0


class _ClusterEntry(Record):
    name: Text
    kinds: dict[Name, _KindEntry] = pydantic.Field(default={})
    subclusters: Annotated[
        list[_SubclusterEntry], pydantic.Field(min_length=1, max_length=MAX_SUBCLUSTERS)
    ]
    links: list[_PairEntry] = pydantic.Field(default=[])
    default_link: _LinkEntry | None = None


def read_cluster_file(path: str | Path) -> Cluster:
    """Reads a cluster file.

    JAX is not imported; the host is measured only where a subcluster is of the kind ``host-cpu``.

    Args:
        path: a YAML file in UTF-8; see the module for its layout.

    Returns:
        The cluster.

    Raises:
        InputError: there is no such file, it is not UTF-8 or not YAML, or a field is missing,
            unknown or wrong; the message names the file, the field, its value and what is allowed.
    """
    return cluster_from_content(read_yaml(path, "cluster file"), str(path))


def cluster_from_content(content: object, source: str) -> Cluster:
    """Makes a cluster from the content of a cluster file, or from `Cluster.to_json_dict`.

    Args:
        content: dicts, lists, texts and numbers, as YAML or JSON give them.
        source: what errors name as the place.

    Returns:
        The cluster.

    Raises:
        InputError: a field is missing, unknown or wrong.
    """
    try:
        return _build_cluster(_ClusterEntry.model_validate(content))
    except pydantic.ValidationError as error:
        raise InputError(f"{source}: {first_problem(error, _ClusterEntry)}") from None
    except InputError as error:
        raise InputError(f"{source}: {error}") from None


def _build_cluster(entry: _ClusterEntry) -> Cluster:
    for name, own in entry.kinds.items():
        _check_kind_entry(f"kinds.{name}", own)
    kinds = _build_kinds(entry)
    subclusters = tuple(
        _build_subcluster(f"subclusters[{index}]", sub, kinds[sub.kind])
        for index, sub in enumerate(entry.subclusters)
    )
    return Cluster(entry.name, subclusters, _build_links(entry))


def _build_subcluster(field: str, entry: _SubclusterEntry, kind: DeviceKind) -> Subcluster:
    if entry.inter_node is None and entry.nodes > 1:
        raise InputError(f"{field}.inter_node: it is missing, and {entry.nodes} nodes need one")
    return Subcluster(
        name=entry.name,
        kind=kind,
        nodes=entry.nodes,
        devices_per_node=entry.devices_per_node,
        intra_node=entry.intra_node.link(),
        inter_node=(entry.inter_node or entry.intra_node).link(),
        ray_resource=entry.ray_resource,
        price_per_device_hour=entry.price_per_device_hour,
        transfer_load=entry.transfer_load,
        message_load=entry.message_load,
    )


def _build_links(entry: _ClusterEntry) -> tuple[tuple[str, str, Link], ...]:
    """The links given, then the default link for the pairs that have none."""
    links = [(pair.between[0], pair.between[1], pair.link()) for pair in entry.links]
    linked = {frozenset((a, b)) for a, b, _ in links}
    if entry.default_link is not None:
        for a, b in itertools.combinations([sub.name for sub in entry.subclusters], 2):
            if a != b and frozenset((a, b)) not in linked:
                links.append((a, b, entry.default_link.link()))
    return tuple(links)


def _check_kind_entry(field: str, own: _KindEntry) -> None:
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


def _build_kinds(entry: _ClusterEntry) -> dict[str, DeviceKind]:
    """The kinds that the subclusters use, by name; a kind of the file's own goes before ours."""
    origins = {name: own.like for name, own in entry.kinds.items()}
    for index, sub in enumerate(entry.subclusters):
        known = (HOST_CPU, *KINDS, *entry.kinds)
        if sub.kind not in known:
            message = unknown_name("device kind", sub.kind, known)
            raise InputError(f"subclusters[{index}].kind: {message}")
    num_host_devices = sum(
        sub.nodes * sub.devices_per_node
        for sub in entry.subclusters
        if origins.get(sub.kind, sub.kind) == HOST_CPU
    )

    def base(name: str) -> DeviceKind:
        return measure_host_cpu(num_host_devices) if name == HOST_CPU else known_kind(name)

    def build(name: str) -> DeviceKind:
        own = entry.kinds.get(name)
        if own is None:
            return base(name)
        return _whole_kind(name, own) if own.like is None else _like(name, own, base(own.like))

    return {sub.kind: build(sub.kind) for sub in entry.subclusters}


def _whole_kind(name: str, own: _KindEntry) -> DeviceKind:
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


def _like(name: str, own: _KindEntry, base: DeviceKind) -> DeviceKind:
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
