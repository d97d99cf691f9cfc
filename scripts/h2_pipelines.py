"""H2's published pipelines with a tiny model, trained: the losses and gradients of one device.

    python scripts/h2_pipelines.py figure-8
    python scripts/h2_pipelines.py B

`bench_h2.py heteropp` runs it for all of them, each in a process with as many host devices as the
plan has chips.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True)
class Stages:
    """Stages that are alike.

    Args:
        count: how many.
        tensor: chips that share a layer.
        width: of data parallelism.
        layers: of each.
        repeats: whether layers are made again.
    """

    count: int
    tensor: int
    width: int
    layers: int
    repeats: bool = False

    @property
    def chips(self) -> int:
        """Chips of a stage."""
        return self.tensor * self.width


PIPELINES: Mapping[str, tuple[Stages, ...]] = {
    "figure-8": (Stages(1, 2, 4, 8, repeats=True), Stages(1, 4, 2, 6), Stages(1, 2, 2, 4)),
    "A": (Stages(16, 4, 4, 6),),
    "B": (Stages(16, 4, 4, 6, repeats=True),),
    "C": (Stages(32, 4, 2, 3, repeats=True),),
    "D": (Stages(8, 8, 4, 12),),
}
"""Figure 8's example, and the plans of table 6; D's without offload."""

EXAMPLES, MICROBATCHES, STEPS = 8, 2, 3


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("pipeline", choices=PIPELINES)
    name = parser.parse_args(arguments).pipeline
    chips = sum(each.count * each.chips for each in PIPELINES[name])
    # Before JAX starts.
    os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={chips}"
    os.environ["JAX_PLATFORMS"] = "cpu"
    print(json.dumps({"pipeline": name, "chips": chips, **trained(PIPELINES[name])}))


def trained(pipeline: Sequence[Stages]) -> dict[str, Any]:
    """Train a pipeline, and one device.

    Args:
        pipeline: its stages.

    Returns:
        How far losses are from one device's, relatively, and those of them.
    """
    import jax
    import numpy as np
    import optax
    from baselines import one_device_losses

    import hetjax
    from hetjax.models import LlamaConfig, language_model

    layers = sum(each.count * each.layers for each in pipeline)
    # Heads, and groups of them, for every chip that shares a layer.
    config = LlamaConfig(
        vocabulary=32,
        blocks=layers,
        width=32,
        heads=8,
        key_value_heads=8,
        ffn_width=64,
        sequence=8,
        tied_embeddings=False,
    )
    model = language_model(config)
    parameters = jax.jit(model.init)(jax.random.key(0))
    rng = np.random.default_rng(0)
    batch = {"tokens": rng.integers(0, 32, (EXAMPLES, 9), dtype=np.int32)}
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(1e-2, momentum=0.9))
    plan = plan_of(pipeline, model.loss, parameters, batch, optimizer)
    expected = one_device_losses(model.loss, optimizer, parameters, [batch] * STEPS, MICROBATCHES)
    with hetjax.Trainer(plan, model.loss, parameters, optimizer, batch) as trainer:
        losses = [trainer.train_step(batch).loss for _ in range(STEPS)]
    return {
        "stages": [stage.sharding_text for stage in plan.stages][:3],
        "largest_difference": max(
            abs(a - b) / abs(b) for a, b in zip(losses, expected, strict=True)
        ),
        "losses": losses,
    }


def plan_of(
    pipeline: Sequence[Stages], loss: Any, parameters: Any, batch: Any, optimizer: Any
) -> Any:
    """The plan of a pipeline, on a cluster of host devices."""
    from hetjax.mesh import Cluster, Link, Subcluster, SubMesh, kind
    from hetjax.pipeline.schedules.warm_up import one_f_one_b
    from hetjax.planner import make_problem, predict
    from hetjax.planner.h2.module_ways import Modules
    from hetjax.planner.harp.candidate_plans import pipeline_plan
    from hetjax.planner.plan.stage_plan import Member, StagePlan
    from hetjax.planner.work.repeating_layers import repeated_in

    link = Link(10e9, 1e-5)
    host = replace(kind("A100-80"), name="chip", platform="cpu")
    parts = tuple(
        Subcluster(f"part{p}", host, each.count, each.chips, link, link)
        for p, each in enumerate(pipeline)
    )
    names = [part.name for part in parts]
    links = tuple((a, b, link) for i, a in enumerate(names) for b in names[i + 1 :])
    cluster = Cluster("H2", parts, links)
    problem = make_problem(
        loss,
        parameters,
        batch,
        cluster=cluster,
        optimizer=optimizer,
        num_microbatches=MICROBATCHES,
    )
    alike = [
        (name, number, each)
        for name, each in zip(names, pipeline, strict=True)
        for number in range(each.count)
    ]
    modules = Modules.of(problem)
    stages = []
    for (name, number, each), layers in zip(
        alike, modules.layers_of([each.layers for _, _, each in alike]), strict=True
    ):
        submesh = SubMesh(name, number * each.chips, (1, each.chips))
        again = repeated_in(problem.repeatable_layers, layers) if each.repeats else ()
        member = Member(submesh, (each.width, each.tensor))
        stages.append(StagePlan(layers, (member,), "state_sharded", recompute_layers=again))
    schedule = one_f_one_b(len(stages), MICROBATCHES)
    made = pipeline_plan(problem, stages, schedule, "by hand")
    return predict(made, problem)


if __name__ == "__main__":
    main()
