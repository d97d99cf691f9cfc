"""Tables of layers by structure, and of parts of a cluster."""

import io

from rich.console import Console

from hetjax.commands.figures import parts_figures
from hetjax.mesh.cluster import Cluster
from hetjax.mesh.kinds import DeviceKind
from hetjax.mesh.links import Link
from hetjax.mesh.subcluster import Subcluster
from hetjax.pipeline.layers.modules import Section
from hetjax.pipeline.layers.structural_layers import LayeredSection
from hetjax.planner.harp.mixing import PartAlone
from hetjax.report import LayerRow, layer_rows, layer_table, parts_table


def rendered(table) -> str:
    output = io.StringIO()
    Console(file=output, width=80).print(table)
    return output.getvalue()


def test_a_module_has_one_row_and_what_stands_between_its_own():
    sections = [
        LayeredSection(Section(0, 2), (0,), 10.0, 0.0),
        *(LayeredSection(Section(i, i + 4, 0), (i, i + 2), 100.0, 64.0) for i in (2, 6, 10)),
        LayeredSection(Section(14, 15), (), 1.0, 32.0),
    ]
    assert layer_rows(sections) == [
        LayerRow("", 1, 1, 10.0, 0.0),
        LayerRow("A", 3, 2, 100.0, 64.0),
        LayerRow("", 1, 0, 1.0, 32.0),
    ]
    text = rendered(layer_table(layer_rows(sections), 7))
    for part in ("Layers by structure: 7", "(between)", "100 FLOP", "64 B", "neighbour"):
        assert part in text


def test_parts_beside_the_whole():
    kind, link = DeviceKind("card", {"float32": 1e12}, 10**9, 1e11, "a test"), Link(1e9, 1e-5)
    subclusters = tuple(Subcluster(name, kind, 1, 2, link, link) for name in ("new[1]", "old"))
    cluster = Cluster("home", subclusters, (("new[1]", "old", link),))
    alone = (PartAlone(("new[1]",), 2, 1.5), PartAlone(("old",), 2, None))
    text = rendered(parts_table(alone, cluster, 1.2))
    for part in ("all 4", "1.2 s", "new[1] (2)", "1.25 times", "does not fit"):
        assert part in text
    assert "side by side" not in text
    one = (PartAlone(("new[1]",), 2, 1.5, "card"), PartAlone(("old",), 2, None, "slow card"))
    assert "side by side" not in rendered(parts_table(one, cluster, 1.5))
    assert parts_figures(one, 1.5)["hetero_speedup_ratio"] is None
    both = (PartAlone(("new[1]",), 2, 3.0, "card"), PartAlone(("old",), 2, 6.0, "slow card"))
    assert "each kind by itself, side by side" in rendered(parts_table(both, cluster, 1.25))
    assert "1.60 times" in rendered(parts_table(both, cluster, 1.25))
    assert "of all 4 the 3 used" in rendered(parts_table(alone, cluster, 1.2, used=3))
