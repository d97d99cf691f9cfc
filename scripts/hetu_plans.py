"""Writes the strategies that Hetu v2 publishes as plan files, for a Llama of any width.

python scripts/hetu_plans.py --config configs/papers/hetu/llama32b.gin --out configs/papers/hetu
python scripts/hetu_plans.py --config configs/papers/hetu/llama70b.gin --out configs/papers/hetu

Source: Hetu v2, appendix A.2 and A.3: tables 5, 7 and 8.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from hetjax.configuration import read_configuration
from hetjax.configuration.make import make_ingredients
from hetjax.errors import InputError
from hetjax.mesh import Cluster, SubMesh
from hetjax.pipeline.program.traced_program import Program, with_examples
from hetjax.pipeline.program.tracing import trace
from hetjax.pipeline.schedules.warm_up import one_f_one_b
from hetjax.planner import PipelinePlan, Plan, StagePlan
from hetjax.planner.plan.parameter_names import leaf_name
from hetjax.planner.plan.plan import validate
from hetjax.planner.plan.stage_plan import Spec

CLUSTERS = Path(__file__).parent.parent / "configs"


class Strategy(NamedTuple):
    """A published strategy.

    Args:
        model: the configuration beside the plans that it is for.
        cluster: the file of its cluster.
        pipelines: a line for each pipeline: the number and the size of its microbatches, then the
            ranks and the layers of each stage.
        shard_optimizer_state: whether pipelines divide the optimizer's state, ZeRO-1.
        lost_devices: the GPUs that have failed since the strategy before.
    """

    model: str
    cluster: str
    pipelines: tuple[str, ...]
    shard_optimizer_state: bool = False
    lost_devices: tuple[int, ...] = ()


STRATEGIES: Mapping[str, Strategy] = {
    "c1": Strategy(
        "llama32b",
        "papers/hetu/h20.yaml",
        (
            "16x2 R0-3:L0-14 R4-7:L15-29 R8-11:L30-44 R12-15:L45-59",
            "16x2 R16-19:L0-14 R20-23:L15-29 R24-27:L30-44 R28-31:L45-59",
        ),
    ),
    "c2": Strategy(
        "llama32b",
        "papers/hetu/h20.yaml",
        (
            "33x1 R0-3:L0-14 R4-7:L15-29 R8-11:L30-44 R12-15:L45-59",
            "31x1 R16-19:L0-15 R20-23:L16-31 R24-27:L32-47 R28-29:L48-55 R30-30:L56-59",
        ),
        lost_devices=(31,),
    ),
    "c3": Strategy(
        "llama32b",
        "papers/hetu/h20.yaml",
        (
            "32x1 R0-3:L0-19 R4-7:L20-39 R8-11:L40-59",
            "32x1 R12-15:L0-19 R16-19:L20-39 R20-23:L40-59",
        ),
    ),
    "c4": Strategy(
        "llama32b",
        "clusters/hetu.yaml",
        (
            "32x1 R16-19:L0-4 R20-23:L5-10 R24-27:L11-16 R28-31:L17-22 R0-3:L23-40 R4-7:L41-59",
            "32x1 R32-35:L0-4 R36-39:L5-10 R40-43:L11-16 R44-47:L17-22 R8-11:L23-40 R12-15:L41-59",
        ),
    ),
    "c5": Strategy(
        "llama32b",
        "clusters/hetu.yaml",
        (
            "32x1 R16-19:L0-5 R20-23:L6-11 R24-27:L12-17 R0-3:L18-38 R4-7:L39-59",
            "32x1 R28-31:L0-5 R32-35:L6-11 R36-39:L12-17 R8-11:L18-38 R12-15:L39-59",
        ),
    ),
    "c6": Strategy(
        "llama32b",
        "clusters/hetu.yaml",
        (
            "33x1 R16-19:L0-5 R20-23:L6-11 R24-27:L12-17 R0-3:L18-38 R4-7:L39-59",
            "31x1 R28-31:L0-5 R32-35:L6-11 R36-39:L12-17 R8-11:L18-39 R12-13:L40-52 R14-14:L53-59",
        ),
        lost_devices=(15,),
    ),
    "c7": Strategy(
        "llama32b",
        "clusters/hetu.yaml",
        (
            "32x1 R16-19:L0-8 R20-23:L9-18 R24-27:L19-28 R0-3:L29-59",
            "32x1 R28-31:L0-8 R32-35:L9-18 R36-39:L19-28 R4-7:L29-59",
        ),
    ),
    "t5_32b_16": Strategy(
        "llama32b",
        "clusters/hetu.yaml",
        (
            "32x1 R16-19:L0-6 R20-23:L7-13 R0-3:L14-36 R4-7:L37-59",
            "32x1 R24-27:L0-6 R28-31:L7-13 R8-11:L14-36 R12-15:L37-59",
        ),
        shard_optimizer_state=True,
    ),
    "t5_32b_24": Strategy(
        "llama32b",
        "clusters/hetu.yaml",
        (
            "32x1 R16-19:L0-5 R20-23:L6-11 R24-27:L12-17 R0-3:L18-38 R4-7:L39-59",
            "32x1 R28-31:L0-5 R32-35:L6-11 R36-39:L12-17 R8-11:L18-38 R12-15:L39-59",
        ),
        shard_optimizer_state=True,
    ),
    "t5_32b_32": Strategy(
        "llama32b",
        "clusters/hetu.yaml",
        (
            "16x1 R16-19:L0-10 R20-23:L11-21 R0-3:L22-59",
            "16x1 R24-27:L0-10 R28-31:L11-21 R4-7:L22-59",
            "16x1 R32-35:L0-10 R36-39:L11-21 R8-11:L22-59",
            "16x1 R40-43:L0-10 R44-47:L11-21 R12-15:L22-59",
        ),
        shard_optimizer_state=True,
    ),
    "t5_70b_16": Strategy(
        "llama70b",
        "clusters/hetu.yaml",
        ("64x1 R16-23:L0-10 R24-31:L11-21 R0-7:L22-50 R8-15:L51-79",),
    ),
    "t5_70b_24": Strategy(
        "llama70b",
        "clusters/hetu.yaml",
        ("64x1 R16-23:L0-9 R24-31:L10-19 R32-39:L20-29 R0-7:L30-54 R8-15:L55-79",),
    ),
    "t5_70b_32": Strategy(
        "llama70b",
        "clusters/hetu.yaml",
        (
            "32x1 R16-23:L0-16 R24-31:L17-33 R0-7:L34-79",
            "32x1 R32-39:L0-16 R40-47:L17-33 R8-15:L34-79",
        ),
        shard_optimizer_state=True,
    ),
}
"""By table: c1 to c7 are tables 7 and 8, t5 is table 5, with the number of its H20."""

SPECS: Mapping[str, Spec] = {
    "query": (None, "tensor", None),
    "key": (None, "tensor", None),
    "value": (None, "tensor", None),
    "output": ("tensor", None, None),
    "gate": (None, "tensor"),
    "up": (None, "tensor"),
    "down": ("tensor", None),
    "token_embedding": ("tensor", None),
    "head": ("tensor", None),
}
"""How tensor parallelism divides a Llama's parameters: heads, columns, rows, the vocabulary."""

_STAGE = re.compile(r"R(\d+)-(\d+):L(\d+)-(\d+)")


def make_plan(name: str, program: Program) -> Plan:
    """One of the strategies as a plan.

    Args:
        name: a key of `STRATEGIES`.
        program: a Llama of as many blocks, stacked and scanned over.

    Returns:
        The plan.
    """
    strategy = STRATEGIES[name]
    cluster = Cluster.from_file(CLUSTERS / strategy.cluster)
    layers = _layers(program)
    pipelines = tuple(_pipeline(line, cluster, program) for line in strategy.pipelines)
    plan = Plan(
        program.fingerprint,
        layers,
        cluster,
        pipelines,
        planner=f"Hetu v2, {name.upper()}",
        shard_optimizer_state=strategy.shard_optimizer_state,
        lost_devices=strategy.lost_devices,
    )
    validate(plan)
    return plan


def _layers(program: Program) -> tuple[int, ...]:
    """Where blocks begin: the first has the embedding too, the last all that follows."""
    counts = {count for count in program.leaves.rows if count is not None}
    inside = [
        position
        for position, step in enumerate(program.steps)
        if any(call.primitive.name == "scan" for call in step.calls)
    ]
    if len(counts) != 1:
        raise InputError(f"the program has {len(counts)} loops; set model.scan_blocks = True")
    (blocks,) = counts
    size = len(inside) // blocks
    starts = range(inside[0] + size, inside[-1], size)
    return (0, *starts, program.num_positions)


def _pipeline(line: str, cluster: Cluster, program: Program) -> PipelinePlan:
    batches, *stages = line.split()
    count, size = map(int, batches.split("x"))
    made = tuple(_stage(stage, cluster, program) for stage in stages)
    return PipelinePlan(made, count, size, one_f_one_b(len(made), count))


def _stage(text: str, cluster: Cluster, program: Program) -> StagePlan:
    found = _STAGE.fullmatch(text)
    assert found is not None, text
    first, last, first_layer, last_layer = map(int, found.groups())
    width, place = last - first + 1, 0
    while first >= cluster.subclusters[place].num_devices:
        first -= cluster.subclusters[place].num_devices
        place += 1
    return StagePlan.on(
        (first_layer, last_layer + 1),
        SubMesh(cluster.subclusters[place].name, first, (1, width)),
        (1, width),
        parameters=_specs(program) if width > 1 else {},
    )


def _specs(program: Program) -> dict[str, Spec]:
    """The specification of every parameter, by its path; of all blocks' by one."""
    found: dict[str, Spec] = {}
    for name, value in zip(program.parameter_names, program.parameters, strict=True):
        keys = [key for key in SPECS if key in name.split("/")]
        spec = SPECS[keys[0]] if keys else ()
        assert len(spec) in (0, len(program.avals[value].shape)), name
        found[leaf_name(name)] = spec
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", required=True, type=Path, help="gin file of the model")
    parser.add_argument("--out", required=True, type=Path, help="folder for the plans")
    options = parser.parse_args(arguments)
    ingredients = make_ingredients(read_configuration(options.config, []))
    shapes = with_examples(ingredients.batch, 1)
    program = trace(ingredients.model.loss, ingredients.parameter_shapes, shapes)
    options.out.mkdir(parents=True, exist_ok=True)
    for name in (name for name, each in STRATEGIES.items() if each.model == options.config.stem):
        text = json.dumps(make_plan(name, program).to_json_dict(), indent=1)
        (options.out / f"{name}.json").write_text(text + "\n")


if __name__ == "__main__":
    main()
