"""Tables show every figure, and names as they are."""

import io

from rich.console import Console

from hetjax.mesh.cluster import Cluster
from hetjax.mesh.kinds import DeviceKind
from hetjax.mesh.links import Link
from hetjax.mesh.published_kinds import kind
from hetjax.mesh.subcluster import Subcluster
from hetjax.report.carrier_table import CarrierRow, carrier_table
from hetjax.report.tables import (
    LinkRow,
    PredictionRow,
    StageRow,
    cluster_table,
    link_table,
    prediction_table,
    stage_table,
)


def rendered(table) -> str:
    output = io.StringIO()
    Console(file=output, width=80).print(table)
    return output.getvalue()


def test_cluster_table():
    card = DeviceKind("card", {"float32": 10e12, "bfloat16": 80e12}, 24 * 10**9, 1e12, "a test")
    local, slow = Link(10e9, 1e-6), Link(25e6, 5e-4)
    cluster = Cluster(
        "home",
        (
            Subcluster("fast[bold]", card, 2, 4, local, slow),
            Subcluster("b", card, 1, 1, slow, slow),
        ),
        (("fast[bold]", "b", slow),),
    )
    text = rendered(cluster_table(cluster, dtype="bfloat16"))
    for part in ("Cluster home", "fast[bold]", "2 x 4", "80 TFLOP/s", "24 GB", "1 TB/s", "10 GB/s"):
        assert part in text
    assert text.count("70%, assumed") == 2
    assert "fast[bold] to b: 25 MB/s, 500 us" in text
    assert text.count("25 MB/s") == 2, "a link that joins nothing is not shown"


def test_cluster_table_says_what_of_a_kind_has_a_source():
    link = Link(10e9, 1e-6)
    cluster = Cluster("c", (Subcluster("s", kind("MI300X"), 1, 8, link, link),), ())
    assert "41%, sourced" in rendered(cluster_table(cluster, dtype="bfloat16"))


def test_stage_table():
    rows = [
        StageRow(0, "0-7", "fast[0:4] 1x4", "data 4", 5, 0.0213, 0.011, 12 * 10**9, 40 * 10**9),
        StageRow(1, "8-11", "slow[0:2] 1x2", "data 2", 1, 0.0193, 0.0, 2 * 10**9, 16 * 10**9),
    ]
    table = stage_table(rows, predicted_step_time=0.345, lower_bound=0.301, bubble=0.123)
    text = rendered(table)
    for part in ("fast[0:4] 1x4", "8-11", "data 2", "21.3 ms", "11 ms", "12 GB of", "40 GB"):
        assert part in text
    assert "predicted step time 345 ms, 1.15 times the lower bound of 301 ms, bubble 12%" in text


def test_link_table():
    rows = [LinkRow("stage 0 to 1", 8 * 10**6, 16, 23.9e6, 25e6, 0.931, 0.0042, "wire")]
    text = rendered(link_table(rows))
    for part in ("stage 0 to 1", "8 MB", "16", "23.9 MB/s of", "25 MB/s", "93%", "4.2 ms", "wire"):
        assert part in text


def test_carrier_table():
    rows = [
        CarrierRow("fast and slow", "wire", {4096: 1e-4, 2**20: 1e-3}, [(0.0, 1.7e6)]),
        CarrierRow("fast and slow", "host", {4096: 2.5e-3}, [(1.7e6, 4e6), (5e6, None)]),
        CarrierRow("fast", "wire", {4096: 1e-4}, [(0.0, None)]),
        CarrierRow("fast", "host", {4096: 2.5e-3}, []),
    ]
    head, _, *lines = rendered(carrier_table(rows)).strip().splitlines()[-6:]
    assert all(part in head for part in ("4.1 kB", "1.05 MB", "takes messages"))
    for line, parts in zip(
        lines,
        (
            ("fast and slow", "wire", "100 us", "1 ms", "up to 1.7 MB"),
            ("host", "2.5 ms", "from 1.7 MB, up to 4 MB; from 5 MB"),
            ("fast", "wire", "all"),
            ("host", "none"),
        ),
        strict=True,
    ):
        assert all(part in line for part in parts), line


def test_prediction_table():
    text = rendered(
        prediction_table([PredictionRow("step time", 0.2, 0.25), PredictionRow("update", 0.0, 0.1)])
    )
    assert "1.25" in text
    assert "100 ms" in text
