"""H2's HeteroAuto beside what the paper publishes.

    python scripts/bench_h2.py calibrate --json  # predicted: the best plan of each kind (table 6)
    python scripts/bench_h2.py figures --json    # predicted: mixed clusters (figure 11)
    python scripts/bench_h2.py search --json     # seconds of a search, in fresh processes (table 8)
    python scripts/bench_h2.py ablation --json   # predicted: what each part is worth (table 9)
    python scripts/bench_h2.py heteropp --json   # trained: published pipelines, beside one device
    python scripts/bench_h2.py frozen --json     # trained: a frozen half beside all trained
    python scripts/bench_h2.py foreign --json    # planned: OPT-350M by another tool's profile
    python scripts/bench_h2.py align --json      # run: does alignment find what is wrong (table 1)
    python scripts/bench_h2.py scale --json      # hetjax's own planner on 1,024 and 2,048 chips
    python scripts/bench_h2.py scanned --json    # predicted: the same Llama scanned over and not
    python scripts/bench_h2.py memory --json     # held: predicted, and by XLA; offload's seconds
    python scripts/bench_h2.py virtual --json    # trained: two passes beside 1F1B and the search
    python scripts/bench_h2.py lab --json        # trained: three unlike hosts, mixed and alone
    python scripts/bench_h2.py transports --json # sent: messages by each carrier, and the choice

The predictions are those of the paper's cost model for its own chips: see `h2_chips`, which lists
what is assumed of them. `calibrate` prints these assumptions. `heteropp` trains figure 8's example
and table 6's plans with a tiny model on as many host devices: it is about numbers, not about speed.
`frozen` is `h2_frozen`, with a row for each thing that is measured.
`foreign` plans by a profile file alone, in fresh processes, for every number of microbatches; its
`seconds` are of the clock, `cpu_seconds` of the processor. `lab` (`h2_lab`) and `transports`
(`h2_transports`) bring labs up, and need root.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from bench_planner import LARGEST
from h2_alignment import STEPS, align_rows
from h2_chips import (
    ASSUMPTIONS,
    CHIPS,
    FULL,
    PUBLISHED_CHIPS,
    PUBLISHED_TOKENS,
    Without,
    calibrated,
    strategy,
    uniform,
)
from h2_lab import lab_rows
from h2_memory import WAYS
from h2_pipelines import PIPELINES
from h2_scanned import scanned_rows
from h2_transports import transport_rows
from h2_virtual import RUNTIMES

from hetjax.commands.foreign import names_of_layers
from hetjax.mesh import Cluster
from hetjax.planner import PlanOptions
from hetjax.planner.foreign.foreign_planner import ForeignPlanner
from hetjax.planner.foreign.foreign_profile import read_foreign_profile
from hetjax.planner.h2.heteroauto import ChipStrategy
from hetjax.planner.harp.microbatches import divisors

MIXED: Mapping[str, tuple[Mapping[str, int], int, float | None]] = {
    "A-1": ({"A": 256, "B": 256, "C": 256}, 2**21, 89.56),
    "A-2": ({"A": 256, "B": 256, "C": 256}, 3 * 2**21, 109.03),
    "B-1": ({"A": 256, "B": 256, "C": 256, "D": 256}, 2**21, 77.45),
    "B-2": ({"A": 256, "B": 256, "C": 256, "D": 256}, 2**23, 104.29),
    "C-1": ({"A": 384, "B": 1024}, 2**22, None),
    "C-2": ({"A": 384, "B": 1024}, 2**23, None),
    "D": ({"A": 384, "B": 2048}, 2**23, None),
}
"""Chips of each kind, tokens of a step, and the published speedup ratio (table 7, figure 11)."""

CONFIGS = Path(__file__).resolve().parents[1] / "configs"

FOREIGN_CLUSTERS = ("mixed_rack", "harp_setting1")

FOREIGN_BATCH = 512

PUBLISHED_SECONDS = {"A": 0.62, "B": 5.48, "C": 12.29}


def calibrate_rows() -> Iterator[dict[str, Any]]:
    """The best plan of each kind alone, beside the published one."""
    for name, chip in CHIPS.items():
        flops = calibrated(chip)
        found = strategy({name: PUBLISHED_CHIPS}, PUBLISHED_TOKENS, {name: flops}, is_grouped=False)
        (share,) = found.division.shares
        extra = "recompute" * share.way.repeats + "offload" * share.way.offloads
        throughput = PUBLISHED_TOKENS / found.step_time / PUBLISHED_CHIPS
        stages, width, tensor, published_extra, published = chip.published
        yield {
            "chip": name,
            "flops": flops,
            "plan": [share.way.stages, found.width, share.way.tensor, extra],
            "published_plan": [stages, width, tensor, published_extra],
            "throughput": throughput,
            "published_throughput": published,
        }


def chip_flops() -> dict[str, float]:
    """What a chip of each kind computes."""
    return {name: calibrated(chip) for name, chip in CHIPS.items()}


def figure_rows() -> Iterator[dict[str, Any]]:
    """Mixed clusters beside what their kinds do alone."""
    flops = chip_flops()
    for name, (chips, tokens, published) in MIXED.items():
        found = strategy(chips, tokens, flops)
        alone = sum(count * CHIPS[kind].published[-1] for kind, count in chips.items())
        yield {
            "experiment": name,
            "hetero_speedup_ratio": 100 * tokens / found.step_time / alone,
            "published": published,
            "step_time": found.step_time,
            "width": found.width,
            "groups": _told(found),
        }


def _told(found: ChipStrategy) -> list[list[Any]]:
    """Of each group its kind, tensor parallelism, stages, layers of a stage, and extras."""
    return [
        [
            group.name,
            share.way.tensor,
            share.way.stages,
            share.layers,
            "recompute" * share.way.repeats + "offload" * share.way.offloads,
        ]
        for group, share in zip(found.groups, found.division.shares, strict=True)
    ]


def search_rows(rounds: int) -> Iterator[dict[str, Any]]:
    """Seconds of a search, each in fresh processes."""
    for experiment, mixed in (("A", "A-2"), ("B", "B-2"), ("C", "C-2")):
        runs = [_in_process("one", "--experiment", mixed, "--json") for _ in range(rounds)]
        yield {
            "experiment": experiment,
            "seconds": median(run["seconds"] for run in runs),
            "candidates": runs[0]["candidates"],
            "published_seconds": PUBLISHED_SECONDS[experiment],
            "two_stages_over_one": runs[0]["two_stages_over_one"],
        }


def _in_process(*arguments: str, script: str = "bench_h2.py") -> dict[str, Any]:
    (row,) = _rows_in_process(*arguments, script=script)
    return row


def _rows_in_process(*arguments: str, script: str) -> list[dict[str, Any]]:
    command = [sys.executable, str(Path(__file__).with_name(script)), *arguments]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=3600)
    return [json.loads(line) for line in done.stdout.splitlines()]


def one_rows(experiment: str) -> Iterator[dict[str, Any]]:
    """One search in this process."""
    chips, tokens, _ = MIXED[experiment]
    flops = chip_flops()
    began = time.perf_counter()
    found = strategy(chips, tokens, flops)
    seconds = time.perf_counter() - began
    one = strategy(chips, tokens, flops, is_grouped=False)
    yield {
        "experiment": experiment,
        "seconds": seconds,
        "candidates": found.candidates,
        "two_stages_over_one": found.step_time / one.step_time,
    }


def ablation_rows() -> Iterator[dict[str, Any]]:
    """Table 9's variants, on C-1."""
    chips, tokens, _ = MIXED["C-1"]
    flops = chip_flops()
    variants = {
        "full": (FULL, 100.0),
        "without overlap": (Without(overlap=True), 101.8),
        "without send-receive and all-gather": (Without(scattering=True), 104.8),
        "through hosts (TCP)": (Without(direct=True), 110.1),
    }
    seconds = {
        name: (strategy(chips, tokens, flops, without=without).step_time, published)
        for name, (without, published) in variants.items()
    }
    seconds["uniform stages"] = (uniform(chips, tokens, flops), 126.4)
    for name, (each, published) in seconds.items():
        yield {
            "variant": name,
            "relative_step_time": 100 * each / seconds["full"][0],
            "published": published,
        }


def heteropp_rows() -> Iterator[dict[str, Any]]:
    """Losses of published pipelines beside those of one device."""
    for name in PIPELINES:
        yield _in_process(name, script="h2_pipelines.py")


def frozen_rows() -> Iterator[dict[str, Any]]:
    """A model of which a half is frozen: bits, step time and memory."""
    yield from _rows_in_process("--json", script="h2_frozen.py")


def foreign_rows(rounds: int) -> Iterator[dict[str, Any]]:
    """Plans by the example profile of another tool, each in fresh processes."""
    for cluster in FOREIGN_CLUSTERS:
        runs = [_in_process("foreign-one", "--cluster", cluster, "--json") for _ in range(rounds)]
        seconds = {name: median(run[name] for run in runs) for name in ("seconds", "cpu_seconds")}
        yield {**runs[0], **seconds}


def foreign_one_rows(cluster: str) -> Iterator[dict[str, Any]]:
    """One plan by the example profile, in this process."""
    devices = Cluster.from_file(CONFIGS / "clusters" / f"{cluster}.yaml")
    counts = divisors(FOREIGN_BATCH)
    began, cpu_began = time.perf_counter(), time.process_time()
    profile = read_foreign_profile(CONFIGS / "foreign" / "opt_350m.json")
    found = ForeignPlanner(profile, devices, PlanOptions()).find(FOREIGN_BATCH, counts)
    seconds, cpu_seconds = time.perf_counter() - began, time.process_time() - cpu_began
    yield {
        "model": profile.model,
        "cluster": cluster,
        "devices": devices.num_devices,
        "seconds": seconds,
        "cpu_seconds": cpu_seconds,
        "numbers_of_microbatches": len(counts),
        "candidates": found.candidates,
        "num_microbatches": found.plan.pipeline.num_microbatches,
        "step_time": found.plan.predicted.step_time,
        "stages": [
            [names_of_layers(profile.layers[slice(*stage.layers)]), stage.devices_text, width]
            for stage in found.plan.stages
            for width in [list(stage.mesh_shape)]
        ],
        "tried": found.step_times,
    }


def scale_rows() -> Iterator[dict[str, Any]]:
    """Seconds, memory and the plan's step time of hetjax's own planner, in fresh processes."""
    for nodes in (LARGEST.nodes, 2 * LARGEST.nodes):
        case = map(str, LARGEST._replace(nodes=nodes))
        row = _in_process(
            "--rounds", "1", "--plan-only", "--case", *case, script="bench_planner.py"
        )
        yield {**row, "seconds": row["profile_seconds"] + row["search_seconds"]}


def memory_rows() -> Iterator[dict[str, Any]]:
    """What stages hold that make layers again or offload, by prediction and by XLA; its cost."""
    for model in ("long", "wide"):
        for way in WAYS:
            yield from _rows_in_process(way, "--model", model, "--seconds", script="h2_memory.py")
    yield from _rows_in_process(script="h2_offload_cost.py")


def virtual_rows() -> Iterator[dict[str, Any]]:
    """Schedules of one pass and of two: simulated, played, and run in one process and on Ray."""
    for runtime in RUNTIMES:
        yield from _rows_in_process(runtime, "--json", script="h2_virtual.py")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parts = {
        "calibrate": calibrate_rows,
        "figures": figure_rows,
        "search": lambda: search_rows(options.rounds),
        "ablation": ablation_rows,
        "heteropp": heteropp_rows,
        "frozen": frozen_rows,
        "foreign": lambda: foreign_rows(options.rounds),
        "foreign-one": lambda: foreign_one_rows(options.cluster),
        "align": lambda: align_rows(options.steps),
        "scale": scale_rows,
        "scanned": scanned_rows,
        "memory": memory_rows,
        "virtual": virtual_rows,
        "lab": lambda: lab_rows(options.rounds),
        "transports": lambda: transport_rows(options.rounds),
        "one": lambda: one_rows(options.experiment),
    }
    parser.add_argument("part", choices=parts)
    parser.add_argument("--json", action="store_true", help="a row a line, as JSON")
    parser.add_argument("--rounds", type=int, default=5, help="processes whose median counts")
    parser.add_argument("--steps", type=int, default=STEPS, help="training steps of `align`")
    parser.add_argument("--experiment", choices=MIXED, default="A-1", help="of `one`")
    parser.add_argument(
        "--cluster", choices=FOREIGN_CLUSTERS, default="mixed_rack", help="of `foreign-one`"
    )
    options = parser.parse_args(arguments)
    if options.part == "calibrate" and not options.json:
        print("Assumed:", *ASSUMPTIONS, sep="\n- ")
    for row in parts[options.part]():
        print(json.dumps(row) if options.json else row, flush=True)


if __name__ == "__main__":
    main()
