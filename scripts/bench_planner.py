"""Measures the planner's search: seconds and memory, and how they grow.

The first row is Harp's own case, GPT-39B with 146 layers on 32 V100e and 32 A100, for which the
paper's planner searches 133 s; the second is the largest that hetjax promises, 400 layers on 1,024
devices of four kinds. The others vary layers, devices and kinds one at a time. Every row runs in a
process of its own, on one core; profile seconds are those of filling the table of candidates, and
the search without a lost device begins from what is known of the plan before.

python scripts/bench_planner.py
python scripts/bench_planner.py --json
python scripts/bench_planner.py --quick --json
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
from collections.abc import Sequence
from statistics import median
from typing import Any, NamedTuple

HARP_SEARCH_SECONDS = 133.0
"""Harp, section 6.4: GPT-39B, 146 layers, on 32 V100e and 32 A100."""

KINDS = ("V100e", "A100-40", "H100", "A100-80")


class Case(NamedTuple):
    """One row.

    Args:
        layers: how many layers the model has; 0 for Harp's own model and cluster.
        nodes: nodes of 8 devices of each kind.
        kinds: how many kinds there are.
        microbatches: microbatches in a step.
    """

    layers: int
    nodes: int
    kinds: int
    microbatches: int


HARP = Case(0, 4, 2, 128)
LARGEST = Case(400, 32, 4, 512)
SCALING = (
    *(Case(layers, 4, 2, 128) for layers in (48, 146, 400)),
    *(Case(146, nodes, 2, 128) for nodes in (1, 16, 64)),
    *(Case(146, 4, kinds, 128) for kinds in (1, 3, 4)),
)
QUICK = (Case(24, 1, 2, 16), Case(24, 1, 3, 16))


def problem_of(case: Case) -> Any:
    """The planning problem of a row: Harp's, or a chain of equal layers that fill the memory."""
    import jax
    import jax.numpy as jnp
    import optax
    from harp_settings import problem_of as harp_problem

    from hetjax.mesh import Cluster, Link, Subcluster, kind
    from hetjax.planner import PlanOptions, make_problem

    if case.layers == 0:
        return harp_problem("h", case.microbatches)
    near, between, far = Link(2e11, 5e-6), Link(2.5e10, 1e-5), Link(0.625e9, 1e-4)
    subclusters = tuple(
        Subcluster(name.lower(), kind(name), case.nodes, 8, near, between)
        for name in KINDS[: case.kinds]
    )
    links = tuple(
        (a.name, b.name, far) for i, a in enumerate(subclusters) for b in subclusters[i + 1 :]
    )

    def loss(weights: Sequence[jax.Array], x: jax.Array) -> jax.Array:
        for weight in weights:
            x = jnp.tanh(x @ weight)
        return jnp.mean(x.astype(jnp.float32) ** 2)

    # Adam's state of all layers takes about a third of the devices' memory.
    memory = sum(each.num_devices * each.kind.memory_bytes for each in subclusters)
    width = int((memory / 3 / 14 / case.layers) ** 0.5) // 128 * 128
    return make_problem(
        loss,
        [jax.ShapeDtypeStruct((width, width), jnp.float16)] * case.layers,
        jax.ShapeDtypeStruct((case.microbatches * 8 * 1024, width), jnp.float16),
        cluster=Cluster("scaling", subclusters, links),
        optimizer=optax.adamw(1e-3),
        num_microbatches=case.microbatches,
        options=PlanOptions(max_pipelines=1),
    )


def search(case: Case, rounds: int, *, plan_only: bool = False) -> dict[str, Any]:
    """What one row's search takes; medians of a few rounds.

    Args:
        case: the row.
        rounds: how many searches.
        plan_only: whether none is made without a lost device.
    """
    from hetjax.collecting import seldom_collected
    from hetjax.planner import DynamicProgram

    planner = DynamicProgram()
    # As `hetjax.plan` does.
    with seldom_collected():
        problem = problem_of(case)
        found = [each for _ in range(rounds) if (each := planner.find(problem))]
        count = problem.cluster.num_devices
        again = [
            each.search_seconds
            for lost in (() if plan_only else (0, count // 3, count - 1))
            if (each := planner.find_without(problem, {lost}, found[0]))
        ]
    return {
        "layers": problem.num_layers,
        "devices": problem.cluster.num_devices,
        "kinds": len(problem.cluster.subclusters),
        "candidates": found[0].candidates,
        "profile_seconds": median(each.profile_seconds for each in found),
        "search_seconds": median(each.search_seconds for each in found),
        "again_seconds": median(again) if again else None,
        "memory_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "stages": len(found[0].plan.stages),
        "step_time": found[0].step_time,
    }


def measure(cases: Sequence[Case], rounds: int) -> list[dict[str, Any]]:
    """Every row, each in a process of its own."""
    rows = []
    for case in cases:
        command = [sys.executable, __file__, "--rounds", str(rounds), "--case", *map(str, case)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(done.stderr)
        rows.append(json.loads(done.stdout))
        print(text_of(rows[-1]), file=sys.stderr)
    return rows


def text_of(row: dict[str, Any]) -> str:
    """A row for people."""
    return (
        f"L = {row['layers']:3}, {row['devices']:4} devices of {row['kinds']} kinds: search "
        f"{row['search_seconds']:6.2f} s, profile {row['profile_seconds']:5.2f} s, without a lost "
        f"device {row['again_seconds']:6.2f} s, "
        f"{row['memory_bytes'] / 1e9:.2f} GB, {row['candidates']:,} candidates"
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--quick", action="store_true", help="two small rows only")
    parser.add_argument(
        "--rounds", type=int, default=3, help="searches, of which the median counts"
    )
    parser.add_argument("--plan-only", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--case", type=int, nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.rounds < 1:
        parser.error(f"--rounds {options.rounds} is not 1 or more")
    if options.case:
        print(json.dumps(search(Case(*options.case), options.rounds, plan_only=options.plan_only)))
        return
    if options.quick:
        result: dict[str, Any] = {"rows": measure(QUICK, options.rounds)}
    else:
        harp, largest, *rows = measure((HARP, LARGEST, *SCALING), options.rounds)
        result = {
            "harp": {**harp, "ratio": harp["search_seconds"] / HARP_SEARCH_SECONDS},
            "largest": largest,
            "rows": rows,
        }
    if options.json:
        print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
