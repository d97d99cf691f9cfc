"""A person's questions to the planner: the answer, what it is compared with, whether that holds.

Each question is a model on a cluster that people have. A plan holds where it is no slower than the
best part of its own cluster alone. By price nothing is judged: parts are told by time alone.

python scripts/check_questions.py
python scripts/check_questions.py --json
python scripts/check_questions.py --only "two PCs" --json
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml

ROUNDING = 1e-6
"""By what share figures that are the same may differ."""


class Part(NamedTuple):
    """A subcluster: its kind, nodes, devices of a node, and the price of a device's hour."""

    kind: str
    nodes: int
    devices: int
    price: float | None = None


class Question(NamedTuple):
    """A model on a cluster.

    Args:
        name: what people call it.
        parts: the subclusters.
        network: what links nodes, and subclusters.
        settings: gin settings.
    """

    name: str
    parts: tuple[Part, ...]
    network: str
    settings: tuple[str, ...]


def settings(recipe: str, batch: int, *more: str) -> tuple[str, ...]:
    """Settings of a question."""
    return (f"model.recipe = '{recipe}'", f"train.batch_size = {batch}", *more)


FREE = "train.microbatches = None"
COST = "planner.objective = 'cost'"
PCS = (Part("RTX4090", 1, 1), Part("RTX3080", 1, 2))
QUESTIONS = (
    Question("two PCs, batch 32", PCS, "2.5 Gbit/s", settings("gpt2-medium", 32, FREE)),
    Question("two PCs, batch 16", PCS, "2.5 Gbit/s", settings("gpt2-medium", 16, FREE)),
    Question(
        "A100 and V100, scanned blocks",
        (Part("A100-80", 1, 8), Part("V100e", 2, 8)),
        "25 Gbit/s",
        settings("llama-7b", 32, FREE, "model.scan_blocks = True"),
    ),
    Question(
        "by price",
        (Part("H100", 2, 8, 3.0), Part("A100-80", 4, 8, 1.2), Part("T4", 4, 4, 0.2)),
        "100 Gbit/s",
        settings("llama-7b", 64, "model.scan_blocks = True", COST),
    ),
)


def ask(question: Question, folder: Path) -> dict[str, Any]:
    """What ``hetjax.plan`` answers to a question, and what it says of parts of the cluster."""
    near = {"bandwidth": "25 GB/s", "latency": "10 us"}
    far = {"bandwidth": question.network, "latency": "50 us"}
    names = [part.kind.lower().replace("-", "_") for part in question.parts]
    subclusters = [
        {
            "name": name,
            "kind": part.kind,
            "nodes": part.nodes,
            "devices_per_node": part.devices,
            "intra_node": near,
            "inter_node": far,
            **({} if part.price is None else {"price_per_device_hour": part.price}),
        }
        for name, part in zip(names, question.parts, strict=True)
    ]
    links = [{"between": [a, b], **far} for i, a in enumerate(names) for b in names[i + 1 :]]
    cluster = {"name": "asked", "subclusters": subclusters, "links": links}
    (folder / "cluster.yaml").write_text(yaml.safe_dump(cluster))
    lines = ("cluster.file = 'cluster.yaml'", *question.settings)
    (folder / "asked.gin").write_text("\n".join(lines) + "\n")
    command = [sys.executable, "-m", "hetjax.plan", "--config", str(folder / "asked.gin"), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        return {"question": question.name, "holds": False, "error": done.stderr.strip()[-500:]}
    return {"question": question.name, **judged(json.loads(done.stdout))}


def judged(answer: dict[str, Any]) -> dict[str, Any]:
    """An answer beside the best part of its cluster alone."""
    times = {
        " + ".join(part["subclusters"]): part["step_time"]
        for part in answer.get("parts", ())
        if part["step_time"] is not None
    }
    best = min(times, key=lambda name: times[name], default=None)
    by_cost = "cost_per_step" in answer
    return {
        "step_time": answer["step_time"],
        "cost_per_step": answer.get("cost_per_step"),
        "compared_with": best,
        "its_step_time": best and times[best],
        # By price a slower plan may be the better one.
        "holds": None
        if best is None or by_cost
        else answer["step_time"] <= times[best] * (1 + ROUNDING),
        "planning_seconds": answer["planning_seconds"],
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Ask and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--only", default="", help="questions whose name has this in it")
    options = parser.parse_args(arguments)
    rows = []
    for question in QUESTIONS:
        if options.only in question.name:
            with tempfile.TemporaryDirectory() as folder:
                rows.append(ask(question, Path(folder)))
            print(rows[-1], file=sys.stdout if not options.json else sys.stderr)
    if options.json:
        print(json.dumps({"questions": rows}, indent=1))


if __name__ == "__main__":
    main()
