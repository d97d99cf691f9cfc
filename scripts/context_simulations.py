"""The clusters and models of HexiSeq's simulations (section 5.3).

The paper gives kinds, counts and bandwidths; the cluster files say what is assumed besides. Its
models are named by their parameters alone: 13B is GPT's usual shape, 70B that of Llama 2, whose
heads of keys and values are grouped (its own model knows no groups). How near devices come to their
peaks is not published either: half on all kinds is assumed, so that only published figures make
them unlike.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from hetjax.mesh import Cluster
from hetjax.planner.hexiseq.context_model import ContextModel
from hetjax.planner.hexiseq.paper_model import PaperModel

MODELS: Mapping[str, Mapping[str, Any]] = {
    "13B": {"width": 5120, "layers": 40, "query_heads": 40, "vocabulary": 50257},
    "70B": {
        "width": 8192,
        "layers": 80,
        "query_heads": 64,
        "key_value_heads": 8,
        "hidden": 28672,
        "is_gated": True,
        "vocabulary": 32000,
    },
}

LENGTHS = (2**16, 2**17, 2**18, 2**19, 2**20)

SEQUENCES = 8
"""The paper's global batch (section 5.1)."""

EFFICIENCY = 0.5

COSTS = {"paper": PaperModel, "ours": ContextModel}
"""The cost models."""

_FOLDER = Path(__file__).resolve().parents[1] / "configs" / "papers" / "hexiseq"


def simulated(number: int, times: int = 1) -> Cluster:
    """The cluster of a simulation, with so many times as many nodes."""
    cluster = Cluster.from_file(_FOLDER / f"simulation{number}.yaml")
    parts = tuple(replace(part, nodes=times * part.nodes) for part in cluster.subclusters)
    return replace(cluster, subclusters=parts)
