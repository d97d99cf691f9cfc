"""Tables for the terminal: cluster, stages of a plan, predicted beside measured, links."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hetjax.mesh.cluster import Cluster
from hetjax.mesh.kinds import DeviceKind
from hetjax.mesh.links import Link
from hetjax.mesh.quantities import format_bytes, format_rate, format_seconds

if TYPE_CHECKING:
    from rich.table import Table


@dataclass(frozen=True)
class StageRow:
    """One stage of a plan, as the plan's table shows it.

    Args:
        stage: index of the stage, from 0.
        layers: which layers it holds, e.g. ``"0-7"``.
        submesh: where it lives, e.g. ``"fast[0:4] 1x4"``.
        sharding: how its tensors are sharded there, e.g. ``"data 4"``.
        warm_up: its warm-up count N_i.
        compute_seconds: t_i, forward plus backward of one microbatch.
        communication_seconds: c_i, one transfer to the next stage; 0 for the last stage.
        memory_bytes: bytes that one device of it needs.
        memory_limit_bytes: bytes that one device of it has.
    """

    stage: int
    layers: str
    submesh: str
    sharding: str
    warm_up: int
    compute_seconds: float
    communication_seconds: float
    memory_bytes: int
    memory_limit_bytes: int


@dataclass(frozen=True)
class PredictionRow:
    """One figure that was predicted and then measured, in seconds.

    Args:
        name: what it is, e.g. ``"step time"``.
        predicted: what the plan said.
        measured: what the run took.
    """

    name: str
    predicted: float
    measured: float


@dataclass(frozen=True)
class LinkRow:
    """What one direction of the link between two stages did in a step, by one carrier.

    Args:
        name: which, e.g. ``"stage 0 to 1"``.
        num_bytes: the bytes that crossed.
        transfers: in how many transfers.
        rate: bytes/s while something was under way.
        bandwidth: bytes/s that the cluster says it has.
        busy: the share of the step, from 0 to 1, in which something was under way.
        wait_seconds: how long the receiving stage waited for it.
        carrier: what took it, e.g. ``"wire"``.
    """

    name: str
    num_bytes: int
    transfers: int
    rate: float
    bandwidth: float
    busy: float
    wait_seconds: float
    carrier: str


def cluster_table(cluster: Cluster, dtype: str = "float32") -> Table:
    """A cluster: one row a subcluster, the links between them below.

    Speed, memory and memory bandwidth are those of one device; a link is shown by its bandwidth
    and its latency. Below the peak stands the share of it that matrix products are taken to reach,
    and whether that is assumed or has a source.

    Args:
        cluster: the cluster.
        dtype: the dtype whose peak rate is shown.

    Returns:
        A table for rich to print.
    """
    from rich.text import Text

    table = empty_table(f"Cluster {cluster.name}", left=("subcluster", "kind"))
    peak = f"{dtype} peak,\nproducts reach"
    for heading in ("nodes x\ndevices", peak, "memory", "in a\nnode", "between\nnodes"):
        table.add_column(heading, justify="right")
    for subcluster in cluster.subclusters:
        kind = subcluster.kind
        table.add_row(
            Text(subcluster.name),
            Text(kind.name),
            f"{subcluster.nodes} x {subcluster.devices_per_node}",
            f"{format_rate(kind.flops(dtype), 'FLOP/s')}\n{format_efficiency(kind, dtype)}",
            f"{format_bytes(kind.memory_bytes)}\n{format_rate(kind.memory_bandwidth, 'B/s')}",
            _format_link(subcluster.intra_node, "\n") if subcluster.devices_per_node > 1 else "",
            _format_link(subcluster.inter_node, "\n") if subcluster.nodes > 1 else "",
        )
    links = (f"{a} to {b}: {_format_link(link, ', ')}" for a, b, link in cluster.links)
    table.caption = Text("\n".join(links)) if cluster.links else None
    return table


def stage_table(
    rows: Sequence[StageRow],
    *,
    title: str = "Plan",
    predicted_step_time: float,
    lower_bound: float,
    bubble: float,
) -> Table:
    """The stages of a plan, with what is predicted of the whole below.

    Args:
        rows: one a stage, in the order of the pipeline.
        title: what stands above the table.
        predicted_step_time: seconds of one training step.
        lower_bound: seconds that no schedule of these stages beats.
        bubble: fraction of the stages' time that is idle, from 0 to 1.

    Returns:
        A table for rich to print.
    """
    from rich.text import Text

    table = empty_table(title, left=("stage", "layers", "submesh", "sharding"))
    for heading in ("warm-up\nN_i", "compute\nt_i", "to next\nc_i", "memory per\ndevice"):
        table.add_column(heading, justify="right")
    for row in rows:
        table.add_row(
            str(row.stage),
            Text(row.layers),
            Text(row.submesh),
            Text(row.sharding),
            str(row.warm_up),
            format_seconds(row.compute_seconds),
            format_seconds(row.communication_seconds) if row.communication_seconds else "",
            f"{format_bytes(row.memory_bytes)} of\n{format_bytes(row.memory_limit_bytes)}",
        )
    table.caption = (
        f"predicted step time {format_seconds(predicted_step_time)}, "
        f"{predicted_step_time / lower_bound:.2f} times the lower bound of "
        f"{format_seconds(lower_bound)}, bubble {bubble:.0%}"
    )
    return table


def prediction_table(rows: Sequence[PredictionRow], title: str = "Predicted and measured") -> Table:
    """Predicted beside measured, and measured over predicted.

    Args:
        rows: the figures, in the order to show them.
        title: what stands above the table.

    Returns:
        A table for rich to print.
    """
    from rich.text import Text

    table = empty_table(title, left=("",))
    for heading in ("predicted", "measured", "measured / predicted"):
        table.add_column(heading, justify="right")
    for row in rows:
        ratio = f"{row.measured / row.predicted:.2f}" if row.predicted else ""
        predicted = format_seconds(row.predicted) if row.predicted else ""
        table.add_row(Text(row.name), predicted, format_seconds(row.measured), ratio)
    return table


def link_table(rows: Sequence[LinkRow], title: str = "Links, in a step") -> Table:
    """What the links between stages carried and by what, how fast, and who waited for it.

    Args:
        rows: one for each direction that was used, and each carrier there.
        title: what stands above the table.

    Returns:
        A table for rich to print.

    Example:
        >>> row = LinkRow("stage 0 to 1", 8_000_000, 16, 23e6, 25e6, 0.9, 0.01, "wire")
        >>> link_table([row]).row_count
        1
    """
    from rich.text import Text

    table = empty_table(title, left=("", "carrier"))
    for heading in ("bytes", "transfers", "rate", "in use", "waited for"):
        table.add_column(heading, justify="right")
    for row in rows:
        table.add_row(
            Text(row.name),
            row.carrier,
            format_bytes(row.num_bytes),
            str(row.transfers),
            f"{format_rate(row.rate, 'B/s')} of\n{format_rate(row.bandwidth, 'B/s')}",
            f"{row.busy:.0%}",
            format_seconds(row.wait_seconds),
        )
    return table


def empty_table(title: str, left: Sequence[str]) -> Table:
    """An empty table in the style that all have.

    Names that people give reach rich as `Text`: a string could hold what it takes for markup.

    Args:
        title: what stands above the table.
        left: headings of the left-aligned columns to start with.

    Returns:
        A table for rich to print.
    """
    from rich import box
    from rich.table import Table
    from rich.text import Text

    return Table(
        *left,
        title=Text(title),
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        show_edge=False,
        title_justify="left",
        title_style="bold",
        caption_justify="left",
        caption_style="",
    )


def format_efficiency(kind: DeviceKind, dtype: str) -> str:
    """The share of its peak that a kind's matrix products are taken to reach, and how it is known.

    Args:
        kind: the kind.
        dtype: the dtype.

    Returns:
        The share, and ``"assumed"``, or ``"sourced"`` where `DeviceKind.product_source` says who
        measured it.

    Example:
        >>> from hetjax.mesh import kind
        >>> [format_efficiency(kind(name), "float16") for name in ("RTX3080", "H100")]
        ['70%, assumed', '64%, sourced']
    """
    known = "assumed" if kind.assumes_efficiency(dtype) else "sourced"
    return f"{kind.product_efficiency(dtype):.0%}, {known}"


def _format_link(link: Link, between: str) -> str:
    return f"{format_rate(link.bandwidth, 'B/s')}{between}{format_seconds(link.latency)}"
