"""Writes the settings of Harp's figure 7: clusters, configurations, and the plans it publishes.

Clusters are parts of heterogeneous setting 1 (table 11), with 5 Gbit/s between the kinds; the
tables of appendix C give the stages of four of the eight plans, and with them the clusters and the
146 layers of every model. What the paper leaves open is assumed, and said so in the files: the
clusters of the other four settings, the size of the model between 15 and 39 billion parameters,
latencies, and for the plans the microbatches, what is recomputed and how state is sharded (here the
fastest that fits, by hetjax's own cost model: what must recompute to fit is charged for it, so
`hetjax.plan` also shows what such a plan would take if nothing had to be).

python scripts/harp_settings.py
python scripts/harp_settings.py --plans a h

Source: Harp, section 6, appendix C and D.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from hetjax.configuration import read_configuration
from hetjax.configuration.make import make_ingredients
from hetjax.errors import InputError
from hetjax.mesh import Cluster, SubMesh
from hetjax.pipeline.schedules.warm_up import one_f_one_b
from hetjax.planner import (
    PipelinePlan,
    Plan,
    PlanningProblem,
    PlanOptions,
    StagePlan,
    make_problem,
)
from hetjax.planner.harp.refit import refitted

FOLDER = Path(__file__).parent.parent / "configs" / "papers" / "harp"


class Setting(NamedTuple):
    """One setting of figure 7.

    Args:
        v100e: nodes, and V100e in each.
        a100: nodes, and A100 in each.
        model: the model's recipe.
        stages: the published plan: a line for each stage with its first and last layer, its
            kind, its number of devices, and their logical mesh; empty where it is not in the paper.
    """

    v100e: tuple[int, int]
    a100: tuple[int, int]
    model: str
    stages: str = ""


SETTINGS = {
    "a": Setting(
        (1, 8),
        (2, 4),
        "gpt-15b",
        "0-39 v100e 8 2x4, 40-92 a100 4 1x4, 93-145 a100 4 1x4",
    ),
    "b": Setting((2, 8), (1, 8), "gpt-15b"),
    "c": Setting(
        (3, 8),
        (1, 8),
        "gpt-15b",
        "0-12 v100e 4 4x1, 13-26 v100e 4 4x1, 27-40 v100e 4 4x1, 41-54 v100e 4 4x1, "
        "55-82 v100e 8 8x1, 83-97 a100 2 2x1, 98-114 a100 2 2x1, 115-145 a100 4 4x1",
    ),
    "d": Setting((4, 8), (1, 8), "gpt-15b"),
    "e": Setting(
        (4, 8),
        (1, 8),
        "gpt-26b",
        "0-10 v100e 4 4x1, 11-22 v100e 4 4x1, 23-34 v100e 4 4x1, 35-46 v100e 4 4x1, "
        "47-58 v100e 4 4x1, 59-70 v100e 4 4x1, 71-82 v100e 4 4x1, 83-94 v100e 4 4x1, "
        "95-107 a100 2 1x2, 108-132 a100 4 2x2, 133-145 a100 2 2x1",
    ),
    "f": Setting((2, 8), (2, 8), "gpt-26b"),
    "g": Setting((4, 8), (2, 8), "gpt-39b"),
    "h": Setting(
        (4, 8),
        (4, 8),
        "gpt-39b",
        "0-9 v100e 8 4x2, 10-19 v100e 8 4x2, 20-29 v100e 8 4x2, 30-39 v100e 8 4x2, "
        "40-46 a100 2 2x1, 47-53 a100 2 2x1, 54-60 a100 2 2x1, 61-67 a100 2 2x1, "
        "68-80 a100 4 4x1, 81-93 a100 4 4x1, 94-106 a100 4 4x1, 107-119 a100 4 4x1, "
        "120-132 a100 4 4x1, 133-145 a100 4 4x1",
    ),
}
TABLES = {"a": 3, "c": 5, "e": 7, "h": 10}
BATCH_SIZE = 1024


def cluster_text(name: str, setting: Setting) -> str:
    """The cluster file of a setting."""
    (v100e_nodes, v100e), (a100_nodes, a100) = setting.v100e, setting.a100
    known = f"table {TABLES[name]}" if name in TABLES else "assumed: the paper does not say"
    return f"""\
# Harp, figure 7({name}): {v100e_nodes} x {v100e} V100e and {a100_nodes} x {a100} A100 ({known}), \
with the figures of table 11.
# Latencies are not published: those here are assumed.
name: Harp figure 7({name})
subclusters:
  - name: v100e
    kind: V100e
    nodes: {v100e_nodes}
    devices_per_node: {v100e}
    intra_node: {{bandwidth: 150 GB/s, latency: 5 us}}
    inter_node: {{bandwidth: 200 Gbit/s, latency: 10 us}}
  - name: a100
    kind: A100-40
    nodes: {a100_nodes}
    devices_per_node: {a100}
    intra_node: {{bandwidth: 300 GB/s, latency: 5 us}}
    inter_node: {{bandwidth: 200 Gbit/s, latency: 10 us}}
links:
  - {{between: [v100e, a100], bandwidth: 5 Gbit/s, latency: 100 us}}
"""


def configuration_text(name: str, setting: Setting) -> str:
    """The configuration of a setting."""
    published = f'\nplanner.published = "fig7{name}_published.json"\n' if setting.stages else ""
    return f"""\
# Harp, figure 7({name}); scripts/harp_settings.py writes it and says what of it is assumed.
#   python -m hetjax.plan --config configs/papers/harp/fig7{name}.gin
cluster.file = "fig7{name}.yaml"

model.recipe = "{setting.model}"
model.compute_dtype = "float16"
data.kind = "synthetic"

train.batch_size = {BATCH_SIZE}
train.microbatches = None
{published}"""


def published_stages(setting: Setting) -> Iterator[StagePlan]:
    """The stages of a published plan; neither recomputation nor sharding is published."""
    used = {"v100e": 0, "a100": 0}
    for line in setting.stages.split(", "):
        layers, kind, count, mesh = line.split()
        first, last = map(int, layers.split("-"))
        data, tensor = map(int, mesh.split("x"))
        submesh = SubMesh(kind, used[kind], (1, int(count)))
        used[kind] += int(count)
        yield StagePlan.on((first, last + 1), submesh, (data, tensor))


def published_plan(name: str, problem: PlanningProblem) -> Plan | None:
    """The published plan in the fastest ways to run its stages that fit; None where none does."""
    stages = tuple(published_stages(SETTINGS[name]))
    schedule = one_f_one_b(len(stages), problem.num_microbatches)
    plan = Plan(
        model=problem.program.fingerprint,
        layers=problem.layers,
        cluster=problem.cluster,
        pipelines=(
            PipelinePlan(
                stages,
                problem.num_microbatches,
                problem.microbatch_size,
                replace(schedule, name="h_1f1b"),
            ),
        ),
        planner=f"Harp, table {TABLES[name]}",
    )
    return refitted(plan, problem)


def problem_of(name: str, num_microbatches: int, num_layers: int | None = None) -> PlanningProblem:
    """The planning problem of a setting, on layers by structure or on so many of similar cost."""
    configuration = read_configuration(FOLDER / f"fig7{name}.gin")
    ingredients = make_ingredients(configuration)
    return make_problem(
        ingredients.model.loss,
        ingredients.parameter_shapes,
        ingredients.batch,
        cluster=Cluster.from_file(FOLDER / f"fig7{name}.yaml"),
        optimizer=ingredients.optimizer,
        num_microbatches=num_microbatches,
        options=PlanOptions(num_layers=num_layers, max_pipelines=1),
    )


def fastest_published_plan(name: str) -> Plan:
    """The published plan with the number of microbatches that is fastest for it."""
    widest = max(stage.mesh_shape[0] for stage in published_stages(SETTINGS[name]))
    found: list[Plan] = []
    size = widest
    while size * 16 <= BATCH_SIZE:
        plan = published_plan(name, problem_of(name, BATCH_SIZE // size))
        step_time = plan.prediction.step_time if plan and plan.prediction else None
        print(f"fig7{name}: microbatches of {size}: {step_time}")
        if plan is not None:
            found.append(plan)
        elif found:
            break
        size *= 2
    if not found:
        raise InputError(f"the plan of figure 7({name}) fits with no number of microbatches")
    return min(found, key=lambda plan: plan.prediction.step_time if plan.prediction else 0.0)


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the files."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--plans", nargs="*", choices=sorted(TABLES), default=sorted(TABLES))
    options = parser.parse_args(arguments)
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name, setting in SETTINGS.items():
        (FOLDER / f"fig7{name}.yaml").write_text(cluster_text(name, setting))
        (FOLDER / f"fig7{name}.gin").write_text(configuration_text(name, setting))
    for name in options.plans:
        fastest_published_plan(name).save(FOLDER / f"fig7{name}_published.json")


if __name__ == "__main__":
    main()
