"""Asking the planner: a model on a cluster that is put together in a line, and its answer."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from hetjax.commands.figures import cost_figures
from hetjax.commands.prepare import Prepared, prepare
from hetjax.commands.words import batches
from hetjax.configuration import read_configuration
from hetjax.configuration.make import make_ingredients
from hetjax.mesh import Cluster
from hetjax.planner import Plan

NEAR = {"bandwidth": "25 GB/s", "latency": "10 us"}
"""Within a node."""


class Part(NamedTuple):
    """A subcluster: its kind, nodes, devices of a node, and in what these differ from the kind.

    Args:
        kind: the kind.
        nodes: how many nodes.
        devices: of a node.
        price: of a device's hour.
        speed: over the kind's.
        memory: of a device; None for the kind's.
    """

    kind: str
    nodes: int
    devices: int
    price: float | None = None
    speed: float = 1.0
    memory: str | None = None

    @property
    def name(self) -> str:
        """What the cluster file calls it."""
        slow = "" if self.speed == 1 else "_slow"
        of = "" if self.memory is None else f"_{self.memory.lower().replace(' ', '_')}"
        return self.kind.lower().replace("-", "_") + slow + of

    def kind_in_file(self) -> tuple[str, dict[str, Any] | None]:
        """The kind's name in the cluster file, and what that says of one of its own."""
        if self.speed == 1 and self.memory is None:
            return self.kind, None
        own: dict[str, Any] = {"like": self.kind, "speed": self.speed}
        if self.memory is not None:
            own["memory"] = self.memory
        slow = "" if self.speed == 1 else f" at {self.speed:g}"
        of = "" if self.memory is None else f" of {self.memory}"
        return f"{self.kind}{slow}{of}", own


@dataclass(frozen=True)
class Asked:
    """What is put to the planner.

    Args:
        parts: the subclusters.
        network: what links nodes, and subclusters.
        settings: gin settings.
    """

    parts: tuple[Part, ...]
    network: str
    settings: tuple[str, ...]

    def cluster(self) -> dict[str, Any]:
        """The content of the cluster file."""
        far = {"bandwidth": self.network, "latency": "50 us"}
        names = [part.name for part in self.parts]
        kinds = {name: own for name, own in map(Part.kind_in_file, self.parts) if own}
        return {
            "name": "asked",
            "kinds": kinds,
            "subclusters": [_subcluster(part, far) for part in self.parts],
            "links": [{"between": [a, b], **far} for i, a in enumerate(names) for b in names[:i]],
        }

    def prepared(self) -> Prepared:
        """The answer, by what ``python -m hetjax.plan`` does.

        Raises:
            InputError: the model fits nowhere.
        """
        with tempfile.TemporaryDirectory() as folder:
            configuration = read_configuration(self.written(Path(folder)))
            cluster = Cluster.from_file(Path(folder) / "cluster.yaml")
            return prepare(make_ingredients(configuration), cluster)

    def written(self, folder: Path) -> Path:
        """The file of the configuration, beside that of the cluster, in a folder."""
        (folder / "cluster.yaml").write_text(yaml.safe_dump(self.cluster()))
        lines = ("cluster.file = 'cluster.yaml'", *self.settings)
        (folder / "asked.gin").write_text("\n".join(lines) + "\n")
        return folder / "asked.gin"


def _subcluster(part: Part, far: dict[str, str]) -> dict[str, Any]:
    kind, _ = part.kind_in_file()
    return {
        "name": part.name,
        "kind": kind,
        "nodes": part.nodes,
        "devices_per_node": part.devices,
        "intra_node": NEAR,
        "inter_node": far,
        **({} if part.price is None else {"price_per_device_hour": part.price}),
    }


def step_time(prepared: Prepared) -> float:
    """Predicted seconds of a step."""
    return prepared.plan.predicted.step_time


def cost_per_step(prepared: Prepared) -> float:
    """Price of a step, in the currency of the cluster file."""
    return cost_figures(prepared)["cost_per_step"]


def in_words(plan: Plan) -> str:
    """Which layers are where, and how many microbatches there are."""
    stages = [_stage_words(plan, s) for s in range(len(plan.stages))]
    return f"{_runs(stages)}; {batches(plan)}"


def _stage_words(plan: Plan, stage: int) -> str:
    each = plan.stages[stage]
    again = ", recomputed" if each.recompute else ""
    batch = each.shares.batch
    shared = f", {' + '.join(map(str, batch))} examples" if batch else ""
    return f"{each.layers[1] - each.layers[0]} layers on {each.devices_text}{shared}{again}"


def _runs(stages: Sequence[str], most: int = 8) -> str:
    shown = ", ".join(stages[:most])
    return shown if len(stages) <= most else f"{shown}, and {len(stages) - most} stages more"
