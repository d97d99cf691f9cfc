"""Trains models of real size for a few steps, by plans for unlike devices, on host CPU devices.

Half of each model's layers go to two devices of one kind, half to one of another, however few of
them the planner would use for so small a batch. Losses are compared with those of gradients that
one device adds up over the same microbatches, by plain `jax.jit`; the exit code is 1 where these
differ. Language models keep their blocks and width, not their context.

python scripts/check_models.py
python scripts/check_models.py vgg-19 resnet-50 --batch-size 8
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax
import numpy as np
import optax
from baselines import one_device_losses
from benchmarking import positive

import hetjax
from hetjax.commands.devices import host_device_flags
from hetjax.errors import unknown_name
from hetjax.mesh import KINDS, Cluster, Link, Subcluster, SubMesh
from hetjax.models import Model, ModelConfig, ResNetConfig, VGGConfig, model_of, recipe
from hetjax.planner import Member

TOLERANCE = 1e-5
ADAMW = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-4))
# VGG and ResNet were published with momentum, too. At rates at which the loss of a VGG, which
# normalises nothing, jumps up and down, differences of rounding grow tenfold a step, as with Adam.
SGD = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(1e-3, momentum=0.9))
LINK = Link(bandwidth=1e9, latency=1e-5)
CLUSTER = Cluster(
    "two and one",
    (
        Subcluster("two", KINDS["T4"], 1, 2, LINK, LINK),
        Subcluster("one", KINDS["V100"], 1, 1, LINK, LINK),
    ),
    (("two", "one", LINK),),
)
MODELS: Mapping[str, ModelConfig] = MappingProxyType(
    {
        "gpt2-small": recipe("gpt2-small", sequence=128),
        "llama": recipe(
            "llama-7b",
            blocks=12,
            width=768,
            heads=12,
            key_value_heads=4,
            ffn_width=2048,
            sequence=128,
            compute_dtype="float32",
        ),
        "switch": recipe("gpt2-small", experts=4, sequence=128),
        "vit-base": recipe("vit-base"),
        "vgg-19": recipe("vgg-19"),
        "resnet-50": recipe("resnet-50"),
    }
)
"""Models by name; "llama" and "switch" have the size of GPT-2 small."""


def check(name: str, batch_size: int, microbatches: int, steps: int) -> dict[str, Any]:
    """Plan a model, train it, and compare its losses.

    Args:
        name: a key of `MODELS`.
        batch_size: examples of a step.
        microbatches: of a step.
        steps: how many.

    Returns:
        The plan in words, and how far the losses are from one device's.
    """
    model = model_of(MODELS[name])
    optimizer = SGD if isinstance(MODELS[name], VGGConfig | ResNetConfig) else ADAMW
    batches = _batches(MODELS[name], model, batch_size, steps)
    parameters = jax.jit(model.init)(jax.random.key(0))
    size = sum(leaf.size for leaf in jax.tree.leaves(parameters))
    plan = hetjax.plan(
        model.loss,
        parameters,
        batches[0],
        cluster=CLUSTER,
        optimizer=optimizer,
        num_microbatches=microbatches,
        options=hetjax.PlanOptions(min_stages=2, max_stages=2, max_pipelines=1, union_stages=False),
    )
    plan = on_unlike_submeshes(plan)
    began = time.perf_counter()
    with hetjax.Trainer(plan, model.loss, parameters, optimizer, batches[0]) as trainer:
        losses = [trainer.train_step(batch).loss for batch in batches]
    seconds = time.perf_counter() - began
    expected = one_device_losses(model.loss, optimizer, parameters, batches, microbatches)
    return {
        "model": name,
        "parameters": size,
        "layers": len(plan.layers) - 1,
        "stages": [
            f"{stage.submesh.subcluster} {stage.layers[0]}-{stage.layers[1] - 1}"
            for stage in plan.stages
        ],
        "losses": losses,
        "losses_of_one_device": expected,
        "largest_loss_difference": max(
            abs(a - b) / abs(b) for a, b in zip(losses, expected, strict=True)
        ),
        "seconds": seconds,
    }


def on_unlike_submeshes(plan: hetjax.Plan) -> hetjax.Plan:
    """The plan with half of its layers on the two devices of "two", half on the one of "one".

    Args:
        plan: of two stages, on `CLUSTER`.

    Returns:
        The plan, without a prediction.
    """
    middle, last = (len(plan.layers) - 1) // 2, len(plan.layers) - 1
    first, second = plan.stages
    two = Member(SubMesh("two", 0, (1, 2)), (2, 1))
    one = Member(SubMesh("one", 0, (1, 1)), (1, 1))
    stages = (
        dataclasses.replace(first, layers=(0, middle), members=(two,)),
        dataclasses.replace(second, layers=(middle, last), members=(one,)),
    )
    pipeline = dataclasses.replace(plan.pipeline, stages=stages)
    return dataclasses.replace(plan, pipelines=(pipeline,), prediction=None)


def _batches(
    config: ModelConfig, model: Model, batch_size: int, steps: int
) -> list[dict[str, np.ndarray]]:
    """Random examples; a step's are not those of the one before."""
    rng = np.random.default_rng(0)
    highest = {
        "tokens": getattr(config, "vocabulary", 0),
        "images": 256,
        "labels": getattr(config, "classes", 0),
    }
    return [
        {
            name: rng.integers(0, highest[name], shape.shape).astype(shape.dtype)
            for name, shape in model.batch_shapes(batch_size).items()
        }
        for _ in range(steps)
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").partition("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument(
        "models",
        nargs="*",
        metavar="MODEL",
        help=f"of {', '.join(MODELS)}; all unless some are named",
    )
    parser.add_argument("--batch-size", type=positive, default=4)
    parser.add_argument("--microbatches", type=positive, default=2)
    parser.add_argument("--steps", type=positive, default=5)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args(arguments)
    # Before JAX makes its devices; twice as many as are used, for collectives need threads.
    count = 2 * CLUSTER.num_devices
    os.environ["XLA_FLAGS"] = host_device_flags(os.environ.get("XLA_FLAGS", ""), count)
    for name in options.models:
        if name not in MODELS:
            parser.error(unknown_name("model", name, MODELS))
    rows = []
    for name in options.models or MODELS:
        rows.append(check(name, options.batch_size, options.microbatches, options.steps))
        if not options.json:
            _print(rows[-1])
    if options.json:
        print(json.dumps({"rows": rows}, indent=1))
    sys.exit(any(not row["largest_loss_difference"] <= TOLERANCE for row in rows))


def _print(row: Mapping[str, Any]) -> None:
    print(
        f"{row['model']}: {row['parameters'] / 1e6:.0f} million parameters, {row['layers']} "
        f"layers, {' | '.join(row['stages'])}; {len(row['losses'])} losses differ by "
        f"{row['largest_loss_difference']:.1e} at most",
        flush=True,
    )


if __name__ == "__main__":
    main()
