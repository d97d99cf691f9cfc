"""Optimizer state offloaded from a device to its host: the same bits, less memory, and the cost.

    python scripts/check_offload.py                       # the first device that JAX sees
    python scripts/check_offload.py --blocks 24 --width 1024 --batch 8
    JAX_PLATFORMS=cpu python scripts/check_offload.py --blocks 2 --width 128 --batch 4

A GPT is trained with and without, each in a process of its own, so that each has its own peak of
memory, by XLA's allocator; host devices have none to tell. All numbers come out as a row of JSON.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from statistics import median
from typing import Any

STEPS = 8


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--way", choices=("both", "kept", "offloaded"), default="both")
    parser.add_argument("--blocks", type=int, default=12)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--microbatches", type=int, default=2)
    asked = parser.parse_args(arguments)
    if asked.way != "both":
        print(json.dumps(trained(asked)))
        return
    given = [] if arguments is None else list(arguments)
    found = [_in_process(way, given or sys.argv[1:]) for way in ("kept", "offloaded")]
    for row in found:
        print(json.dumps(row))
    kept, offloaded = found
    same = all(kept[each] == offloaded[each] for each in ("losses", "parameters"))
    cost = offloaded["step_seconds"] - kept["step_seconds"]
    predicted = offloaded["predicted_step_seconds"] - kept["predicted_step_seconds"]
    print(json.dumps({"bitwise_equal": same, "cost": cost, "predicted_cost": predicted}))


def _in_process(way: str, arguments: Sequence[str]) -> dict[str, Any]:
    command = [sys.executable, __file__, *arguments, "--way", way]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=1800)
    return json.loads(done.stdout.splitlines()[-1])


def trained(asked: argparse.Namespace) -> dict[str, Any]:
    """Train one way.

    Args:
        asked: the model's shape, and the way.

    Returns:
        Losses, a digest of the parameters, the peak of the device's memory, and
        seconds of a step, with what is predicted of both by data sheets.
    """
    import jax
    import numpy as np
    import optax

    import hetjax
    from hetjax.mesh import Cluster, Subcluster, SubMesh, kind, measure_host_cpu
    from hetjax.mesh.discovery import PCIE
    from hetjax.mesh.jax_devices import kind_name
    from hetjax.models import GPTConfig, language_model
    from hetjax.pipeline.schedules.warm_up import one_f_one_b
    from hetjax.planner import make_problem, predict
    from hetjax.planner.harp.candidate_plans import pipeline_plan
    from hetjax.planner.plan.stage_plan import Member, StagePlan

    device = jax.devices()[0]
    name = kind_name(device)
    if name is None:
        raise SystemExit(f"{device.device_kind!r} is of no known kind")
    figures = measure_host_cpu(1) if device.platform == "cpu" else kind(name)
    part = Subcluster("card", figures, 1, 1, PCIE, PCIE, host_memory_bytes=10**12)
    config = GPTConfig(
        vocabulary=8192, blocks=asked.blocks, width=asked.width, heads=8, sequence=256
    )
    model = language_model(config)
    with jax.default_device(jax.devices("cpu")[0]):
        parameters = jax.tree.map(np.asarray, jax.jit(model.init)(jax.random.key(0)))
    rng = np.random.default_rng(0)
    batch = {"tokens": rng.integers(0, 8192, (asked.batch, 257), dtype=np.int32)}
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
    problem = make_problem(
        model.loss,
        parameters,
        batch,
        cluster=Cluster("one", (part,)),
        optimizer=optimizer,
        num_microbatches=asked.microbatches,
    )
    stage = StagePlan(
        (0, problem.num_layers),
        (Member(SubMesh("card", 0, (1, 1)), (1, 1)),),
        offload=("optimizer_state",) if asked.way == "offloaded" else (),
    )
    schedule = one_f_one_b(1, asked.microbatches)
    plan = predict(pipeline_plan(problem, [stage], schedule, "check_offload"), problem)
    losses, seconds, digest = [], [], hashlib.sha256()
    options = hetjax.LocalOptions([device])
    with hetjax.Trainer(plan, model.loss, parameters, optimizer, batch, runtime=options) as trainer:
        for _ in range(STEPS):
            began = time.perf_counter()
            losses.append(trainer.train_step(batch).loss)
            seconds.append(time.perf_counter() - began)
        for leaf in jax.tree.leaves(trainer.parameters()):
            digest.update(np.asarray(leaf).tobytes())
    told = device.memory_stats() or {}
    return {
        "way": asked.way,
        "device": device.device_kind,
        "losses": losses,
        "parameters": digest.hexdigest(),
        "peak_bytes": told.get("peak_bytes_in_use"),
        "predicted_bytes": plan.predicted.stages[0].memory_bytes,
        "step_seconds": median(seconds[2:]),
        "predicted_step_seconds": plan.predicted.step_time,
    }


if __name__ == "__main__":
    main()
